"""Messages of rows whose numbers differ from rank to rank, with gradients.

Shapes: R rows of this rank, P ranks of a group.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import (
    Messages,
    all_gather,
    all_to_all,
    reduce_scatter,
    start_all_to_all,
)


class Flight:
    """An all-to-all under way: the p-th piece of the rows goes to rank p.

    What is computed between `start` and `land` runs beside it, and what that leaves for the
    backward beside the messages of the gradients: autograd runs the latest nodes first.

    Args:
        sent: rows for each rank.
        got: rows from each rank.
        group: group whose ranks take part.
    """

    def __init__(self, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup) -> None:
        self._sent, self._got, self._group = list(sent), list(got), group
        self._under_way: tuple[Messages, Tensor] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Send [R, ...], in the order of the ranks; its own value, to be given to `land`."""
        y: Tensor = _Start.apply(x, self)
        return y

    def land(self, x: Tensor) -> Tensor:
        """What has arrived, [sum(got), ...]."""
        y: Tensor = _Land.apply(x, self)
        return y

    def begin(self, x: Tensor, *, home: bool) -> Tensor:
        """Start sending rows there, or gradients home; what arrives is whole after `wait`."""
        sent, got = (self._got, self._sent) if home else (self._sent, self._got)
        out = x.new_empty(sum(got), *x.shape[1:])
        messages = start_all_to_all(list(x.split(sent)), list(out.split(got)), self._group)
        self._under_way = messages, out
        return out

    def wait(self) -> Tensor:
        """What was begun last, once all of it has arrived."""
        assert self._under_way is not None
        (messages, out), self._under_way = self._under_way, None
        messages.wait()
        return out


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.begin(x, home=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait()
        return grad, None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.begin(grad, home=True), None


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
