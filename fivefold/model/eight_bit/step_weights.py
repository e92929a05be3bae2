"""8-bit weights that are quantised once in a step.

Every microbatch multiplies the same weights. The first one quantises them, once for the results and
once for the gradients of inputs, and the others read the same bits, as Transformer Engine does
(`is_first_microbatch`). A weight takes two bytes an element meanwhile.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from torch import Tensor

from fivefold.model.eight_bit.fp8 import Scaled


class StepWeights:
    """Weights quantised while a program runs."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Scaled] | None = None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """In the block, in which no weight changes, keep quantised weights."""
        self._made = {}
        try:
            yield
        finally:
            self._made = None

    def held(self) -> Iterator[Tensor]:
        """All weights quantised so far: bits and scales."""
        for weight in (self._made or {}).values():
            yield from (weight.bits, weight.inverse)

    def once(self, which: Hashable, make: Callable[[], Scaled]) -> Scaled:
        """The result stored under this name, or computed now; outside `keeping` it is not
        stored."""
        if self._made is None:
            return make()
        if which not in self._made:
            self._made[which] = make()
        return self._made[which]
