"""Which optimizer state off the device is updated together.

All elements of a rank's parameters form a line, of which each bucket is a section, whatever the
shapes: so the buffers through which buckets pass are small, however large an embedding is.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import lcm, prod

import torch
from torch import Tensor

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
    """Location of a state of some elements.

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
    """A bucket's part of a parameter: whole rows, in multiples of a CPU's vector.

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
        """The bucket's sections of lines that hold all buckets."""
        return {line: lines[line][section] for line, section in self.sections.items()}

    def in_buffer(self, buffer: Lines) -> Lines:
        """The bucket's sections of a buffer into which any bucket fits."""
        return {line: buffer[line][: s.stop - s.start] for line, s in self.sections.items()}


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
            BucketPart(name, elements, shape, append_places(ends, likes(shape)))
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


def append_places(ends: Counter[Line], like: Mapping[str, Tensor]) -> dict[str, StatePlace]:
    """Append places for states to their lines; `like`: see `Likes`."""
    found = dict[str, StatePlace]()
    for state, tensor in like.items():
        line = state, tensor.dtype
        within = slice(ends[line], ends[line] + tensor.numel())
        ends[line] = within.stop
        found[state] = StatePlace(line, within, tuple(tensor.shape))
    return found
