"""All-gather and reduce-scatter in one part per rank, interleaved with computation.

The parts of an all-gather are used as they arrive, those of a reduce-scatter are sent as they are
made, so that messages travel while the computation works on another part. In round k a rank sends
to the k-th rank after it and receives from the k-th before it: as many bytes as any algorithm
sends, nothing waits to be passed on as in a ring, and a rank's host is not needed between rounds.
`benchmarks/tensor_overlap.py` compares both. A round is posted as a whole, so all ranks post their
messages in one order and none can wait in a circle.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import Pending, sum_in_order


@dataclass(frozen=True)
class _Round:
    """A message received and one sent; on CUDA both are one work."""

    rows: slice
    coming: dist.Work
    going: dist.Work


class Arriving:
    """An all-gather in progress whose parts can be used as they arrive.

    Args:
        x: [n, ...], the same shape on every rank.
        group: group whose ranks contribute, in order.

    Attributes:
        whole: [P*n, ...]; valid in the rows that the iteration has given.
    """

    def __init__(self, x: Tensor, group: dist.ProcessGroup) -> None:
        x, size, rank = x.contiguous(), group.size(), group.rank()
        self.whole = x.new_empty((size * x.size(0), *x.shape[1:]))
        self._own = _rows_of(rank, len(x))
        self._rounds = []
        for step in range(1, size):
            rows = _rows_of((rank - step) % size, len(x))
            self._rounds.append(_post(x, self.whole[rows], step, group, rows))
        self._sent = x  # alive until it has left
        self.whole[self._own].copy_(x)

    def __iter__(self) -> Iterator[slice]:
        """Rows of `whole` as they arrive, this rank's own first; once."""
        yield self._own
        for each in self._rounds:
            each.coming.wait()
            yield each.rows
        for each in self._rounds:
            each.going.wait()


def start_sum_of_parts(
    make: Callable[[slice], Tensor], length: int, group: dist.ProcessGroup
) -> Pending:
    """Reduce-scatter whose parts are sent as they are computed, those of other ranks first.

    Args:
        make: makes this rank's summands of some rows, contiguous.
        length: rows of all ranks.
        group: group whose ranks contribute; the sum runs in their order, whatever arrives first.

    Returns:
        The sum of this rank's rows, [length / P, ...]; all parts have been made.
    """
    size, rank = group.size(), group.rank()
    rounds, kept = [], []
    parts: dict[int, Tensor] = {}
    for step in range(1, size):
        rows = _rows_of((rank + step) % size, length // size)
        part = make(rows)
        source = (rank - step) % size
        parts[source] = part.new_empty(part.shape)
        rounds.append(_post(part, parts[source], step, group, rows))
        kept.append(part)
    parts[rank] = make(_rows_of(rank, length // size))
    works = [work for each in rounds for work in (each.coming, each.going)]
    # What is sent is read until the sends end, so the closure keeps it alive.
    return Pending(works, lambda keep=kept: sum_in_order([parts[r] for r in range(size)]))  # type: ignore[misc]


def _rows_of(rank: int, rows: int) -> slice:
    return slice(rank * rows, (rank + 1) * rows)


def _post(part: Tensor, room: Tensor, step: int, group: dist.ProcessGroup, rows: slice) -> _Round:
    """Start sending to the rank `step` places ahead, and receiving from as far behind."""
    size, rank = group.size(), group.rank()
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, room, group=group, group_peer=(rank - step) % size),
            dist.P2POp(dist.isend, part, group=group, group_peer=(rank + step) % size),
        ]
    )
    return _Round(rows, works[0], works[-1])
