"""Garbage is collected when a run says so, and left to Python afterwards."""

import gc
from unittest.mock import patch

import pytest

from fivefold.config.training import TrainingConfig
from fivefold.train.machine.garbage import collecting


@pytest.mark.parametrize(("interval", "steps"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_manual_collections(interval: int, steps: list[int]) -> None:
    training = TrainingConfig(manual_gc=True, manual_gc_interval=interval)
    collected, step = [], 0
    with (
        patch.object(gc, "collect", lambda: collected.append(step)),
        collecting(training) as after,
    ):
        assert not gc.isenabled()
        for step in range(1, 5):
            after(step)
    assert collected == [0, *steps]
    assert gc.isenabled()


def test_python_collects_otherwise() -> None:
    with collecting(TrainingConfig()) as after:
        assert gc.isenabled()
        after(1)


def test_a_failed_run_gives_it_back() -> None:
    with pytest.raises(ValueError), collecting(TrainingConfig(manual_gc=True)):
        raise ValueError
    assert gc.isenabled()
