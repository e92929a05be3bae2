"""Where optimizer state off the device lies, and which of it is updated together.

All elements of a rank's parameters form a line, of which each bucket is a section, whatever the
shapes: so the rooms through which buckets pass are small, however large an embedding is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import lcm, prod
from pathlib import Path

import torch
from torch import Tensor

from fivefold.config.memory import room_for, update_rooms
from fivefold.memory.host import HostLink, Mark
from fivefold.memory.mapped import MappedTensors
from fivefold.optim.rounding import LANES, NamedElements

Line = tuple[str, torch.dtype]
"""A state that is kept, and its type: vectors have wide moments where matrices have narrow ones."""
Lines = Mapping[Line, Tensor]
"""Flat tensors by what they hold."""
Likes = Callable[[tuple[int, ...]], Mapping[str, Tensor]]
"""Shape of a parameter, or of rows of one -> tensors on the meta device like what is kept of it:
`MASTER`, `GRADIENT`, and moments and their scales by the optimizer's names."""
GRADIENT = "gradient"


@dataclass(frozen=True)
class StatePlace:
    """Where a state of some elements lies.

    Attributes:
        line: the line.
        within: which of its numbers.
        shape: their shape.
    """

    line: Line
    within: slice
    shape: tuple[int, ...]

    def of(self, lines: Lines) -> Tensor:
        """The state."""
        return lines[self.line][self.within].view(self.shape)


@dataclass(frozen=True)
class BucketPart:
    """What a bucket has of a parameter: whole rows, so many that no vector of a CPU is cut.

    Attributes:
        name: name of the parameter.
        elements: which of this rank's elements of it.
        shape: their shape, rows and columns, or as many as there are of a vector.
        places: where each state of them lies in the lines of the bucket.
    """

    name: str
    elements: slice
    shape: tuple[int, ...]
    places: Mapping[str, StatePlace]

    def of(self, state: str, lines: Lines) -> Tensor:
        """A state of these elements, from the lines of the bucket."""
        return self.places[state].of(lines)

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
        sections: where it lies in each line.
        parts: its parts of parameters, in order.
    """

    number: int
    sections: Mapping[Line, slice]
    parts: tuple[BucketPart, ...]

    def of(self, lines: Lines) -> Lines:
        """Its lines, from lines of all buckets."""
        return {line: lines[line][section] for line, section in self.sections.items()}

    def in_room(self, room: Lines) -> Lines:
        """Its lines, in a room that any bucket fits in."""
        return {line: room[line][: s.stop - s.start] for line, s in self.sections.items()}


def in_buckets(shapes: Mapping[str, tuple[int, ...]], limit: int, likes: Likes) -> list[Bucket]:
    """Cut the lines of all parameters into buckets.

    Args:
        shapes: shapes of this rank's parts of parameters by name, in the order of the lines.
        limit: most elements of a bucket; one that holds a single part may be larger.
        likes: what is kept of them.
    """
    buckets, starts = list[Bucket](), Counter[Line]()
    for number, cuts in enumerate(_cut(shapes, limit)):
        ends = Counter[Line]()
        parts = tuple(
            BucketPart(name, elements, shape, _append(ends, likes(shape)))
            for name, elements, shape in cuts
        )
        sections = {line: slice(starts[line], starts[line] + size) for line, size in ends.items()}
        buckets.append(Bucket(number, sections, parts))
        starts.update(ends)
    return buckets


_Cut = tuple[str, slice, tuple[int, ...]]


def _cut(shapes: Mapping[str, tuple[int, ...]], limit: int) -> Iterator[list[_Cut]]:
    """(name, elements, shape) of the parts of each bucket.

    A parameter is cut between rows, where also `LANES` divides its elements: a CPU's fused AdamW
    computes what its vectors leave over in other bits.
    """
    cuts, held = list[_Cut](), 0
    for name, shape in shapes.items():
        size, columns = prod(shape), shape[-1:] if len(shape) > 1 else ()
        unit, done = lcm(*columns, LANES), 0
        if not columns:  # a vector is one row
            unit = max(size, 1)
        while done < size:
            taken, room = size - done, max(limit - held, 0)
            if taken > room:
                taken = room // unit * unit
            if not (taken or cuts):
                taken = min(unit, size - done)
            if taken:
                part_shape = (taken // columns[0], *columns) if columns else (taken,)
                cuts.append((name, slice(done, done + taken), part_shape))
                done, held = done + taken, held + taken
            else:
                yield cuts
                cuts, held = [], 0
    if cuts:
        yield cuts


def _append(ends: Counter[Line], like: Mapping[str, Tensor]) -> dict[str, StatePlace]:
    """Places for states at the ends of their lines, which move on."""
    found = dict[str, StatePlace]()
    for state, tensor in like.items():
        line = state, tensor.dtype
        within = slice(ends[line], ends[line] + tensor.numel())
        ends[line] = within.stop
        found[state] = StatePlace(line, within, tuple(tensor.shape))
    return found


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
        likes: what is kept of them.
        link: copies to and from the device.
        folder: where masters and moments lie in a file; None: in memory.
        copied: whether masters and moments are copied to the device.

    Attributes:
        buckets: the buckets, in the order of updates.
        rooms: how many rooms there are through which buckets pass.
        gradients: room for all gradients, one after the other.
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
        self._places = {name: _append(ends, likes(shape)) for name, shape in shapes.items()}
        total = sum(map(prod, shapes.values()))
        self.rooms, each = update_rooms(total)
        self.buckets = in_buckets(shapes, each, likes)
        self._capacities = {
            line: room_for(
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
        self.gradients = link.room(total, dtype)
        self._file: MappedTensors | None = None
        self._visiting: list[Lines] = []
        kept = {line: size for line, size in ends.items() if line != self._gradients}
        make = link.room if copied else _memory
        if folder is None:
            self._lines: Lines = {line: make(n, line[1]).zero_() for line, n in kept.items()}
        else:
            like = {line: torch.empty(n, dtype=line[1], device="meta") for line, n in kept.items()}
            self._file = MappedTensors(like, folder)
            self._lines = self._file.tensors
            self._visiting = [self.room(make) for _ in range(self.rooms if total else 0)]
        self._reader, self._writer = (ThreadPoolExecutor(1, f"state-{i}") for i in range(2))
        self._writes: dict[int, Future[None]] = {}
        self._read_seconds = self._written_seconds = 0.0
        self.waited_seconds = 0.0

    def room(
        self, make: Callable[[int, torch.dtype], Tensor], *, gradients: bool = False
    ) -> dict[Line, Tensor]:
        """Room for the masters and moments of any bucket, and for its gradients if wanted."""
        lines = [*([self._gradients] if gradients else ()), *self._lines]
        return {line: make(self._capacities.get(line, 0), line[1]) for line in lines}

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
        return self._places[name][GRADIENT].of({self._gradients: self.gradients})

    def kept(self, name: str) -> dict[str, Tensor]:
        """The master of a parameter, its moments and their scales, where they are kept."""
        self.settle()
        places = self._places[name].items()
        return {state: place.of(self._lines) for state, place in places if state != GRADIENT}

    def settle(self) -> None:
        """Wait until all is written."""
        while self._writes:
            self._writes.popitem()[1].result()

    def lines_of(self, bucket: Bucket) -> Lines:
        """Where a bucket is when it is updated in host memory."""
        held = self.held(bucket)
        if self._file is None:
            return held
        return bucket.in_room({**held, **self._visiting[bucket.number % self.rooms]})

    def held(self, bucket: Bucket) -> Lines:
        """A bucket where it is kept."""
        return bucket.of({**self._lines, self._gradients: self.gradients})

    def seal(self) -> None:
        """Take note that masters and moments were set, so that files are known to hold them."""
        if self._file is not None:
            self._file.seal(part for bucket in self.buckets for part in _on_disk(bucket))

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
        for line, section in _on_disk(bucket):
            self._file.read((line, section), lines[line], whose)
        self._read_seconds += time.perf_counter() - began

    def _start_writing(self, bucket: Bucket, mark: Mark) -> None:
        written = self._writer.submit(self._write, bucket, mark)
        self._writes[bucket.number % self.rooms] = written

    def _write(self, bucket: Bucket, mark: Mark) -> None:
        self._link.arrive(mark)
        began = time.perf_counter()
        assert self._file is not None
        lines = self.lines_of(bucket)
        for line, section in _on_disk(bucket):
            self._file.write((line, section), lines[line])
        self._file.leave()
        self._written_seconds += time.perf_counter() - began


def _on_disk(bucket: Bucket) -> Iterator[tuple[Line, slice]]:
    """What a file holds of a bucket."""
    return (part for part in bucket.sections.items() if part[0][0] != GRADIENT)


def _memory(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)
