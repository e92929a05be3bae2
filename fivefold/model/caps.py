"""Caps of scores and logits, c tanh(x / c), as in Gemma 2 (Gemma Team, 2024, section 2)."""

from torch import Tensor


def capped(x: Tensor, cap: float | None) -> Tensor:
    """c tanh(x / c) for a cap c; None: `x` unchanged."""
    return x if cap is None else (x / cap).tanh() * cap


def capped_(x: Tensor, cap: float) -> Tensor:
    """`capped` in place."""
    return x.div_(cap).tanh_().mul_(cap)


def slope(made: Tensor, cap: float) -> Tensor:
    """Derivative of the cap, from capped numbers; 0 at an infinite one, which was masked after
    capping."""
    return (made / cap).clamp_(-1.0, 1.0).square_().neg_().add_(1.0)
