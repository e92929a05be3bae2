"""Scores of attention: what a query and a key have to do with each other, before the softmax."""

from dataclasses import dataclass

from torch import Tensor

from fivefold.model.caps import capped_, slope


@dataclass(frozen=True)
class Scores:
    """How scores are made of q k^T, before any is masked.

    Attributes:
        scale: what q k^T is multiplied by; None: 1 / sqrt(D).
        cap: c, where scores become c tanh(scores / c); None: they stay as they are.
    """

    scale: float | None = None
    cap: float | None = None

    def factor(self, features: int) -> float:
        """What q k^T is multiplied by, for queries of so many features."""
        return features**-0.5 if self.scale is None else self.scale

    def of(self, scaled: Tensor) -> Tensor:
        """Scores of scaled products, which are overwritten."""
        return scaled if self.cap is None else capped_(scaled, self.cap)

    def through(self, grad: Tensor, scores: Tensor) -> Tensor:
        """Gradient of the scaled products from that of their scores, which is overwritten."""
        return grad if self.cap is None else grad.mul_(slope(scores, self.cap))


USUAL = Scores()
"""Products with 1 / sqrt(D), without a cap."""
