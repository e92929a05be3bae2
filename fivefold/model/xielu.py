"""xIELU, the activation of Apertus, which learns how it bends (Huang and Schlag 2024,
arXiv:2411.13010). Shapes: T tokens, F inner features of this rank."""

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
        """[T, F], of which only the input is kept."""
        y_TF: Tensor = _XIELU.apply(x_TF, local(self.alpha_p), local(self.alpha_n))
        return y_TF


class _XIELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        ctx.save_for_backward(x, alpha_p, alpha_n)
        p, n = _bends(x, alpha_p, alpha_n)
        curve = torch.where(x > 0, x * x * p, _below(x) * n)
        return result(curve.add_(x, alpha=_SLOPE))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha_p, alpha_n = ctx.saved_tensors
        p, n = _bends(x, alpha_p, alpha_n)
        above, wide = x > 0, torch.promote_types(x.dtype, torch.float32)
        of_p = of_n = None
        if alpha_p.requires_grad:
            curves = torch.where(above, x * x, 0.0), torch.where(above, 0.0, _below(x))
            sums = [curve.mul_(grad).sum(dtype=wide) for curve in curves]
            of_p, of_n = (
                (alpha.to(wide).sigmoid() * total).to(alpha.dtype)
                for alpha, total in zip((alpha_p, alpha_n), sums, strict=True)
            )
        slope = torch.where(x < _LARGEST, x.expm1(), -1.0).mul_(n)
        of_x = torch.where(above, x * (2 * p), slope).add_(_SLOPE).mul_(grad)
        return of_x, of_p, of_n


def _bends(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor]:
    """p and n, in the type of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    p, n = (F.softplus(alpha.to(wide)) for alpha in (alpha_p, alpha_n))
    return p.to(x.dtype), (n + _SLOPE).to(x.dtype)


def _below(x: Tensor) -> Tensor:
    """exp(x) - 1 - x where x is below zero."""
    return x.clamp(max=_LARGEST).expm1_().sub_(x)
