"""Scores of attention, before the softmax."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fivefold.model.caps import capped_, slope


@dataclass(frozen=True)
class Scores:
    """How scores are made of q k^T, before any is masked.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
        cap: c, where scores become c tanh(scores / c); None: they stay as they are.
        largest: [N], where the largest score of each query head with a key that it sees is noted,
            if it is above what is there; None: nowhere.
    """

    scale: float | None = None
    cap: float | None = None
    largest: Tensor | None = field(default=None, compare=False)

    @property
    def by_any_kernel(self) -> bool:
        """Whether any kernel can compute these scores: no cap, nothing to record."""
        return self.cap is None and self.largest is None

    @property
    def unnoted(self) -> "Scores":
        """The same without recording, for a backward, which computes the same scores again."""
        return self if self.largest is None else replace(self, largest=None)

    def of_heads(self, first: int, last: int) -> "Scores":
        """The same for some of the query heads."""
        if self.largest is None:
            return self
        return replace(self, largest=self.largest[first:last])

    def note(self, most_BNS: Tensor) -> None:
        """Record the largest scores of queries."""
        if self.largest is not None:
            found_N = most_BNS.amax((0, 2)).to(self.largest.dtype)
            torch.maximum(self.largest, found_N, out=self.largest)

    def factor(self, features: int) -> float:
        """The factor of q k^T for queries with this many features."""
        return features**-0.5 if self.scale is None else self.scale

    def of(self, scaled: Tensor) -> Tensor:
        """Scores of scaled products, which are overwritten."""
        return scaled if self.cap is None else capped_(scaled, self.cap)

    def through(self, grad: Tensor, scores: Tensor) -> Tensor:
        """Gradient of the scaled products, given that of their scores, which is overwritten."""
        return grad if self.cap is None else grad.mul_(slope(scores, self.cap))


USUAL = Scores()
"""Products with 1 / sqrt(D), without a cap."""
