"""Validation sets: which there are, what an evaluation reads of each, and what is refused."""

import shlex

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.data import DataConfig
from fivefold.config.training import TrainingConfig
from fivefold.data.dataset import Corpus, Dataset
from fivefold.data.loader import Loader
from fivefold.data.mixture import parse_named_paths
from fivefold.data.packing import IGNORED, Packing
from fivefold.data.prepare import PreparedData, prepare
from fivefold.data.validation import validation_sets
from fivefold.errors import ConfigError, DataError

LENGTH = 8


def corpus(write_documents, name, samples, weight=None):
    """A corpus whose validation split, with all of it, has this many samples."""
    return Corpus(name, write_documents([list(range(1, samples * LENGTH + 1)), [0]]), weight)


@pytest.fixture
def data(tokenizer, write_documents):
    def data(*corpora, split="0,1", **named):
        named = {name: corpus(write_documents, name, count) for name, count in named.items()}
        every = corpora or (corpus(write_documents, "all", 50),)
        return PreparedData(tokenizer, tuple(every), Packing(LENGTH, 0), split, 1, named)

    return data


def training(**options):
    return TrainingConfig(global_batch_size=4, eval_interval=1, **options)


def read(data, **options):
    return [(s.name, s.batches, s.samples) for s in validation_sets(training(**options), data)]


def test_the_split_comes_first_unless_it_has_no_share_and_others_have_names(data):
    assert read(data(code=16)) == [("", 4, 16), ("code", 4, 16)]
    assert read(data(split="1", code=16)) == [("code", 4, 16)]
    assert read(data(), eval_iters=9) == [("", 9, 36)]
    with pytest.raises(DataError, match="valid split of all is too short"):
        read(data(split="1"))


def test_every_named_set_that_is_too_small_is_told_and_what_is_offered_works(data):
    sets = data(some=9, few=3, enough=16)
    with pytest.raises(ConfigError) as error:
        read(sets)
    some, few = error.value.mistakes
    assert "some has 9 samples" in some.what and "few has 3 samples" in few.what
    assert some.works == ("--eval-iters 2", "--full-validation")
    assert few.works == ("--full-validation",)
    assert read(data(some=9), eval_iters=2)[1] == ("some", 2, 8)
    whole = [("some", 3, 9), ("few", 1, 3), ("enough", 4, 16)]
    assert read(sets, full_validation=True)[1:] == whole
    with pytest.raises(DataError, match=r"validation set none: .*too short"):
        read(data(none=0))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    weights=st.lists(st.sampled_from([None, 0.1, 0.7, 5]), min_size=3, max_size=3),
    dp=st.integers(1, 4),
    mbs=st.integers(1, 3),
    accumulated=st.integers(1, 2),
)
def test_a_whole_pass_reads_each_sample_once(
    tokenizer, write_documents, sizes, weights, dp, mbs, accumulated
):
    """Over all ranks, whatever the batch and the weights; the labels say which samples count."""
    corpora = [
        corpus(write_documents, f"{n}", size, weight)
        for n, (size, weight) in enumerate(zip(sizes, weights, strict=False))
    ]
    corpora = [Corpus(c.name, c.data, w) for c, w in zip(corpora, weights, strict=False)]
    prepared = PreparedData(tokenizer, tuple(corpora), Packing(LENGTH, 0), "0,1", 1)
    size = dp * mbs * accumulated
    options = TrainingConfig(global_batch_size=size, eval_interval=1, full_validation=True)
    (found,) = validation_sets(options, prepared)
    assert found.samples == sum(sizes) and (found.batches - 1) * size < sum(sizes)
    read = []
    for rank in range(dp):
        loader = Loader(
            found.dataset,
            batch_sizes=BatchSizes(size),
            micro_batch_size=mbs,
            dp_rank=rank,
            dp_size=dp,
            prefetch=False,
            end=found.samples,
        )
        for batch in [each for _ in range(found.batches) for each in loader.next_batch()]:
            rows = zip(batch.tokens_BS, batch.labels_BS, batch.token_ids_BS, strict=True)
            for tokens, labels, ids in rows:
                sample = ids[0] // LENGTH
                assert (sample < found.samples) == (labels != IGNORED).any()
                if sample < found.samples:
                    read.append(found.dataset.locate(sample))
                    assert tokens[0] == found.dataset.window(sample)[0][0]
    assert sorted(read) == [(c, n) for c, size in enumerate(sizes) for n in range(size)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("a.txt", "has no name"),
        ("folder/a=b.txt", "has no name"),
        ("=a.txt", "a name that is not letters"),
        ("-x=a.txt", "a name that is not letters"),
        ("a=", "has no path"),
        ("a=b a=c", "two entries of valid_data_path are called a: b and c"),
        ("0.3 a=b", "has no name"),
    ],
)
def test_entries_that_are_no_names_and_paths(words, said):
    with pytest.raises(ConfigError, match=said) as error:
        parse_named_paths(words.split())
    for mistake in error.value.mistakes:
        if mistake.attempt:
            parse_named_paths(shlex.split(mistake.attempt)[1:])


def test_all_mistakes_of_the_data_come_at_once():
    config = DataConfig(split="x", valid_data_path=("a", "b=", "c=d"))
    with pytest.raises(ConfigError) as error:
        prepare(config, LENGTH, -1)
    assert len(error.value.mistakes) == 4


def test_sets_are_tokenised_by_the_tokenizer_of_the_corpus_and_kept(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat " * 200)
    (tmp_path / "b.txt").write_text("zebras quiz" * 50)
    words = {"tokenizer_vocab_size": 280, "data_cache_path": f"{tmp_path}/cache"}
    alone = prepare(DataConfig((f"{tmp_path}/a.txt",), **words), LENGTH, 1)
    said = []
    beside = DataConfig((f"{tmp_path}/a.txt",), (f"b={tmp_path}/b.txt",), **words)
    found = prepare(beside, LENGTH, 1, said.append)
    assert found.tokenizer.digest == alone.tokenizer.digest and len(said) == 2
    assert found.train.fingerprint == alone.train.fingerprint
    assert found.tokenizer.decode(found.named["b"].data.tokens[:-1]) == "zebras quiz" * 50
    prepare(beside, LENGTH, 1, said.append)
    assert len(said) == 2
    whole = validation_sets(training(full_validation=True), found)[1].dataset
    assert isinstance(whole, Dataset)
    tokens = np.concatenate([whole.window(n)[0][:-1] for n in range(whole.num_samples)])
    np.testing.assert_array_equal(tokens, found.named["b"].data.tokens[: len(tokens)])
