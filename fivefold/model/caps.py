"""Caps of scores and logits, c tanh(x / c), as in Gemma 2 (Gemma Team, 2024, section 2); bounds of
queries, keys and values, as in MPT (MosaicML, 2023) and OLMo."""

from typing import Any

import torch
from torch import Tensor, autograd


def capped(x: Tensor, cap: float | None) -> Tensor:
    """c tanh(x / c) for a cap c; None: `x` unchanged."""
    return x if cap is None else (x / cap).tanh() * cap


def capped_(x: Tensor, cap: float) -> Tensor:
    """`capped` in place."""
    return x.div_(cap).tanh_().mul_(cap)


def capped_as(x: Tensor, dtype: torch.dtype, cap: float | None) -> Tensor:
    """`capped` in a type, in one tensor at most; without a cap, `x` in that type."""
    return x.to(dtype) if cap is None else capped_(x.to(dtype, copy=True), cap)


def slope(made: Tensor, cap: float) -> Tensor:
    """Derivative of the cap, from capped numbers; 0 at an infinite one, which was masked after
    capping."""
    return (made / cap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)


def clamped(x: Tensor, most: float) -> Tensor:
    """`x` where it is between -most and most, else the nearer of these."""
    y: Tensor = _Clamped.apply(x, most)
    return y


class _Clamped(autograd.Function):
    """Saves a byte for each number, where PyTorch saves what it reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        ctx.save_for_backward(x.abs() <= most)
        return x.clamp(-most, most)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (within,) = ctx.saved_tensors
        return grad * within, None
