"""Optimizer state off the device: in host memory, or in a file that is read ahead."""

import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fivefold.config.memory import buffer_size, update_buffers
from fivefold.memory.host import CopyEvent, HostLink
from fivefold.memory.mapped import MappedTensors
from fivefold.optim.offload_buckets import (
    GRADIENT,
    Bucket,
    Likes,
    Line,
    Lines,
    append_places,
    in_buckets,
)


@dataclass(frozen=True)
class BucketState:
    """The state of a bucket in host memory.

    Attributes:
        bucket: the bucket.
        lines: masters, moments and gradients of the bucket.
        end: function to call when they are updated, or will be once a copy onto them has ended;
            it writes back what lies on a disk.
    """

    bucket: Bucket
    lines: Lines
    end: Callable[[CopyEvent], None]


class OffloadedState:
    """Masters and moments of parameters in host memory or in a file, and buffers for their
    gradients.

    Args:
        shapes: shapes of this rank's parts by name, in the order in which gradients arrive.
        likes: what is kept of them.
        link: copies to and from the device.
        folder: where masters and moments lie in a file; None: in memory.
        copied: whether masters and moments are copied to the device.

    Attributes:
        buckets: the buckets, in the order of updates.
        num_buffers: number of buffers through which buckets pass.
        gradients: buffer for all gradients, one after the other.
        waited_seconds: seconds for which the host waited until a bucket was read.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        likes: Likes,
        link: HostLink,
        folder: Path | None,
        *,
        copied: bool,
    ) -> None:
        self._link, ends = link, Counter[Line]()
        self._places = {name: append_places(ends, likes(shape)) for name, shape in shapes.items()}
        total = sum(map(prod, shapes.values()))
        self.num_buffers, each = update_buffers(total)
        self.buckets = in_buckets(shapes, each, likes)
        self._capacities = {
            line: buffer_size(
                each,
                [
                    (prod(shapes[name]), place.within.stop - place.within.start)
                    for name, places in self._places.items()
                    for place in places.values()
                    if place.line == line
                ],
            )
            for line in ends
        }
        dtype = likes((0,))[GRADIENT].dtype
        self._gradients = GRADIENT, dtype
        self.gradients = link.buffer(total, dtype)
        self._file: MappedTensors | None = None
        self._file_buffers: list[Lines] = []
        kept = {line: size for line, size in ends.items() if line != self._gradients}
        make = link.buffer if copied else _memory
        if folder is None:
            self._lines: Lines = {line: make(n, line[1]).zero_() for line, n in kept.items()}
        else:
            like = {line: torch.empty(n, dtype=line[1], device="meta") for line, n in kept.items()}
            self._file = MappedTensors(like, folder)
            self._lines = self._file.tensors
            self._file_buffers = [
                self.buffer(make) for _ in range(self.num_buffers if total else 0)
            ]
        self._reader, self._writer = (ThreadPoolExecutor(1, f"state-{i}") for i in range(2))
        self._writes: dict[int, Future[None]] = {}
        self._read_seconds = self._written_seconds = 0.0
        self.waited_seconds = 0.0

    def buffer(
        self, make: Callable[[int, torch.dtype], Tensor], *, gradients: bool = False
    ) -> dict[Line, Tensor]:
        """Size of the buffer for the masters and moments of any bucket, and for its gradients if
        wanted."""
        lines = [*([self._gradients] if gradients else ()), *self._lines]
        return {line: make(self._capacities.get(line, 0), line[1]) for line in lines}

    @property
    def moving_seconds(self) -> float:
        """Seconds of reading and writing files."""
        return self._read_seconds + self._written_seconds

    def tensors(self) -> Iterator[Tensor]:
        """Everything in host memory."""
        yield self.gradients
        for lines in self._file_buffers if self._file is not None else [self._lines]:
            yield from lines.values()

    def disk_bytes(self) -> int:
        """Bytes in files."""
        return 0 if self._file is None else self._file.nbytes

    def gradient(self, name: str) -> Tensor:
        """Host buffer for a parameter's gradient."""
        return self._places[name][GRADIENT].of({self._gradients: self.gradients})

    def kept(self, name: str) -> dict[str, Tensor]:
        """The master of a parameter, its moments and their scales, where they are stored."""
        self.synchronize()
        places = self._places[name].items()
        return {state: place.of(self._lines) for state, place in places if state != GRADIENT}

    def synchronize(self) -> None:
        """Wait until all is written."""
        while self._writes:
            self._writes.popitem()[1].result()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is while it is updated in host memory."""
        held = self.held(bucket)
        if self._file is None:
            return held
        return bucket.in_buffer({**held, **self._file_buffers[bucket.number % self.num_buffers]})

    def held(self, bucket: Bucket) -> Lines:
        """A bucket where it is stored."""
        return bucket.of({**self._lines, self._gradients: self.gradients})

    def having(self, names: Container[str]) -> Iterator[Bucket]:
        """The buckets with parts of these parameters."""
        for bucket in self.buckets:
            if any(part.name in names for part in bucket.parts):
                yield bucket

    def seal(self, bucket: Bucket) -> None:
        """Record that masters and moments were set, so that files hold them."""
        if self._file is not None:
            self._file.seal(_on_disk(bucket))

    def bucket_states(self) -> Iterator[BucketState]:
        """Each bucket in host memory, in turn; the next one is read meanwhile."""
        if self._file is None:
            yield from (
                BucketState(each, self.lines_of(each), lambda _: None) for each in self.buckets
            )
            return
        ahead = self._start_reading(self.buckets[0]) if self.buckets else None
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            reading, began = ahead, time.perf_counter()
            ahead = None if following is None else self._start_reading(following)
            assert reading is not None
            reading.result()
            self.waited_seconds += time.perf_counter() - began
            yield BucketState(bucket, self.lines_of(bucket), partial(self._start_writing, bucket))

    def _start_reading(self, bucket: Bucket) -> Future[None]:
        before = self._writes.pop(bucket.number % self.num_buffers, None)
        return self._reader.submit(self._read, bucket, before)

    def _read(self, bucket: Bucket, before: Future[None] | None) -> None:
        """Read a bucket, after the previous contents of its buffer have been written."""
        if before is not None:
            before.result()
        began = time.perf_counter()
        assert self._file is not None
        lines, whose = self.lines_of(bucket), f"the bucket of {bucket.parts[0].name}"
        for line, section in _on_disk(bucket):
            self._file.read((line, section), lines[line], whose)
        self._read_seconds += time.perf_counter() - began

    def _start_writing(self, bucket: Bucket, event: CopyEvent) -> None:
        written = self._writer.submit(self._write, bucket, event)
        self._writes[bucket.number % self.num_buffers] = written

    def _write(self, bucket: Bucket, event: CopyEvent) -> None:
        self._link.synchronize(event)
        began = time.perf_counter()
        assert self._file is not None
        lines = self.lines_of(bucket)
        for line, section in _on_disk(bucket):
            self._file.write((line, section), lines[line])
        self._file.leave()
        self._written_seconds += time.perf_counter() - began


def _on_disk(bucket: Bucket) -> Iterator[tuple[Line, slice]]:
    """The part of a bucket that is in the file."""
    return (part for part in bucket.sections.items() if part[0][0] != GRADIENT)


def _memory(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)
