"""Buffers on the device in which optimizer state from host memory is updated, bucket by bucket."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.memory.host import HostLink, Mark
from fivefold.optim.offload_buckets import GRADIENT, Bucket, Lines
from fivefold.optim.offload_state import OffloadedState, Visit


class UpdateRooms:
    """Device buffers for one bucket each: one is being filled, one updated, one copied back.

    Args:
        state: what passes through.
        link: copies to and from the host.
    """

    def __init__(self, state: OffloadedState, link: HostLink) -> None:
        self._link = link
        self._rooms = [
            state.room(lambda n, d: torch.empty(n, dtype=d, device=link.device), gradients=True)
            for _ in range(state.rooms)
        ]
        self._free: list[Mark] = [None] * state.rooms
        self._last: Mark = None

    def tensors(self) -> Iterator[Tensor]:
        """All buffers."""
        for room in self._rooms:
            yield from room.values()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is updated."""
        return bucket.in_room(self._rooms[self._at(bucket)])

    def bring(self, visit: Visit, left: Mark) -> Mark:
        """Start copying a bucket into a buffer; `left`: the event after its last gradient has
        reached the host."""
        freed = self._free[self._at(visit.bucket)]
        lines = self.lines_of(visit.bucket)
        # Gradients last: they may still be on their way to the host.
        for line in sorted(lines, key=lambda line: line[0] == GRADIENT):
            after = left if line[0] == GRADIENT else freed
            mark = self._link.back(visit.lines[line], lines[line], after=after)
        return mark

    def give_back(self, visit: Visit) -> Mark:
        """Start copying an updated bucket to the host."""
        lines = self.lines_of(visit.bucket)
        marks = [
            self._link.out(lines[line], visit.lines[line])[1]
            for line in lines
            if line[0] != GRADIENT
        ]
        self._last = self._free[self._at(visit.bucket)] = marks[-1]
        return self._last

    def settle(self) -> None:
        """Wait on the host until all buckets have been copied back."""
        self._link.arrive(self._last)

    def _at(self, bucket: Bucket) -> int:
        return bucket.number % len(self._rooms)
