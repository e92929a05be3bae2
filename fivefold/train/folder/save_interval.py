"""When a run saves: at a fixed interval, or at the interval that loses the least time."""

import time
from collections.abc import Callable

from fivefold.reliability import DEVICE_MTBF, best_interval
from fivefold.units import human_seconds

FIRST = 5
"""Steps before the first two saves of `auto`, which show what a save and a step cost."""


class SaveInterval:
    """The steps at which a run saves.

    With `auto`, the cost of a save decides how far away the next but one is. It is Daly's best
    interval for the mean time between failures of all devices, at Llama 3's rate
    (`reliability.best_interval`). An asynchronous save that has to wait for the one before costs
    more, which makes saves rarer.

    Args:
        steps: steps between saves, 0 for none; None: `auto`.
        step: step after which this start begins.
        devices: number of devices, all of which must work.
        agree: gives every rank the first rank's result of a function.

    Attributes:
        held: seconds for which the latest save held the run up; None if there was none.
    """

    def __init__(
        self, steps: int | None, step: int, devices: int, agree: Callable[[Callable[[], int]], int]
    ) -> None:
        self._steps, self._mtbf, self._agree = steps, DEVICE_MTBF / devices, agree
        self.held: float | None = None
        self._begun, self._since = step + 1, 0.0
        self._next = step + FIRST

    def due(self, step: int) -> bool:
        """Whether to save after this step; call it after every one."""
        if self._steps is not None:
            return self._steps > 0 and step % self._steps == 0
        if step == self._begun:  # the first step after a start or a save takes longer
            self._since = time.perf_counter()
        return step >= self._next

    def plan(self, step: int) -> str:
        """Choose the save after the one that is due after this step; collective with `auto`.

        Returns:
            When it is due, and why; empty where nothing is chosen yet, or is given.
        """
        if self._steps is not None:
            return ""
        each = (time.perf_counter() - self._since) / (step - self._begun)
        self._begun, self._next = step + 1, step + FIRST
        if self.held is None:
            return ""
        wait = best_interval(self._mtbf, self.held)
        steps = self._agree(lambda: max(FIRST, round(wait / each)))
        self._next = step + steps
        cost, fails = human_seconds(self.held), human_seconds(self._mtbf)
        return (
            f"the checkpoint after this one comes in {steps:,} steps, "
            f"{human_seconds(steps * each)}: each holds the run up for {cost}, and a run of so "
            f"many devices fails once in {fails}"
        )
