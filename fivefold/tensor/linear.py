"""Column- and row-parallel linears with their communication, on local tensors.

A column-parallel linear holds part of the output features, a row-parallel one part of the input
features. Megatron-LM's conjugate operators surround the pair: f (identity forward, all-reduce
backward) before the columns and g (all-reduce forward, identity backward) after the rows (Shoeybi
et al. 2019). With sequence parallelism these are an all-gather and a reduce-scatter of the tokens
(Korthikanti et al. 2022). Shapes: T tokens, t = T / tp, H input features, F local output features.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import Pending, all_gather, all_reduce, all_to_all, reduce_scatter
from fivefold.model.eight_bit.linear import save_linears, saved_linears
from fivefold.model.layers import Linear
from fivefold.model.leaves import local
from fivefold.model.products import Kept
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.exchange import Exchange, Factor
from fivefold.tensor.one_rank import LinearCall, call_of


@dataclass(frozen=True)
class ColumnParallel:
    """The `column` seam: several linears of one input, each returning this rank's features.

    The input is gathered once for all linears, and one sum over the ranks completes their input
    gradients. It overlaps with the weight gradients. Of split tokens only this rank's are saved, as
    the products want them (in 8 bits, for example), and all are gathered again in the backward:
    while input gradients are computed, or if weight gradients are deferred while earlier ones are.

    Attributes:
        exchange: how tokens are gathered and their gradients summed.
        deferred: receives weight gradients while a backward defers them.
    """

    exchange: Exchange
    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """[T or t, H] -> one [T, F] per linear."""
        call, tensors = call_of(self.deferred, linears)
        outputs: tuple[Tensor, ...] = _Column.apply(x_TH, self.exchange, call, *tensors)
        return outputs


class _Column(torch.autograd.Function):
    """Autograd function of x, the weights, and the biases of linears that have one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, exchange: Exchange, call: LinearCall, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = call.divided(tensors)
        factors = list(map(Factor, call.products, weights, biases))
        (kept_TH, *rest), outputs = exchange.gather_products(x, factors)
        ctx.trains = call.trains
        own = x if call.products[0].keeps_input else exchange.own(kept_TH)
        save_linears(ctx, weights, (own, *rest) if ctx.trains else ())
        ctx.exchange, ctx.call = exchange, call
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        exchange, call, (weights, kept) = ctx.exchange, ctx.call, saved_linears(ctx)
        gathered = _Gathered(exchange, kept[0]) if ctx.trains else None
        deferring = call.deferred.deferring
        if gathered is not None and not deferring:
            gathered.start()
        pending = None
        grads = call.gradients(grads_TF)
        if ctx.needs_input_grad[0]:
            factors = map(partial(Factor, of_gradient=True), call.products, weights)
            pending = exchange.start_sum(list(zip(grads, factors, strict=True)))
        made: list[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 3)
        if gathered is not None and deferring:
            start = gathered.start if exchange.splits_tokens else None
            call.defer(grads, grads_TF, lambda: (gathered.wait(), *kept[1:]), start)
        elif gathered is not None:
            made = call.made(grads, grads_TF, (gathered.wait(), *kept[1:]))
        grad_x = pending.wait() if pending is not None else None
        return grad_x, None, None, *made


class _Gathered:
    """The tokens of all ranks; a backward keeps only this rank's until it starts to gather."""

    def __init__(self, exchange: Exchange, x: Tensor) -> None:
        self._exchange, self._x = exchange, x
        self._pending: Pending | None = None

    def start(self) -> None:
        self._pending = self._exchange.start_gather(self._x)

    def wait(self) -> Tensor:
        """[T, H], once; was started before unless there is nothing to gather."""
        pending = self._pending or self._exchange.start_gather(self._x)
        self._pending = None
        return pending.wait()


@dataclass(frozen=True)
class RowParallel:
    """The `row` seam: a linear of this rank's input features, summed over the ranks.

    The bias is added once, after the sum. Attributes as in `ColumnParallel`.
    """

    exchange: Exchange
    deferred: DeferredWeights

    def __call__(self, x_TF: Tensor, linear: Linear) -> Tensor:
        """[T, F] -> [T or t, H]."""
        weight = linear.weight
        call = _RowCall(self, weight, Factor(linear.multiply, local(weight)))
        y: Tensor = _RowSum.apply(_RowInput.apply(x_TF, call.factor.weight_FH, call), call)
        bias = linear.product_bias
        return y if bias is None else y + local(bias)


@dataclass
class _RowCall:
    """What the two functions of a row share.

    Attributes:
        row: the seam.
        weight: the parameter; the bias is added outside.
        factor: the weight that multiplies.
        taken: what it takes of the input, between the forwards of both functions.
        grad: what dW takes of the gradient of all tokens, between their backwards.
    """

    row: RowParallel
    weight: Tensor
    factor: Factor
    taken: Kept | None = None
    grad: Kept | None = None


class _RowInput(torch.autograd.Function):
    """Saves what dW needs, and computes it.

    A function apart from the product and its sum, which save nothing: recomputation stops at the
    last saved tensor, so it repeats neither where they end a block.
    """

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight: Tensor, call: _RowCall) -> Tensor:
        call.taken, kept = call.factor.products.input(x_TF)
        ctx.save_for_backward(*(kept if call.weight.requires_grad else ()))
        ctx.call = call
        return x_TF.view_as(x_TF)

    @staticmethod
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Any, ...]:
        kept = ctx.saved_tensors
        call: _RowCall = ctx.call
        grad, call.grad = call.grad, None
        assert grad is not None, "the sum's backward runs before"
        if not call.weight.requires_grad:
            return grad_TF, None, None
        deferred, products = call.row.deferred, call.factor.products
        return grad_TF, deferred.made_or_put(call.weight, products, grad, kept), None


class _RowSum(torch.autograd.Function):
    """The product and its sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, call: _RowCall) -> Tensor:
        ctx.call = call
        taken, call.taken = call.taken, None
        assert taken is not None, "the input is read before"
        return call.row.exchange.start_sum([(taken, call.factor)]).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        call: _RowCall = ctx.call
        factor = call.factor._replace(of_gradient=True)
        call.grad, (grad_TF,) = call.row.exchange.gather_products(grad, [factor])
        return grad_TF, None


def sum_tokens(x_TH: Tensor, group: dist.ProcessGroup | None, scatter: bool) -> Tensor:
    """g: all-reduce forward; with `scatter` reduce-scatter forward and all-gather backward.

    The all-reduce overwrites `x_TH`.
    """
    if group is None:
        return x_TH
    y: Tensor = _SumTokens.apply(x_TH, group, scatter)
    return y


@dataclass(frozen=True)
class GatherFeatures:
    """The `spread` seam: features that all heads share, for the tokens of all ranks.

    This is f, or under sequence parallelism all-gather forward and reduce-scatter backward.

    Attributes:
        group: tensor-parallel group.
        sequence_parallel: whether the features are sharded along the tokens.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def __call__(self, x_TF: Tensor) -> Tensor:
        """[T or t, F] -> [T, F]."""
        y: Tensor = _Spread.apply(x_TF, self.group, self.sequence_parallel)
        return y


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return all_gather(x, group) if gathers else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if ctx.gathers:
            return reduce_scatter(grad, ctx.group), None, None
        return all_reduce(grad.clone(), ctx.group), None, None


class _SumTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter
        if scatter:
            return reduce_scatter(x, group)
        ctx.mark_dirty(x)  # summed in place
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return all_gather(grad, ctx.group) if ctx.scatter else grad, None, None


@dataclass(frozen=True)
class WholeRows:
    """The `joined` seam after a column-parallel linear: gathers whole rows of its features.

    Ranks all-gather features. Under sequence parallelism, where each needs only its own tokens,
    they exchange features for tokens by all-to-all. Every rank computes the same from a token's
    row, so the gradient of its features needs no sum.

    Attributes:
        group: tensor-parallel group.
        sequence_parallel: whether the result is sharded along the tokens.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool

    def __call__(self, x_TF: Tensor) -> Tensor:
        """[T, F] -> [T or t, F * tp]."""
        y: Tensor = _WholeRows.apply(x_TF, self)
        return y


class _WholeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, rows: WholeRows) -> Tensor:
        ctx.rows = rows
        size = rows.group.size()
        if not rows.sequence_parallel:
            return torch.cat(all_gather(x_TF, rows.group).chunk(size), dim=1)
        sends = list(x_TF.chunk(size))
        receives = [torch.empty_like(part) for part in sends]
        all_to_all(sends, receives, rows.group)
        return torch.cat(receives, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        group: dist.ProcessGroup = ctx.rows.group
        sends = [part.contiguous() for part in grad.chunk(group.size(), dim=1)]
        if not ctx.rows.sequence_parallel:
            return sends[group.rank()], None
        receives = [torch.empty_like(part) for part in sends]
        all_to_all(sends, receives, group)
        return torch.cat(receives), None
