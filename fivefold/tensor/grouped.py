"""Grouped linears with deferrable weight gradients. Shapes as in `model.moe.grouped`."""

from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from fivefold.model.eight_bit.linear import scales_of, with_scales
from fivefold.model.layers import input_gradients, of_one_input, outputs
from fivefold.model.leaves import local
from fivefold.model.moe.grouped import GroupArithmetic, GroupedLinear
from fivefold.tensor.deferred_weight import DeferredWeights


@dataclass(frozen=True)
class GroupedMultiply:
    """The `multiply` seam: a grouped linear whose dW can be postponed.

    Attributes:
        deferred: receives weight gradients while a backward defers them.
    """

    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, rows_E: Tensor, *linears: GroupedLinear) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear."""
        targets = tuple(linear.weight for linear in linears)
        how = tuple(linear.products for linear in linears), self.deferred, targets
        ys: tuple[Tensor, ...] = _Grouped.apply(x_TH, rows_E, *how, *map(local, targets))
        return ys


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        rows_E: Tensor,
        groups: tuple[GroupArithmetic, ...],
        deferred: DeferredWeights,
        targets: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ends = groups[0].ends(x_TH, rows_E, weights)
        products = of_one_input([each.products(rows_E, ends) for each in groups])
        taken, kept = products[0].input(x_TH)
        ys = outputs(products, taken, weights, (None,) * len(weights))
        ctx.save_for_backward(rows_E, *weights, *(kept if targets[0].requires_grad else ()))
        ctx.groups, ctx.ends, ctx.deferred, ctx.targets = groups, ends, deferred, targets
        ctx.scales = scales_of(weights)
        return ys

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        deferred, targets = ctx.deferred, ctx.targets
        rows_E, *saved = ctx.saved_tensors
        products = of_one_input([each.products(rows_E, ctx.ends) for each in ctx.groups])
        weights, kept = with_scales(saved[: len(targets)], ctx.scales), saved[len(targets) :]
        grads = [each.gradient(grad) for each, grad in zip(products, grads_TF, strict=True)]
        of = list(zip(targets, products, grads, repeat(kept), strict=False))

        def add() -> None:
            for each in of:
                deferred.add(*each)

        grads_w: list[Tensor | None] = [None] * len(targets)
        trains = targets[0].requires_grad
        if trains and deferred.deferring:
            deferred.put(targets, add)
        elif trains:
            grads_w = [deferred.made(*each) for each in of]
        grad_x = input_gradients(products, grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None, *grads_w
