"""Rooms on the device in which optimizer state from host memory is updated, bucket by bucket."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.memory.host import HostLink, Mark
from fivefold.optim.offload_state import GRADIENT, Bucket, Lines, OffloadedState, Visit


class UpdateRooms:
    """Rooms on the device that hold a bucket each: one comes, one is updated, one goes back.

    Args:
        state: what passes through.
        link: copies to and from the host.
    """

    def __init__(self, state: OffloadedState, link: HostLink) -> None:
        self._state, self._link = state, link
        self._rooms = [
            {GRADIENT: torch.empty(state.capacity, dtype=state.gradients.dtype, device=link.device)}
            | state.room(lambda n, d: torch.empty(n, dtype=d, device=link.device))
            for _ in range(state.rooms)
        ]
        self._free: list[Mark] = [None] * state.rooms
        self._last: Mark = None

    def tensors(self) -> Iterator[Tensor]:
        """All rooms."""
        for room in self._rooms:
            yield from room.values()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is updated."""
        length = bucket.section.stop - bucket.section.start
        return {n: line[:length] for n, line in self._rooms[self._at(bucket)].items()}

    def bring(self, visit: Visit, left: Mark) -> Mark:
        """Start copying a bucket here; `left`: when the last of its gradients is on the host."""
        lines = self.lines_of(visit.bucket)
        for name in self._state.dtypes:
            freed = self._free[self._at(visit.bucket)]
            self._link.back(visit.lines[name], lines[name], after=freed)
        return self._link.back(visit.lines[GRADIENT], lines[GRADIENT], after=left)

    def give_back(self, visit: Visit) -> Mark:
        """Start copying an updated bucket to the host."""
        lines = self.lines_of(visit.bucket)
        marks = [self._link.out(lines[n], visit.lines[n])[1] for n in self._state.dtypes]
        self._last = self._free[self._at(visit.bucket)] = marks[-1]
        return self._last

    def settle(self) -> None:
        """Wait on the host until all is there."""
        self._link.arrive(self._last)

    def _at(self, bucket: Bucket) -> int:
        return bucket.number % len(self._rooms)
