"""Grouped linears with deferrable weight gradients. Shapes as in `model.grouped`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.model.grouped import GroupedLinear
from fivefold.model.layers import Products, local
from fivefold.tensor.deferred_weight import DeferredWeights, add_to_grad


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
        products = linears[0].products(x_TH, rows_E)
        weights = [local(weight) for weight in targets]
        ys: tuple[Tensor, ...] = _Grouped.apply(x_TH, products, self.deferred, targets, *weights)
        return ys


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        products: Products,
        deferred: DeferredWeights,
        targets: tuple[Tensor, ...],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        outputs, kept = products.forward(x_TH, weights, (None,) * len(weights))
        ctx.save_for_backward(*weights, *kept)
        ctx.products, ctx.deferred, ctx.targets = products, deferred, targets
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        products, targets, saved = ctx.products, ctx.targets, ctx.saved_tensors
        weights, kept = saved[: len(targets)], saved[len(targets) :]
        grads = [products.gradient(grad) for grad in grads_TF]

        def add() -> None:
            for parameter, grad in zip(targets, grads, strict=True):
                add_to_grad(parameter, products.weight_gradient(grad, kept))

        grads_w: list[Tensor | None] = [None] * len(targets)
        if ctx.deferred.deferring:
            ctx.deferred.put(targets, add)
        else:
            grads_w = [products.weight_gradient(grad, kept) for grad in grads]
        grad_x = products.input_gradient(grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, *grads_w
