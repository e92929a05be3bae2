"""Differentiable exchanges of rows whose number differs between ranks.

Shapes: R rows of this rank, P ranks of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import (
    Messages,
    all_gather,
    all_to_all,
    reduce_scatter,
    start_row_exchange,
)


class AsyncAllToAll:
    """An asynchronous all-to-all: the p-th piece of the rows goes to rank p.

    Computation between `start` and `land` overlaps with it, and its backward overlaps with the
    messages of the gradients, because autograd runs the latest nodes first.

    Args:
        sent: number of rows for each rank.
        got: number of rows from each rank.
        group: ranks that take part.
        meanwhile: function called before waiting, forward and backward; None: nothing.
    """

    def __init__(
        self,
        sent: Sequence[int],
        got: Sequence[int],
        group: dist.ProcessGroup,
        meanwhile: Callable[[], None] | None,
    ) -> None:
        self._sent, self._got, self._group = list(sent), list(got), group
        self._meanwhile = meanwhile
        self._under_way: tuple[Messages, Tensor] | None = None

    def start(self, x: Tensor) -> Tensor:
        """Start sending [R, ...], in rank order; returns a value to pass to `land`."""
        y: Tensor = _StartAllToAll.apply(x, self)
        return y

    def land(self, x: Tensor) -> Tensor:
        """Wait, and return the rows that arrived, [sum(got), ...]."""
        y: Tensor = _WaitAllToAll.apply(x, self)
        return y

    def begin(self, x: Tensor, *, backward: bool) -> Tensor:
        """Start sending rows [R, ...], or with `backward` their gradients back.

        Returns the receive buffer, which is valid after `wait`.
        """
        sent, got = (self._got, self._sent) if backward else (self._sent, self._got)
        out = x.new_empty(sum(got), *x.shape[1:])
        self._under_way = start_row_exchange(x, out, sent, got, self._group), out
        return out

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Wraps the computation between `start` and `land`: if it raises, waits for the messages.

        Recomputation raises where nothing more is needed; no message may then stay unreceived.
        """
        try:
            yield
        except Exception:
            self.wait()
            raise

    def wait(self) -> Tensor:
        """The result of the last `begin`, once it has arrived."""
        if self._meanwhile is not None:
            self._meanwhile()
        assert self._under_way is not None
        (messages, out), self._under_way = self._under_way, None
        messages.wait()
        return out


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        flight.begin(x, backward=False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.flight.wait()
        return grad, None


class _WaitAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: AsyncAllToAll) -> Tensor:
        ctx.flight = flight
        return flight.wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.begin(grad, backward=True), None


def join(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather of uneven parts, [R, ...] -> [sum(rows), ...]; its backward is `share`.

    Args:
        x: rows of this rank.
        rows: number of rows of each rank.
        group: ranks that contribute, in order.
    """
    y: Tensor = _JoinPieces.apply(x, list(rows), group)
    return y


def share(x: Tensor, rows: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatter to uneven parts, [sum(rows), ...] -> [R, ...]; the inverse of `join`."""
    y: Tensor = _SharePieces.apply(x, list(rows), group)
    return y


class _JoinPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = rows, group
        return _joined(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _shared(grad, *ctx.rest), None, None


class _SharePieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.rest = rows, group
        return _shared(x, rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _joined(grad, *ctx.rest), None, None


def _joined(x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    """All-gather for even parts; for uneven ones, messages to every rank."""
    if len(set(rows)) == 1:
        return all_gather(x, group)
    out = x.new_empty(sum(rows), *x.shape[1:])
    all_to_all([x] * group.size(), list(out.split(rows)), group)
    return out


def _shared(x: Tensor, rows: list[int], group: dist.ProcessGroup) -> Tensor:
    if len(set(rows)) == 1:
        return reduce_scatter(x, group)
    own, ranks = rows[group.rank()], group.size()
    parts = x.new_empty(ranks * own, *x.shape[1:])
    start_row_exchange(x, parts, rows, [own] * ranks, group).wait()
    return parts.view(ranks, own, *x.shape[1:]).sum(0)
