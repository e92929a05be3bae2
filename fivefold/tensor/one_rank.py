"""Linears of one input on one rank, whose weight gradients can be deferred or accumulated in place.

Beside small layers on a fast GPU the host decides, and each layer calls this four times in each
direction: so there is one autograd function, with few calls of Python for each linear. Shapes: T
tokens, H input features, F output features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.model.eight_bit.linear import save_linears, saved_linears
from fivefold.model.layers import Linear
from fivefold.model.leaves import add_to_grad, local
from fivefold.model.products import Kept, Products, input_gradients, of_one_input, outputs
from fivefold.tensor.deferred_weight import DeferredWeights


class LinearCall(NamedTuple):
    """State of a call of linears with one input, shared by its forward and backward.

    Attributes:
        deferred: receives weight gradients while a backward defers them.
        products: their products.
        weights: their weights, the parameters that the forward used.
        biases: their biases, likewise; None: a linear has none.
        rows: rows of these that are multiplied with; None: all.
    """

    deferred: DeferredWeights
    products: Sequence[Products]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    rows: Sequence[slice | None]

    @property
    def trains(self) -> bool:
        """Whether the weights get gradients."""
        return self.weights[0].requires_grad

    def divided(
        self, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], Sequence[Tensor | None]]:
        """The weights and biases among the tensors of `call_of`."""
        count = len(self.products)
        if len(tensors) == count:
            return tensors, self.biases
        added = iter(tensors[count:])
        return tensors[:count], [None if bias is None else next(added) for bias in self.biases]

    def gradients(self, grads_TF: Sequence[Tensor]) -> list[Kept]:
        """The form of each result's gradient that both products of a backward need."""
        return [each.gradient(grad) for each, grad in zip(self.products, grads_TF, strict=True)]

    def made_or_deferred(
        self, grads: Sequence[Kept], grads_TF: Sequence[Tensor], kept: Kept
    ) -> Sequence[Tensor | None]:
        """Gradients as from `made`; none while a backward defers them."""
        if not self.deferred.deferring:
            return self.made(grads, grads_TF, kept)
        self.defer(grads, grads_TF, lambda: kept)
        return ()

    def made(
        self, grads: Sequence[Kept], grads_TF: Sequence[Tensor], kept: Kept
    ) -> list[Tensor | None]:
        """Gradients for autograd to add: of the weights, then of the biases."""
        made = [
            self.deferred.made(weight, products, grad, kept, rows)
            for weight, products, grad, rows in zip(
                self.weights, self.products, grads, self.rows, strict=True
            )
        ]
        for bias, grad_TF in zip(self.biases, grads_TF, strict=True):
            if bias is not None:
                made.append(grad_TF.sum(0))
        return made

    def defer(
        self,
        grads: Sequence[Kept],
        grads_TF: Sequence[Tensor],
        keep: Callable[[], Kept],
        start: Callable[[], None] | None = None,
    ) -> None:
        """Defer the computation of the gradients.

        Args:
            grads: what products take of the results' gradients.
            grads_TF: these.
            keep: what they take of the input.
            start: as in `deferred_weight.Work`.
        """
        triples = zip(self.biases, grads_TF, self.rows, strict=True)
        biases = [(bias, grad, rows) for bias, grad, rows in triples if bias is not None]

        def add() -> None:
            kept = keep()
            for weight, products, grad, rows in zip(
                self.weights, self.products, grads, self.rows, strict=True
            ):
                self.deferred.add(weight, products, grad, kept, rows)
            for bias, grad_TF, rows in biases:
                add_to_grad(bias, grad_TF.sum(0), rows)

        self.deferred.put([*self.weights, *(bias for bias, *_ in biases)], add, start)


def call_of(
    deferred: DeferredWeights, linears: Sequence[Linear], *, adds: bool = True
) -> tuple[LinearCall, list[Tensor]]:
    """A call of linears, and the tensors that it reads: weights, then biases.

    Args:
        deferred: receives weight gradients while a backward defers them.
        linears: the linears.
        adds: whether biases are added.
    """
    weights: list[Tensor] = []
    biases: list[Tensor | None] = []
    parts, added = [], []
    for linear in linears:
        weight, bias = linear.weight, linear.product_bias if adds else None
        weights.append(weight)
        biases.append(bias)
        parts.append(linear.part(weight))
        if bias is not None:
            added.append(linear.part(bias))
    products = of_one_input([linear.multiply for linear in linears])
    rows = [linear.used for linear in linears]
    return LinearCall(deferred, products, weights, biases, rows), parts + added


@dataclass(frozen=True)
class LocalColumn:
    """The `column` seam on one rank: several linears of one input, with all features.

    Attributes:
        deferred: receives weight gradients while a backward defers them.
    """

    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear."""
        call, tensors = call_of(self.deferred, linears)
        ys: tuple[Tensor, ...] = _Alone.apply(x_TH, call, *tensors)
        return ys


@dataclass(frozen=True)
class LocalRow:
    """The `row` seam on one rank: one linear.

    A recomputation would repeat its product where that ends a block. Attributes as in
    `LocalColumn`.
    """

    deferred: DeferredWeights

    def __call__(self, x_TF: Tensor, linear: Linear) -> Tensor:
        """[T, F] -> [T, H]."""
        call, tensors = call_of(self.deferred, (linear,), adds=False)
        (y,) = _Alone.apply(x_TF, call, *tensors)
        bias = linear.product_bias  # added separately, as `RowParallel` does, for the same bits
        return y if bias is None else y + local(bias)


class _Alone(torch.autograd.Function):
    """Of x, the weights, and the biases of those linears that have one."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, call: LinearCall, *tensors: Tensor) -> tuple[Tensor, ...]:
        weights, biases = call.divided(tensors)
        taken, kept = call.products[0].input(x_TH)
        ctx.call, ctx.trains = call, call.trains
        save_linears(ctx, weights, kept if ctx.trains else ())
        return outputs(call.products, taken, weights, biases)

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        call, (weights, kept) = ctx.call, saved_linears(ctx)
        grads = call.gradients(grads_TF)
        grad_x = input_gradients(call.products, grads, weights) if ctx.needs_input_grad[0] else None
        made = call.made_or_deferred(grads, grads_TF, kept) if ctx.trains else ()
        return grad_x, None, *(made or [None] * (len(ctx.needs_input_grad) - 2))
