"""Grouped linears with deferrable weight gradients. Shapes as in `model.grouped`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model.grouped import GroupedLinear
from fivefold.model.layers import Products
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
        taken, kept = products.input(x_TH)
        outputs = products.outputs(taken, weights, (None,) * len(weights))
        ctx.save_for_backward(*weights, *kept)
        ctx.products, ctx.deferred, ctx.targets = products, deferred, targets
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        products, deferred, targets = ctx.products, ctx.deferred, ctx.targets
        saved = ctx.saved_tensors
        weights, kept = saved[: len(targets)], saved[len(targets) :]
        grads = [products.gradient(grad) for grad in grads_TF]
        makes = [partial(products.weight_gradient, grad, kept) for grad in grads]

        def add() -> None:
            for parameter, make in zip(targets, makes, strict=True):
                deferred.add(parameter, make)

        grads_w: list[Tensor | None] = [None] * len(targets)
        if deferred.deferring:
            deferred.put(targets, add)
        else:
            grads_w = list(map(deferred.made, targets, makes))
        grad_x = products.input_gradients(grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None, *grads_w
