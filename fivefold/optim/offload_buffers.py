"""Buffers on the device in which optimizer state from host memory is updated, bucket by bucket."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fivefold.memory.host import CopyEvent, HostLink
from fivefold.optim.offload_buckets import GRADIENT, Bucket, Lines
from fivefold.optim.offload_state import BucketState, OffloadedState


class UpdateBuffers:
    """Device buffers for one bucket each: one is being filled, one updated, one copied back.

    Args:
        state: what passes through.
        link: copies to and from the host.
    """

    def __init__(self, state: OffloadedState, link: HostLink) -> None:
        self._link = link
        self._buffers = [
            state.buffer(lambda n, d: torch.empty(n, dtype=d, device=link.device), gradients=True)
            for _ in range(state.num_buffers)
        ]
        self._free: list[CopyEvent] = [None] * state.num_buffers
        self._last: CopyEvent = None

    def tensors(self) -> Iterator[Tensor]:
        """All buffers."""
        for buffer in self._buffers:
            yield from buffer.values()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is updated."""
        return bucket.in_buffer(self._buffers[self._at(bucket)])

    def fetch(self, bucket_state: BucketState, arrived: CopyEvent) -> CopyEvent:
        """Start copying a bucket into a buffer; `arrived`: the event after its last gradient has
        reached the host."""
        freed = self._free[self._at(bucket_state.bucket)]
        lines = self.lines_of(bucket_state.bucket)
        # Gradients last: they may still be on their way to the host.
        for line in sorted(lines, key=lambda line: line[0] == GRADIENT):
            after = arrived if line[0] == GRADIENT else freed
            event = self._link.to_device(bucket_state.lines[line], lines[line], after=after)
        return event

    def write_back(self, bucket_state: BucketState) -> CopyEvent:
        """Start copying an updated bucket to the host."""
        lines = self.lines_of(bucket_state.bucket)
        events = [
            self._link.to_host(lines[line], bucket_state.lines[line])[1]
            for line in lines
            if line[0] != GRADIENT
        ]
        self._last = self._free[self._at(bucket_state.bucket)] = events[-1]
        return self._last

    def synchronize(self) -> None:
        """Wait on the host until all buckets have been copied back."""
        self._link.synchronize(self._last)

    def _at(self, bucket: Bucket) -> int:
        return bucket.number % len(self._buffers)
