"""Grouped linears with deferrable weight gradients. Shapes as in `model.moe.grouped`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.model.eight_bit.linear import save_linears, saved_linears
from fivefold.model.leaves import local
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.model.products import input_gradients, of_one_input, outputs
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.one_rank import LinearCall


@dataclass(frozen=True)
class GroupedMultiply:
    """The `multiply` seam: a grouped linear whose dW can be postponed.

    Attributes:
        deferred: receives weight gradients while a backward defers them.
    """

    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, rows_E: Tensor, *linears: GroupedLinear) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear."""
        weights = [linear.weight for linear in linears]
        parts = [local(weight) for weight in weights]
        groups = [linear.products for linear in linears]
        ends, nothing = groups[0].ends(x_TH, rows_E, parts), [None] * len(linears)

        def call_of(rows_E: Tensor) -> LinearCall:
            products = of_one_input([each.products(rows_E, ends) for each in groups])
            return LinearCall(self.deferred, products, weights, nothing, nothing)

        ys: tuple[Tensor, ...] = _Grouped.apply(x_TH, rows_E, call_of, *parts)
        return ys


class _Grouped(torch.autograd.Function):
    """Autograd function of x, the rows of each group, which recomputation makes again, and the
    weights.

    dW is computed before dX, so that dX does not coexist with the buffers of dW's kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: Tensor,
        rows_E: Tensor,
        call_of: Callable[[Tensor], LinearCall],
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        call = call_of(rows_E)
        taken, kept = call.products[0].input(x_TH)
        save_linears(ctx, weights, (rows_E, *(kept if call.trains else ())))
        ctx.call_of = call_of
        return outputs(call.products, taken, weights, call.biases)

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        weights, (rows_E, *kept) = saved_linears(ctx)
        call: LinearCall = ctx.call_of(rows_E)
        grads = call.gradients(grads_TF)
        made = call.made_or_deferred(grads, grads_TF, tuple(kept)) if call.trains else ()
        grad_x = input_gradients(call.products, grads, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, *(made or [None] * len(weights))
