"""CPU seconds that mean the same on a slow machine as on a fast one."""

import time
import timeit
from collections.abc import Callable

USUAL_SECONDS = 0.02
"""In which the processor of which the tests speak adds up half a million squares."""


def usual_seconds(work: Callable[[], object], *, repeat: int = 1) -> float:
    """CPU seconds of `work` on that processor: the fewest of `repeat` runs.

    This processor is measured before and after each, since another job may share it.
    """
    measured, found = [_squares()], []
    for _ in range(repeat):
        seconds = timeit.timeit(work, timer=time.process_time, number=1)
        measured.append(_squares())
        found.append(seconds * USUAL_SECONDS * 2 / sum(measured[-2:]))
    return min(found)


def _squares() -> float:
    def add() -> int:
        return sum(n * n for n in range(500_000))

    return min(timeit.repeat(add, timer=time.process_time, number=1, repeat=3))
