"""Tokens that are made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from fivefold.config.data import MOCK, DataConfig
from fivefold.data.mixture import grouped
from fivefold.data.mock import NUM_TOKENS, CountedTokens, number_tokenizer
from fivefold.data.order import mixed
from fivefold.data.paths import BUILTIN
from fivefold.data.prepare import PreparedData, prepare
from fivefold.data.prompts import encode_prompt
from fivefold.data.rules import checked_sources
from fivefold.data.tokenizer import END_OF_DOCUMENT
from fivefold.errors import DataError

VOCABULARY = 30_000


@pytest.fixture
def prepared(tmp_path):
    settings = DataConfig(
        (MOCK,), tokenizer_vocab_size=VOCABULARY, data_cache_path=f"{tmp_path}/cache"
    )
    yield prepare(settings, 48, 7)
    assert not (tmp_path / "cache").exists()


@given(
    st.integers(0, NUM_TOKENS),
    st.integers(0, 3000),
    st.integers(1, 1 << 30),
    st.integers(2, 9000),
    st.floats(0, 1, exclude_max=True),
)
def test_a_slice_holds_what_each_of_its_places_does(start, length, step, vocab_size, end):
    eod_id = int(end * vocab_size)
    numbers = [number for number in range(vocab_size) if number != eod_id]
    tokens = CountedTokens(vocab_size, eod_id)
    part = slice(start, start + length * step, step)
    places = range(*part.indices(NUM_TOKENS))
    assert len(tokens[part]) == len(places)
    for place in (*places[:3], *places[-3:]):
        expected = numbers[(mixed(place // 1024) + place % 1024) % len(numbers)]
        index = places.index(place)
        assert tokens[part][index] == expected
        assert tokens[place : place + 1].tolist() == [expected]


def test_samples_are_whole_documents_that_count(prepared: PreparedData):
    batch = prepared.train.microbatch(range(40))
    assert (batch.documents_BS == 0).all() and (batch.labels_BS >= 0).all()
    assert (batch.positions_BS == np.arange(48)).all()
    follows = (batch.labels_BS - batch.tokens_BS) % (VOCABULARY - 1) == 1
    assert follows.mean() > 0.99
    assert len({tuple(row) for row in batch.tokens_BS}) > 30
    assert batch.tokens_BS.max() < VOCABULARY - 1 == prepared.tokenizer.eod_id


@pytest.mark.parametrize("place", [0, 5, 260])
def test_the_end_of_documents_is_left_out_wherever_a_tokenizer_has_it(place, tmp_path):
    names = [f"t{number}" for number in range(260)]
    names.insert(place, END_OF_DOCUMENT)
    model = models.WordLevel({name: token for token, name in enumerate(names)})
    Backend(model).save(str(tmp_path / "tokenizer.json"))
    prepared = prepare(DataConfig((MOCK,), tokenizer_model=str(tmp_path)), 600, 7)
    batch = prepared.train.microbatch(range(8))
    assert prepared.tokenizer.eod_id == place
    assert (batch.documents_BS == 0).all() and (batch.labels_BS >= 0).all()
    assert {*batch.tokens_BS.flat} == {*range(261)} - {place}


@pytest.mark.parametrize("name", [MOCK, BUILTIN])
@pytest.mark.parametrize("end", [".bin", ".idx"])
def test_a_file_of_its_name_does_not_take_its_place(name, end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}{end}").touch()
    (source,) = checked_sources(DataConfig((name,)), 1)
    (group,) = grouped([source])
    assert (group.prefix, bool(group.files)) == (None, name == BUILTIN)


def test_splits_differ_and_numbers_are_read_and_written(prepared: PreparedData):
    train, valid = (part.window(0)[0].tolist() for part in (prepared.train, prepared.valid))
    assert train != valid
    tokenizer = prepared.tokenizer
    assert tokenizer.vocab_size == VOCABULARY
    text = tokenizer.decode(train)
    assert text.split() == [str(token) for token in train]
    assert tokenizer.encode_batch([text])[0].tolist() == train


def test_a_prompt_that_no_token_stands_for_is_answered_by_one_that_can_be_typed() -> None:
    tokenizer = number_tokenizer(8)
    with pytest.raises(DataError, match=r"a text of its first tokens: '0 1 2 3'$"):
        encode_prompt(tokenizer, "what is it?")
    assert encode_prompt(tokenizer, "0 1 2 3") == [0, 1, 2, 3]
