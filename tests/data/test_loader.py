import json
import os
import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.batch_sizes import BatchSizes
from fivefold.data.dataset import Corpus, Dataset
from fivefold.data.loader import Loader
from fivefold.data.packing import Packing
from fivefold.errors import DataError


@pytest.fixture(scope="module")
def dataset(tokenizer, write_documents):
    return build(tokenizer, write_documents)


def build(tokenizer, write_documents, seed=7, seq_length=8, name="first", **rules):
    corpora = [
        Corpus(name, write_documents([list(range(1, 200)), [0]])),
        Corpus("second", write_documents([list(range(50, 150)), [0]])),
    ]
    packing = Packing(seq_length, 0, **rules)
    return Dataset(corpora, tokenizer, packing, split="1", part="train", seed=seed, shuffle=True)


GROWING = BatchSizes(full=36, start=12, increment=12, ramp=60)


def loader(dataset, gbs=12, mbs=1, rank=0, dp=1, *, sizes=None, after=0, **options):
    made = Loader(
        dataset,
        batch_sizes=sizes or BatchSizes(gbs),
        micro_batch_size=mbs,
        dp_rank=rank,
        dp_size=dp,
        **{"prefetch": False} | options,
    )
    made.seek(after)
    return made


def joined(microbatches):
    """All rows of some microbatches, in order, under each name that they have."""
    return {
        name: np.concatenate([vars(batch)[name] for batch in microbatches])
        for name, array in vars(microbatches[0]).items()
        if array is not None
    }


def assert_same(left, right):
    left, right = joined(left), joined(right)
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


@settings(max_examples=30)
@given(
    layout=st.sampled_from([(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (12, 1), (6, 1)]),
    step=st.integers(0, 9),
    sizes=st.sampled_from([BatchSizes(12), GROWING]),
)
def test_the_global_batch_does_not_depend_on_the_layout(dataset, layout, step, sizes):
    dp, mbs = layout
    same = {"sizes": sizes, "after": 12 * step}
    whole = loader(dataset, **same).next_batch()
    loaders = [loader(dataset, mbs=mbs, rank=r, dp=dp, **same) for r in range(dp)]
    ranks = [each.next_batch() for each in loaders]
    size = sizes.at(12 * step)
    assert len(whole) == size == loaders[0].consumed_samples - 12 * step
    assert all(len(batches) == size // dp // mbs for batches in ranks)
    assert_same(loaders[0].batch_of(dp - 1), ranks[-1])
    assert all(batch.tokens_BS.shape == (mbs, 8) for batches in ranks for batch in batches)
    assert_same(whole, [batch for batches in ranks for batch in batches])


@settings(max_examples=20)
@given(
    stop=st.integers(0, 8),
    prefetch=st.booleans(),
    sizes=st.sampled_from([BatchSizes(12), GROWING]),
)
def test_resuming_anywhere_gives_the_batches_that_would_have_come(dataset, stop, prefetch, sizes):
    whole = loader(dataset, sizes=sizes)
    expected = [whole.next_batch() for _ in range(9)]
    with closing(loader(dataset, sizes=sizes, prefetch=prefetch)) as first:
        for step in range(stop):
            assert_same(first.next_batch(), expected[step])
        state = json.loads(json.dumps(first.state_dict()))
    with closing(loader(dataset, sizes=sizes, prefetch=prefetch)) as second:
        second.next_batch()
        second.load_state_dict(state)
        for step in range(stop, 9):
            assert_same(second.next_batch(), expected[step])


def test_resuming_with_another_batch_size_misses_nothing(dataset):
    first = loader(dataset, gbs=12)
    rows = [first.next_batch()]
    second = loader(dataset, gbs=6, mbs=3)
    second.load_state_dict(first.state_dict())
    rows += [second.next_batch()]
    ids = joined([batch for batches in rows for batch in batches])["token_ids_BS"][:, 0]
    assert ids.tolist() == [8 * sample for sample in range(18)]


def test_seek_goes_back_to_fixed_samples(dataset):
    with closing(loader(dataset, prefetch=True)) as validation:
        first = validation.next_batch()
        validation.next_batch()
        validation.seek(0)
        assert_same(validation.next_batch(), first)


def test_other_data_is_not_resumed(dataset, tokenizer, write_documents):
    state = loader(dataset, after=24).state_dict()
    changed = {"seed": 8, "seq_length": 4, "eod_mask_loss": False}
    other = loader(build(tokenizer, write_documents, **changed))
    with pytest.raises(DataError) as error:
        other.load_state_dict(state)
    message = str(error.value)
    assert "eod_mask_loss: was true, is false" in message
    assert "cannot resume after 24 samples" in message
    assert "seed: was 7, is 8" in message and "seq_length: was 8, is 4" in message
    assert "tokenizer" not in message
    assert other.consumed_samples == 0


def data_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fivefold-data")]


def test_the_thread_starts_with_the_first_batch_and_ends_with_close(dataset):
    before = len(data_threads())
    ahead = loader(dataset, prefetch=True)
    assert len(data_threads()) == before
    ahead.next_batch()
    assert len(data_threads()) == before + 1
    ahead.close()
    ahead.close()
    assert len(data_threads()) == before
    assert joined(ahead.next_batch())["token_ids_BS"][0, 0] == 12 * 8
    ahead.close()


def test_prefetch_waits_less_than_it_reads(dataset):
    gate = threading.Event()

    class Slow:
        def microbatch(self, indices):
            gate.wait(0.2)
            return dataset.microbatch(indices)

    with closing(loader(Slow(), gbs=1, prefetch=True)) as ahead:
        ahead.next_batch()
        assert ahead.data_wait_s >= 0.2
        ahead._ahead.result()  # the training step takes its time
        ahead.next_batch()
        assert ahead.data_wait_s < 0.1
        gate.set()


def test_an_error_in_the_thread_reaches_the_caller(dataset):
    class Broken:
        def microbatch(self, indices):
            if indices[0] > 0:
                raise DataError("broken disk")
            return dataset.microbatch(indices)

    with closing(loader(Broken(), gbs=1, prefetch=True)) as ahead:
        ahead.next_batch()
        with pytest.raises(DataError, match="broken disk"):
            ahead.next_batch()


def test_a_loader_survives_a_fork_before_use(dataset):
    ahead = loader(dataset, prefetch=True)
    child = os.fork()
    if child == 0:
        try:
            ahead.next_batch()
            ahead.next_batch()
            ahead.close()
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    ahead.next_batch()
    ahead.close()


@pytest.mark.parametrize("name", ["second", "a: b", "x, weight 2: 3"])
def test_data_that_has_moved_is_the_same(dataset, tokenizer, write_documents, name):
    state = json.loads(json.dumps(loader(dataset, after=24).state_dict()))
    moved = loader(build(tokenizer, write_documents, name=name))
    moved.load_state_dict(state)
    assert moved.consumed_samples == 24
    other = loader(build(tokenizer, write_documents, seed=8, name=name))
    with pytest.raises(DataError, match="seed: was 7, is 8\n  it resumes"):
        other.load_state_dict(state)
