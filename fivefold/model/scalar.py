"""A constant factor, which is not trained."""

from typing import Any

from torch import Tensor, autograd


def times(x_TH: Tensor, factor_1: Tensor) -> Tensor:
    """[T, H]: x times a number that has no gradient."""
    y_TH: Tensor = _Times.apply(x_TH, factor_1)
    return y_TH


class _Times(autograd.Function):
    """Saves no tensor, since a recomputed layer would run to its end for it."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, factor_1: Tensor) -> Tensor:
        ctx.factor = factor_1.to(x_TH.dtype)
        return x_TH * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None]:
        return grad_TH * ctx.factor, None
