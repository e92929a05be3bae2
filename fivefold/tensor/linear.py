"""Column- and row-parallel linears with their communication, on local tensors.

A column-parallel linear holds part of the output features, a row-parallel one part of the input
features. Megatron-LM's conjugate operators surround the pair: f (identity forward, all-reduce
backward) before the columns and g (all-reduce forward, identity backward) after the rows (Shoeybi
et al. 2019). With sequence parallelism these are an all-gather and a reduce-scatter of the tokens
(Korthikanti et al. 2022). Shapes: T tokens, t = T / tp, H input features, F local output features.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fivefold.model.layers import Linear, Products, local
from fivefold.tensor.deferred_weight import DeferredWeights, add_to_grad

Target = tuple[Tensor, Tensor | None]
"""(weight, bias) of a linear, the objects that its forward used."""


@dataclass(frozen=True)
class ColumnParallel:
    """The `column` seam: several linears of one input, each returning this rank's features.

    The input is gathered once for all linears, and one collective sums their input gradients. It
    overlaps with the weight gradients. Under sequence parallelism only the input's shard is saved,
    as the products want it (in 8 bits, for example), and gathered again in the backward.

    Attributes:
        group: tensor-parallel group; None: one rank.
        sequence_parallel: whether the input is sharded along the tokens.
        deferred: receives weight gradients while a backward defers them.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights

    def __call__(self, x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """[T or t, H] -> one [T, F] per linear."""
        rows = tuple(linear.used for linear in linears)
        weights = [
            _part(local(linear.weight), part) for linear, part in zip(linears, rows, strict=True)
        ]
        biases = [
            None if linear.bias is None else _part(local(linear.bias), part)
            for linear, part in zip(linears, rows, strict=True)
        ]
        targets = tuple((linear.weight, linear.bias) for linear in linears)
        how = self, targets, rows, linears[0].multiply
        outputs: tuple[Tensor, ...] = _Column.apply(x_TH, *how, *weights, *biases)
        return outputs

    def own(self, kept_TH: Tensor) -> Tensor:
        """What this rank keeps of what was made of the whole input: the rows of its own tokens."""
        if self.group is None or not self.sequence_parallel:
            return kept_TH
        return kept_TH.chunk(self.group.size())[self.group.rank()].clone()


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        column: ColumnParallel,
        targets: tuple[Target, ...],
        rows: tuple[slice | None, ...],
        products: Products,
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(targets)], tensors[len(targets) :]
        x_TH = all_gather(x, column.group) if column.sequence_parallel else x
        outputs, (kept_TH, *rest) = products.forward(x_TH, weights, biases)
        own = x if kept_TH is x_TH else column.own(kept_TH)
        ctx.save_for_backward(own, *weights, *rest)
        ctx.column, ctx.targets, ctx.rows, ctx.products = column, targets, rows, products
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        own, *weights = ctx.saved_tensors
        weights, rest = weights[: len(ctx.targets)], weights[len(ctx.targets) :]
        column: ColumnParallel = ctx.column
        products: Products = ctx.products
        group, deferring = column.group, column.deferred.deferring
        gathers = column.sequence_parallel
        again = start_all_gather(own, group) if gathers and not deferring else None
        pending = None
        grads = [products.gradient(grad) for grad in grads_TF]
        if ctx.needs_input_grad[0]:
            start = start_reduce_scatter if gathers else start_all_reduce
            pending = start(products.input_gradient(grads, weights), group)
        grads_w: list[Tensor | None] = [None] * len(weights)
        grads_b: list[Tensor | None] = [None] * len(weights)
        with_bias = [
            grad if target[1] is not None else None
            for grad, target in zip(grads_TF, ctx.targets, strict=True)
        ]
        if deferring:
            targets, rows = ctx.targets, ctx.rows

            def add() -> None:
                kept = (all_gather(own, group) if gathers else own, *rest)
                each = zip(targets, rows, grads, with_bias, strict=True)
                for target, part, grad, grad_TF in each:
                    add_to_grad(target[0], products.weight_gradient(grad, kept), part)
                    if grad_TF is not None and target[1] is not None:
                        add_to_grad(target[1], grad_TF.sum(0), part)

            column.deferred.put([p for target in targets for p in target if p is not None], add)
        else:
            kept = (again.wait() if again is not None else own, *rest)
            for index, (grad, grad_TF) in enumerate(zip(grads, with_bias, strict=True)):
                grads_w[index] = products.weight_gradient(grad, kept)
                grads_b[index] = None if grad_TF is None else grad_TF.sum(0)
        grad_x = pending.wait() if pending is not None else None
        return grad_x, None, None, None, None, *grads_w, *grads_b


@dataclass(frozen=True)
class RowParallel:
    """The `row` seam: a linear of this rank's input features, summed over the ranks.

    The bias is added once, after the sum. Attributes as in `ColumnParallel`.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights

    def __call__(self, x_TF: Tensor, linear: Linear) -> Tensor:
        """[T, F] -> [T or t, H]."""
        how = self.deferred, (linear.weight, None), linear.multiply
        product_TH = _RowProduct.apply(x_TF, local(linear.weight), *how)
        y = sum_tokens(product_TH, self.group, self.sequence_parallel)
        return y if linear.bias is None else y + local(linear.bias)


class _RowProduct(torch.autograd.Function):
    """This rank's summand, in a function separate from the sum, which saves nothing.

    Recomputation stops at the last saved tensor, so it does not repeat a block's last sum.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TF: Tensor,
        weight: Tensor,
        deferred: DeferredWeights,
        target: Target,
        products: Products,
    ) -> Tensor:
        (product_TH,), kept = products.forward(x_TF, (weight,), (None,))
        ctx.save_for_backward(weight, *kept)
        ctx.deferred, ctx.parameter, ctx.products = deferred, target[0], products
        return product_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Any, ...]:
        weight, *kept = ctx.saved_tensors
        parameter, products = ctx.parameter, ctx.products
        grad, grad_weight = products.gradient(grad_TH), None

        def add() -> None:
            add_to_grad(parameter, products.weight_gradient(grad, kept))

        if ctx.deferred.deferring:
            ctx.deferred.put([parameter], add)
        else:
            grad_weight = products.weight_gradient(grad, kept)
        return products.input_gradient([grad], [weight]), grad_weight, None, None, None


def sum_tokens(x_TH: Tensor, group: dist.ProcessGroup | None, scatter: bool) -> Tensor:
    """g: all-reduce forward; with `scatter` reduce-scatter forward and all-gather backward.

    The all-reduce overwrites `x_TH`.
    """
    if group is None:
        return x_TH
    y: Tensor = _SumTokens.apply(x_TH, group, scatter)
    return y


@dataclass(frozen=True)
class SpreadTokens:
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


def _part(parameter: Tensor, rows: slice | None) -> Tensor:
    return parameter if rows is None else parameter[rows]
