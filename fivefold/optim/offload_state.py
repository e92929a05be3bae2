"""Where optimizer state off the device lies, and which of it is updated together.

All elements of a rank's parameters form a line, of which each bucket is a section, whatever the
shapes: so the rooms through which buckets pass are small, however large an embedding is.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from fivefold.config.memory import update_rooms
from fivefold.memory.host import HostLink, Mark
from fivefold.memory.mapped import MappedTensors
from fivefold.optim.rounding import LANES, NamedElements

Lines = Mapping[str, Tensor]
"""Flat tensors by what they hold: `MASTER`, `GRADIENT`, or a moment by torch's name."""
MASTER, GRADIENT = "master", "gradient"


@dataclass(frozen=True)
class BucketPart:
    """What a bucket has of a parameter: whole rows, so many that no vector of a CPU is cut.

    Attributes:
        name: name of the parameter.
        elements: which of this rank's elements of it.
        within: where these lie in the bucket.
        shape: their shape, rows and columns, or as many as there are of a vector.
    """

    name: str
    elements: slice
    within: slice
    shape: tuple[int, ...]

    def of(self, line: Tensor) -> Tensor:
        """These elements of a line of the bucket, in their shape."""
        return line[self.within].view(self.shape)

    def place(self, whole: NamedElements) -> NamedElements:
        """Where they are in the whole model."""
        columns = self.shape[-1]
        rows = slice(self.elements.start // columns, self.elements.stop // columns)
        return replace(whole, within=rows)


@dataclass(frozen=True)
class Bucket:
    """Elements that are updated together.

    Attributes:
        number: its place among the buckets.
        section: where it lies in the lines.
        parts: its parts of parameters, in order.
    """

    number: int
    section: slice
    parts: tuple[BucketPart, ...]


def in_buckets(shapes: Mapping[str, tuple[int, ...]], limit: int) -> list[Bucket]:
    """Cut the line of all parameters into buckets.

    A parameter is cut between rows, where also `LANES` divides its elements: a CPU's fused AdamW
    computes what its vectors leave over in other bits.

    Args:
        shapes: shapes of this rank's parts of parameters by name, in the order of the line.
        limit: most elements of a bucket; one that holds a single part may be larger.
    """
    sections: list[list[BucketPart]] = [[]]
    held = 0
    for name, shape in shapes.items():
        size, columns = prod(shape), shape[-1:] if len(shape) > 1 else ()
        unit, done = lcm(*columns, LANES), 0
        if not columns:  # a vector is one row
            unit = max(size, 1)
        while done < size:
            taken, room = size - done, max(limit - held, 0)
            if taken > room:
                taken = room // unit * unit
            if not (taken or sections[-1]):
                taken = min(unit, size - done)
            if taken:
                within = slice(held, held := held + taken)
                part_shape = (taken // columns[0], *columns) if columns else (taken,)
                part = BucketPart(name, slice(done, done + taken), within, part_shape)
                sections[-1].append(part)
                done += taken
            else:
                sections.append([])
                held = 0
    buckets, start = list[Bucket](), 0
    for number, parts in enumerate(filter(None, sections)):
        section = slice(start, start := start + parts[-1].within.stop)
        buckets.append(Bucket(number, section, tuple(parts)))
    return buckets


@dataclass(frozen=True)
class Visit:
    """The state of a bucket in host memory.

    Attributes:
        bucket: the bucket.
        lines: masters, moments and gradients of the bucket.
        end: to be called when they are updated, or will be once a copy onto them has ended; what
            lies on a disk is then written back.
    """

    bucket: Bucket
    lines: Lines
    end: Callable[[Mark], None]


class OffloadedState:
    """Masters and moments of parameters in host memory or in a file, and room for their gradients.

    Args:
        shapes: shapes of this rank's parts by name, in the order in which gradients arrive.
        dtypes: dtypes of gradients, masters and moments.
        link: copies to and from the device.
        folder: where masters and moments lie in a file; None: in memory.
        copied: whether masters and moments are copied to the device.

    Attributes:
        buckets: the buckets, in the order of updates.
        capacity: elements of each room through which they pass.
        rooms: how many such rooms there are.
        dtypes: dtypes of masters and moments.
        gradients: room for all gradients, one after the other.
        waited_seconds: seconds for which the host waited until a bucket was read.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        link: HostLink,
        folder: Path | None,
        *,
        copied: bool,
    ) -> None:
        self._shapes, self._link = shapes, link
        self.dtypes = {name: dtype for name, dtype in dtypes.items() if name != GRADIENT}
        ends, total = dict[str, int](), 0
        for name, shape in shapes.items():
            ends[name] = total = total + prod(shape)
        self._sections = {n: slice(end - prod(shapes[n]), end) for n, end in ends.items()}
        self.rooms, self.capacity = update_rooms(total)
        self.buckets = in_buckets(shapes, self.capacity)
        self.gradients = link.room(total, dtypes[GRADIENT])
        self._room = link.room if copied else _memory
        self._file: MappedTensors | None = None
        self._visiting: list[Lines] = []
        if folder is None:
            self._lines: Lines = {n: self._room(total, d).zero_() for n, d in self.dtypes.items()}
        else:
            likes = {n: torch.empty(total, dtype=d, device="meta") for n, d in self.dtypes.items()}
            self._file = MappedTensors(likes, folder)
            self._lines = self._file.tensors
            self._visiting = [self.room(self._room) for _ in range(self.rooms if total else 0)]
        self._reader, self._writer = (ThreadPoolExecutor(1, f"state-{i}") for i in range(2))
        self._writes: dict[int, Future[None]] = {}
        self._read_seconds = self._written_seconds = 0.0
        self.waited_seconds = 0.0

    def room(self, make: Callable[[int, torch.dtype], Tensor]) -> dict[str, Tensor]:
        """Room for the masters and moments of any bucket."""
        return {name: make(self.capacity, dtype) for name, dtype in self.dtypes.items()}

    @property
    def moving_seconds(self) -> float:
        """Seconds of reading and writing files."""
        return self._read_seconds + self._written_seconds

    def tensors(self) -> Iterator[Tensor]:
        """All that is in host memory."""
        yield self.gradients
        for lines in self._visiting if self._file is not None else [self._lines]:
            yield from lines.values()

    def disk_bytes(self) -> int:
        """Bytes in files."""
        return 0 if self._file is None else self._file.nbytes

    def gradient(self, name: str) -> Tensor:
        """Room for a parameter's gradient."""
        return self.gradients[self._sections[name]].view(self._shapes[name])

    def kept(self, line: str, name: str) -> Tensor:
        """The master of a parameter, or one of its moments, where it is kept."""
        self.settle()
        return self._lines[line][self._sections[name]].view(self._shapes[name])

    def settle(self) -> None:
        """Wait until all is written."""
        while self._writes:
            self._writes.popitem()[1].result()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is when it is updated in host memory."""
        gradients = {GRADIENT: self.gradients[bucket.section]}
        if self._file is None:
            return gradients | {name: line[bucket.section] for name, line in self._lines.items()}
        length = bucket.section.stop - bucket.section.start
        room = self._visiting[bucket.number % self.rooms]
        return gradients | {name: line[:length] for name, line in room.items()}

    def masters(self, bucket: Bucket) -> Tensor:
        """The masters of a bucket where they are kept."""
        return self._lines[MASTER][bucket.section]

    def seal(self) -> None:
        """Take note that masters and moments were set, so that files are known to hold them."""
        if self._file is not None:
            sections = [bucket.section for bucket in self.buckets]
            self._file.seal((name, each) for name in self._lines for each in sections)

    def visits(self) -> Iterator[Visit]:
        """Each bucket in host memory, in turn; the next one is read meanwhile."""
        if self._file is None:
            yield from (Visit(each, self.lines_of(each), lambda _: None) for each in self.buckets)
            return
        ahead = self._start_reading(self.buckets[0]) if self.buckets else None
        for bucket, following in zip_longest(self.buckets, self.buckets[1:]):
            reading, began = ahead, time.perf_counter()
            ahead = None if following is None else self._start_reading(following)
            assert reading is not None
            reading.result()
            self.waited_seconds += time.perf_counter() - began
            yield Visit(bucket, self.lines_of(bucket), partial(self._start_writing, bucket))

    def _start_reading(self, bucket: Bucket) -> Future[None]:
        before = self._writes.pop(bucket.number % self.rooms, None)
        return self._reader.submit(self._read, bucket, before)

    def _read(self, bucket: Bucket, before: Future[None] | None) -> None:
        """Read a bucket, once what was in its room before is written."""
        if before is not None:
            before.result()
        began = time.perf_counter()
        assert self._file is not None
        lines, whose = self.lines_of(bucket), f"the bucket of {bucket.parts[0].name}"
        for name in self.dtypes:
            self._file.read((name, bucket.section), lines[name], whose)
        self._read_seconds += time.perf_counter() - began

    def _start_writing(self, bucket: Bucket, mark: Mark) -> None:
        written = self._writer.submit(self._write, bucket, mark)
        self._writes[bucket.number % self.rooms] = written

    def _write(self, bucket: Bucket, mark: Mark) -> None:
        self._link.arrive(mark)
        began = time.perf_counter()
        assert self._file is not None
        lines = self.lines_of(bucket)
        for name in self.dtypes:
            self._file.write((name, bucket.section), lines[name])
        self._file.leave()
        self._written_seconds += time.perf_counter() - began


def _memory(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)
