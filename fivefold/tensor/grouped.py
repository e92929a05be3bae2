"""Grouped linears with deferrable weight gradients. Shapes as in `model.grouped`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model.grouped import (
    GroupedLinear,
    group_ends,
    grouped_linear,
    grouped_weight_gradient,
)
from fivefold.model.leaves import local
from fivefold.tensor.deferred_weight import DeferredWeights


@dataclass(frozen=True)
class GroupedMultiply:
    """The `multiply` seam: a grouped linear whose dW can be postponed.

    Attributes:
        deferred: receives weight gradients while a backward defers them.
    """

    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, rows_E: Tensor, linear: GroupedLinear) -> Tensor:
        """[T, H] -> [T, F]."""
        target = (linear.weight,)
        y: Tensor = _Grouped.apply(x_TH, local(linear.weight), rows_E, self.deferred, target)
        return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        weight_EFH: Tensor,
        rows_E: Tensor,
        deferred: DeferredWeights,
        target: tuple[Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x_TH, weight_EFH, rows_E)
        ctx.deferred, ctx.parameter = deferred, target[0]
        ctx.ends = ends = group_ends(x_TH, rows_E)
        return grouped_linear(x_TH, weight_EFH, rows_E, ends)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Any, ...]:
        x_TH, weight_EFH, rows_E = ctx.saved_tensors
        parameter, deferred, ends, grad_weight = ctx.parameter, ctx.deferred, ctx.ends, None
        make = partial(grouped_weight_gradient, grad_TF, x_TH, rows_E, ends)
        if deferred.deferring:
            deferred.put([parameter], lambda: deferred.add(parameter, make))
        else:
            grad_weight = deferred.made(parameter, make)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grouped_linear(grad_TF, weight_EFH.transpose(1, 2), rows_E, ends)
        return grad_x, grad_weight, None, None, None
