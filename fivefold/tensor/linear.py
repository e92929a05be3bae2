"""Column- and row-parallel linears, with their communication, on local tensors.

A column-parallel linear holds some of the output features, a row-parallel one some of the input
features. Around the pair stand Megatron-LM's conjugate operators: f (identity forward, all-reduce
backward) before the columns and g (all-reduce forward, identity backward) after the rows (Shoeybi
et al. 2019); with sequence parallelism all-gather and reduce-scatter of the tokens instead
(Korthikanti et al. 2022). Shapes: T tokens, t = T / tp, H features in, F local features out.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh.collectives import (
    all_gather,
    all_reduce,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fivefold.model.layers import Linear, local
from fivefold.tensor.deferred_weight import DeferredWeights, add_to_grad


@dataclass(frozen=True)
class ColumnParallel:
    """The `column` seam: several linears of one input, each giving this rank's features.

    The input is gathered once for all of them, and one collective carries the sum of their input
    gradients. It starts before the weight gradients are computed, which hide it. Under sequence
    parallelism the input is saved as its shard and gathered again in the backward.

    Attributes:
        group: of tensor parallelism; None for one rank.
        sequence_parallel: whether the input arrives sharded along the tokens.
        deferred: where weight gradients go while a backward defers them.
        rows: per linear, the rows of its (replicated) weight that this rank uses, or None for all;
            empty if that is so for every linear.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights
    rows: tuple[slice | None, ...] = ()

    def __call__(self, x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """[T or t, H] -> a [T, F] per linear."""
        rows = self.rows or (None,) * len(linears)
        weights = [
            _part(local(linear.weight), part) for linear, part in zip(linears, rows, strict=True)
        ]
        biases = [
            None if linear.bias is None else _part(local(linear.bias), part)
            for linear, part in zip(linears, rows, strict=True)
        ]
        outputs: tuple[Tensor, ...] = _Column.apply(x_TH, self, linears, rows, *weights, *biases)
        return outputs


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        column: ColumnParallel,
        linears: tuple[Linear, ...],
        rows: tuple[slice | None, ...],
        *tensors: Any,
    ) -> tuple[Tensor, ...]:
        weights, biases = tensors[: len(linears)], tensors[len(linears) :]
        ctx.save_for_backward(x, *weights)
        ctx.column, ctx.linears, ctx.rows = column, linears, rows
        x_TH = all_gather(x, column.group) if column.sequence_parallel else x
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(x_TH, weight, bias) for weight, bias in pairs)

    @staticmethod
    def backward(ctx: Any, *grads_TF: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        column: ColumnParallel = ctx.column
        group, deferring = column.group, column.deferred.deferring
        gathers = column.sequence_parallel
        again = start_all_gather(x, group) if gathers and not deferring else None
        pending = None
        if ctx.needs_input_grad[0]:
            grad_TH = grads_TF[0] @ weights[0]
            for grad, weight in zip(grads_TF[1:], weights[1:], strict=True):
                grad_TH.addmm_(grad, weight)
            start = start_reduce_scatter if gathers else start_all_reduce
            pending = start(grad_TH, group)
        grads_w: list[Tensor | None] = [None] * len(weights)
        grads_b: list[Tensor | None] = [None] * len(weights)
        if deferring:

            def later() -> None:
                x_TH = all_gather(x, group) if gathers else x
                for linear, part, grad in zip(ctx.linears, ctx.rows, grads_TF, strict=True):
                    _add_linear_grads(linear, part, grad, x_TH)

            column.deferred.put(later)
        else:
            x_TH = again.wait() if again is not None else x
            for index, (linear, grad) in enumerate(zip(ctx.linears, grads_TF, strict=True)):
                grads_w[index], grads_b[index] = _linear_grads(linear, grad, x_TH)
        grad_x = pending.wait() if pending is not None else None
        return grad_x, None, None, None, *grads_w, *grads_b


@dataclass(frozen=True)
class RowParallel:
    """The `row` seam: a linear on this rank's input features, summed over the ranks.

    The bias is added once, after the sum. Attributes as in `ColumnParallel`.
    """

    group: dist.ProcessGroup | None
    sequence_parallel: bool
    deferred: DeferredWeights

    def __call__(self, x_TF: Tensor, linear: Linear) -> Tensor:
        """[T, F] -> [T or t, H]."""
        y: Tensor = _Row.apply(x_TF, local(linear.weight), self, linear)
        return y if linear.bias is None else y + local(linear.bias)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight: Tensor, row: RowParallel, linear: Linear) -> Tensor:
        ctx.save_for_backward(x_TF, weight)
        ctx.row, ctx.linear = row, linear
        y_TH = F.linear(x_TF, weight)
        reduce = reduce_scatter if row.sequence_parallel else all_reduce
        return reduce(y_TH, row.group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x_TF, weight = ctx.saved_tensors
        row: RowParallel = ctx.row
        grad_TH = all_gather(grad, row.group) if row.sequence_parallel else grad
        grad_weight = None
        if row.deferred.deferring:
            row.deferred.put(lambda: add_to_grad(ctx.linear.weight, grad_TH.t() @ x_TF))
        else:
            grad_weight = grad_TH.t() @ x_TF
        return grad_TH @ weight, grad_weight, None, None


def _part(parameter: Tensor, rows: slice | None) -> Tensor:
    return parameter if rows is None else parameter[rows]


def _linear_grads(linear: Linear, grad_TF: Tensor, x_TH: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight and bias."""
    return grad_TF.t() @ x_TH, None if linear.bias is None else grad_TF.sum(0)


def _add_linear_grads(linear: Linear, rows: slice | None, grad_TF: Tensor, x_TH: Tensor) -> None:
    weight, bias = _linear_grads(linear, grad_TF, x_TH)
    add_to_grad(linear.weight, weight, rows)
    if linear.bias is not None and bias is not None:
        add_to_grad(linear.bias, bias, rows)
