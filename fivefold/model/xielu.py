"""xIELU, the activation of Apertus, which learns how it bends (Huang and Schlag 2024,
arXiv:2411.13010). Shapes: T tokens, F inner features of this rank."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.leaves import local
from fivefold.model.traced import result

_SLOPE = 0.5
"""At zero, on both sides."""
_LARGEST = -1e-6
"""Of what is exponentiated, as published: between it and zero the curve is a line."""
_ROWS = 512
"""Computed at a time."""


class XIELU(nn.Module):
    """p x^2 + x / 2 above zero, n (exp(x) - 1 - x) + x / 2 below.

    Attributes:
        alpha_p: [1], of which p is the softplus.
        alpha_n: [1], of which n is the softplus, plus 1/2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (nn.Parameter(torch.empty(1)) for _ in range(2))

    def forward(self, x_TF: Tensor) -> Tensor:
        """[T, F]; saves only the input."""
        y_TF: Tensor = _XIELU.apply(x_TF, local(self.alpha_p), local(self.alpha_n))
        return y_TF


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        p, n = _bends(x, alpha_p, alpha_n)
        y = torch.empty_like(x)
        for part, made in _blocks(x, y):
            made.copy_(torch.where(part > 0, part * part * p, _below(part) * n))
            made.add_(part, alpha=_SLOPE)
        return result(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha_p, alpha_n = ctx.saved_tensors
        p, n = _bends(x, alpha_p, alpha_n)
        wide = torch.promote_types(x.dtype, torch.float32)
        of_x, sums = torch.empty_like(x), torch.zeros(2, dtype=wide, device=x.device)
        for part, of_y, made in _blocks(x, grad, of_x):
            above = part > 0
            if alpha_p.requires_grad:
                curves = torch.where(above, part * part, 0.0), torch.where(above, 0.0, _below(part))
                sums += torch.stack([curve.mul_(of_y).sum(dtype=wide) for curve in curves])
            slope = torch.where(part < _LARGEST, part.expm1(), -1.0).mul_(n)
            made.copy_(torch.where(above, part * (2 * p), slope))
            made.add_(_SLOPE).mul_(of_y)
        if not alpha_p.requires_grad:
            return of_x, None, None
        both = zip((alpha_p, alpha_n), sums.split(1), strict=True)
        return of_x, *((each.to(wide).sigmoid() * total).to(each.dtype) for each, total in both)


def _blocks(*tensors_TF: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows at a time, so that intermediate results stay small; all at once under a compiler,
    which keeps none."""
    if torch.compiler.is_compiling():
        return iter((tensors_TF,))
    return zip(*(x_TF.split(_ROWS) for x_TF in tensors_TF), strict=True)


def _bends(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor]:
    """p and n, in the type of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    p, n = (F.softplus(alpha.to(wide)) for alpha in (alpha_p, alpha_n))
    return p.to(x.dtype), (n + _SLOPE).to(x.dtype)


def _below(x: Tensor) -> Tensor:
    """exp(x) - 1 - x where x is below zero."""
    return x.clamp(max=_LARGEST).expm1_().sub_(x)
