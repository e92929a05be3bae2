import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.tokenizer import END_OF_DOCUMENT_NAMES, Tokenizer
from fivefold.errors import DataError


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_survives(tokenizer, text):
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.decode(ids) == text
    assert ids.dtype == np.uint16
    assert tokenizer.eod_id not in ids


def test_a_document_that_spells_the_end_of_a_document_does_not_end(tokenizer):
    text = "before <|endoftext|> after"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([tokenizer.eod_id]) == "<|endoftext|>"


def test_the_same_corpus_gives_the_same_vocabulary():
    # many pairs of equal counts
    texts = [a + b + c for a in "abcde" for b in "klmno" for c in "vwxyz"]
    first, second = Tokenizer.train(texts, 290), Tokenizer.train(iter(texts), 290)
    assert first.digest == second.digest
    assert first.vocab_size == 290
    assert Tokenizer.train(texts[:60], 290).digest != first.digest


def test_saved_and_loaded_it_encodes_alike(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        again = Tokenizer.load(path)
        assert (again.digest, again.eod_id) == (tokenizer.digest, tokenizer.eod_id)
        np.testing.assert_array_equal(
            again.encode_batch(["the mat"])[0], tokenizer.encode_batch(["the mat"])[0]
        )


def tokenizer_json(*special):
    tokens = [
        {"id": i, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, name in enumerate(special)
    ]
    vocab = {name: i for i, name in enumerate([*special, "a", "b"])}
    return json.dumps(
        {"version": "1.0", "added_tokens": tokens}
        | dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
        | {"model": {"type": "WordLevel", "vocab": vocab, "unk_token": special[0]}}
    )


@pytest.mark.parametrize("name", END_OF_DOCUMENT_NAMES)
def test_the_end_of_a_document_goes_by_many_names(name, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("<unk>", "<pad>", name), encoding="utf-8")
    assert Tokenizer.load(path).eod_id == 2


def test_llama_3_ends_a_document_not_a_turn(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer_json("<unk>", "<|eot_id|>", "<|end_of_text|>"), encoding="utf-8")
    assert Tokenizer.load(path).eod_id == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no tokenizer at .*tokenizer.json: No such file"),
        (b"\x0a\x0e\xff", "byte 2 is not UTF-8"),
        (b'{"version": "1.0"', "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (tokenizer_json("<unk>", "<pad>").encode(), "its special tokens: <unk> <pad>"),
    ],
)
def test_broken_files_are_named(content, message, tmp_path):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        Tokenizer.load(path)
    assert str(path) in str(error.value)
