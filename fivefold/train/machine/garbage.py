"""Collects Python's garbage when the run says so.

Left to itself, each rank's interpreter collects at a time of its own, for tens of milliseconds in
which all other ranks wait; together they wait once.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fivefold.config.training import TrainingConfig


@contextmanager
def collecting(training: TrainingConfig) -> Iterator[Callable[[int], None]]:
    """With `manual_gc`, collect garbage now, and in the function that is yielded, called after each
    step."""
    if not training.manual_gc:
        yield lambda step: None
        return
    interval = training.manual_gc_interval

    def after(step: int) -> None:
        if interval and step % interval == 0:
            gc.collect()

    gc.collect()
    gc.disable()
    try:
        yield after
    finally:
        gc.enable()
