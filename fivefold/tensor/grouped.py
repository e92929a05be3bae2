"""Grouped linears with deferrable weight gradients. Shapes as in `model.grouped`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model.eight_bit import scales_of, with_scales
from fivefold.model.grouped import GroupArithmetic, GroupedLinear
from fivefold.model.leaves import local
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
        how = linears[0].products, self.deferred, targets
        ys: tuple[Tensor, ...] = _Grouped.apply(x_TH, rows_E, *how, *map(local, targets))
        return ys


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        rows_E: Tensor,
        groups: GroupArithmetic,
        deferred: DeferredWeights,
        targets: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        ends = groups.ends(x_TH, rows_E)
        products = groups.products(rows_E, ends)
        taken, kept = products.input(x_TH)
        outputs = products.outputs(taken, weights, (None,) * len(weights))
        ctx.save_for_backward(rows_E, *weights, *(kept if targets[0].requires_grad else ()))
        ctx.groups, ctx.ends, ctx.deferred, ctx.targets = groups, ends, deferred, targets
        ctx.scales = scales_of(weights)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        deferred, targets = ctx.deferred, ctx.targets
        rows_E, *saved = ctx.saved_tensors
        products = ctx.groups.products(rows_E, ctx.ends)
        weights, kept = with_scales(saved[: len(targets)], ctx.scales), saved[len(targets) :]
        grads = [products.gradient(grad) for grad in grads_TF]
        makes = [partial(products.weight_gradient, grad, kept) for grad in grads]

        def add() -> None:
            for parameter, make in zip(targets, makes, strict=True):
                deferred.add(parameter, make)

        grads_w: list[Tensor | None] = [None] * len(targets)
        trains = targets[0].requires_grad
        if trains and deferred.deferring:
            deferred.put(targets, add)
        elif trains:
            grads_w = list(map(deferred.made, targets, makes))
        grad_x = products.input_gradients(grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, None, *grads_w
