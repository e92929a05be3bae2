"""Messages of rows whose numbers differ from rank to rank, with gradients.

Shapes: R rows of this rank, P ranks of a group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import all_gather, all_to_all, reduce_scatter


def swap(x: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-to-all: the p-th piece of the rows goes to rank p, [R, ...] -> [sum(got), ...].

    Args:
        x: rows in the order of the ranks.
        sent: rows for each rank.
        got: rows from each rank.
        group: group whose ranks take part.
    """
    y: Tensor = _Swap.apply(x, list(sent), list(got), group)
    return y


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.rest = sent, got, group
        return _moved(x, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        sent, got, group = ctx.rest
        return _moved(grad, got, sent, group), None, None, None


def _moved(x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), *x.shape[1:])
    all_to_all(list(x.split(sent)), list(out.split(got)), group)
    return out


def join(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather of uneven parts, [R, ...] -> [sum(rows), ...]; the backward sums and scatters.

    Args:
        x: rows of this rank.
        rows: rows of each rank.
        group: group whose ranks contribute, in order.
    """
    y: Tensor = _Join.apply(x, list(rows), group)
    return y


def share(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter to uneven parts, [sum(rows), ...] -> [R, ...]; the inverse of `join`."""
    y: Tensor = _Share.apply(x, list(rows), group)
    return y


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = rows, group
        return _joined(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _shared(grad, *ctx.rest), None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = rows, group
        return _shared(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _joined(grad, *ctx.rest), None, None


def _joined(x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """Even parts travel by the collective itself; uneven ones as messages to every rank."""
    if len(set(rows)) == 1:
        return all_gather(x, group)
    out = x.new_empty(sum(rows), *x.shape[1:])
    all_to_all([x] * group.size(), list(out.split(rows)), group)
    return out


def _shared(x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    if len(set(rows)) == 1:
        return reduce_scatter(x, group)
    own = rows[group.rank()]
    parts = x.new_empty(group.size(), own, *x.shape[1:])
    all_to_all(list(x.split(rows)), list(parts.unbind()), group)
    return parts.sum(0)
