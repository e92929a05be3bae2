from functools import cache
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data import corpus
from fivefold.data.borders import last_border
from fivefold.data.corpus import BYTE_ORDER_MARK, pieces
from fivefold.data.indexed import IndexedTokens
from fivefold.data.prepare import build_index
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError
from tests.data.kinds import CUT, WHOLE, definition_of, texts


@cache
def tokenizer_of(name, model="BPE"):
    return Tokenizer(definition_of(name, model), name)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("borders") / "a.txt"


def in_pieces(path, text, size, whole):
    path.write_bytes(text.encode())
    with mock.patch.object(corpus, "PIECE_BYTES", size):
        return [piece for piece, _ in pieces(path, whole=whole)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@settings(max_examples=30)
@given(text=texts, size=st.integers(1, 60))
def test_a_text_in_pieces_has_the_tokens_of_the_whole(path, name, text, size):
    tokenizer = tokenizer_of(name)
    parts = in_pieces(path, text, size, whole=not tokenizer.may_cut)
    try:
        (whole,) = tokenizer.encode_batch([text.removeprefix(BYTE_ORDER_MARK)])
    except DataError:  # `tokenizers` panics where added tokens that take spaces meet
        return
    encoded = tokenizer.encode_batch(parts)
    assert [i for ids in encoded for i in ids.tolist()] == whole.tolist()


@settings(max_examples=150)
@given(text=texts, cuts=st.lists(st.integers(0, 80), max_size=4))
def test_a_border_is_one_wherever_the_text_around_it_ends(text, cuts):
    tokenizers = [tokenizer_of(name) for name in CUT]
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    borders = [start + last_border(text[start:end]) for start, end in pairwise(edges)]
    places = sorted(
        {0, len(text), *(b for b, edge in zip(borders, edges, strict=False) if b > edge)}
    )
    parts = [text[start:end] for start, end in pairwise(places)]
    for tokenizer in tokenizers:
        (whole,), encoded = tokenizer.encode_batch([text]), tokenizer.encode_batch(parts)
        assert [i for ids in encoded for i in ids.tolist()] == whole.tolist()


def test_which_tokenizers_get_pieces():
    assert {name for name in [*CUT, *WHOLE] if tokenizer_of(name).may_cut} == set(CUT)
    assert not tokenizer_of("Metaspace, first", "Unigram").may_cut
    assert tokenizer_of("BERT", "Unigram").may_cut


@pytest.mark.parametrize(
    ("text", "border"),
    [
        ("", 0),
        ("\n", 0),
        ("one\n", 3),
        ("one\ntwo", 3),
        ("one\r\ntwo", 3),
        ("one.\ntwo.\nthree", 10),
        ("if a:\n    b", 0),
        ("f(\n/", 0),
        ("f(\n\nx", 0),
        ("一。\n二。\n", 3),
        ("one\n  \n", 3),
    ],
)
def test_where_a_text_is_cut(text, border):
    assert last_border(text) == border


@pytest.mark.parametrize("name", ["Metaspace, first", "Llama 2", "GPT-2", "T5"])
def test_a_long_file_is_tokenised_as_a_whole(name, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_BYTES", 100)
    text = "the a b\n\n  don't, the\r\nfoo.\nThe a\n" * 30
    (tmp_path / "a.txt").write_bytes(text.encode())
    tokenizer = tokenizer_of(name)
    build_index([tmp_path / "a.txt"], tokenizer, tmp_path / "x")
    data = IndexedTokens(tmp_path / "x")
    (whole,) = tokenizer.encode_batch([text])
    np.testing.assert_array_equal(data.tokens, [*whole, tokenizer.eod_id])
    assert data.num_documents == data.num_sequences == 1
