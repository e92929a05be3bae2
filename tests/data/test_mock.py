"""Tokens that are made up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.config.training import MOCK, DataConfig
from fivefold.data.mock import NUM_TOKENS, CountedTokens
from fivefold.data.order import mixed
from fivefold.data.prepare import PreparedData, prepare

VOCABULARY = 30_000


@pytest.fixture
def prepared(tmp_path):
    settings = DataConfig(
        (MOCK,), tokenizer_vocab_size=VOCABULARY, data_cache_path=f"{tmp_path}/cache"
    )
    yield prepare(settings, 48, 7)
    assert not [*(tmp_path / "cache").iterdir()]


@given(
    st.integers(0, NUM_TOKENS), st.integers(0, 3000), st.integers(1, 1 << 30), st.integers(2, 9000)
)
def test_a_slice_holds_what_each_of_its_places_does(start, length, step, vocab_size):
    tokens = CountedTokens(vocab_size)
    part = slice(start, start + length * step, step)
    places = range(*part.indices(NUM_TOKENS))
    assert len(tokens[part]) == len(places)
    for place in (*places[:3], *places[-3:]):
        expected = (mixed(place // 1024) + place % 1024) % (vocab_size - 1)
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


def test_splits_differ_and_numbers_are_read_and_written(prepared: PreparedData):
    train, valid = (part.window(0)[0].tolist() for part in (prepared.train, prepared.valid))
    assert train != valid
    tokenizer = prepared.tokenizer
    assert tokenizer.vocab_size == VOCABULARY
    text = tokenizer.decode(train)
    assert text.split() == [str(token) for token in train]
    assert tokenizer.encode_batch([text])[0].tolist() == train
