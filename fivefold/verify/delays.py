"""Random delays in the streams of a GPU, which reveal missing waits."""

import random
from collections.abc import Mapping
from typing import Any

import torch

from fivefold.audit.watch import Watch

SHARE = 0.03
"""Share of the operations that are delayed."""
CYCLES = 1_500_000
"""The longest delay, in cycles of the GPU: some 0.8 ms."""


class Delays(Watch):
    """Delays the current stream at random before an operation, while it is entered.

    A program with all necessary waits computes the same, only later. One with a missing wait reads
    stale memory, which without delays it would hardly ever do.

    Args:
        seed: what it draws from.
        rank: rank of this process; each draws its own.
    """

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__()
        self._random = random.Random(f"{seed} {rank}")

    def pause(self) -> None:
        """Delay the current stream, or not."""
        if self._random.random() < SHARE:
            torch.cuda._sleep(self._random.randrange(CYCLES))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.pause()
        return super()._run(func, args, kwargs)
