"""CPU seconds that mean the same on a slow machine as on a fast one."""

import time
import timeit
from collections.abc import Callable

USUAL_SECONDS = 0.02
"""In which the processor of which the tests speak adds up half a million squares."""


def usual_seconds(work: Callable[[], object], *, repeat: int = 1) -> float:
    """CPU seconds of `work` on that processor: the fastest of `repeat` runs.

    This processor is measured before and after, since another job may share it.
    """
    before = _squares()
    seconds = min(timeit.repeat(work, timer=time.process_time, number=1, repeat=repeat))
    return seconds * USUAL_SECONDS * 2 / (before + _squares())


def _squares() -> float:
    def add() -> int:
        return sum(n * n for n in range(500_000))

    return min(timeit.repeat(add, timer=time.process_time, number=1, repeat=3))
