import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.data.packing import Packing, pack

EOD = 3


def slow_row(window, sample, packing):
    """One token at a time."""
    rows = {name: [] for name in ("tokens", "labels", "positions", "documents", "token_ids")}
    position = document = 0
    for place in range(packing.seq_length):
        token, following = window[place], window[place + 1]
        rows["tokens"].append(token)
        rows["labels"].append(-100 if packing.eod_mask_loss and token == EOD else following)
        rows["positions"].append(position if packing.reset_position_ids else place)
        rows["documents"].append(document if packing.reset_attention_mask else 0)
        rows["token_ids"].append(sample * packing.seq_length + place)
        position += 1
        if token == EOD:
            position, document = 0, document + 1
    return rows


@settings(max_examples=100)
@given(
    windows=st.integers(1, 12).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 5), min_size=length + 1, max_size=length + 1),
            min_size=1,
            max_size=3,
        )
    ),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    first=st.integers(0, 2**40),
)
def test_packing_is_exact(windows, flags, first):
    packing = Packing(len(windows[0]) - 1, EOD, *flags)
    samples = np.arange(first, first + len(windows))
    batch = pack(np.array(windows), samples, packing)
    for row, (window, sample) in enumerate(zip(windows, samples.tolist(), strict=True)):
        for name, expected in slow_row(window, sample, packing).items():
            array = getattr(batch, f"{name}_BS")
            assert array.dtype == np.int64
            assert array[row].tolist() == expected, name


@pytest.mark.parametrize("flag", [False, True])
def test_arrays_are_writable_and_apart(flag):
    windows = np.arange(10).reshape(2, 5)
    batch = pack(windows, np.arange(2), Packing(4, EOD, flag, flag, flag))
    before = batch.labels_BS.copy()
    assert batch.loss_weights_BS is None
    for array in (a for a in vars(batch).values() if a is not None):
        assert array.flags.c_contiguous and array.flags.writeable
    batch.tokens_BS[:] = 0
    assert (batch.labels_BS == before).all()
