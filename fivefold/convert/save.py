"""Writes weights as Hugging Face keeps them: files of limited size, with an index."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fivefold.checkpoint.tensor_file import write_tensors
from fivefold.convert.hub import INDEX, WHOLE
from fivefold.convert.non_finite import Converted, spoilt
from fivefold.convert.stored import Stored
from fivefold.errors import CheckpointError, Mistake
from fivefold.files import write_atomic

MOST_BYTES = 5e9
"""Largest size of a file, unless another is asked for."""

ReadPart = Callable[[str, tuple[slice, ...]], Tensor]
"""Reads a part of a tensor of ours, by name."""


@dataclass(frozen=True)
class _Part:
    """One of our tensors, one of its experts or some of its rows, that goes into one of their
    tensors."""

    name: str
    place: Stored
    expert: int | None
    rows: Tensor | None = None

    def read(self, read: ReadPart) -> Tensor:
        shape = self.place.shape
        slices = [slice(0, size) for size in shape]
        if self.place.rows is not None:  # without the padding
            slices[self.place.axis] = slice(0, len(self.place.rows))
        if self.rows is not None:
            slices[self.place.axis] = slice(0, int(self.rows[-1]) + 1)
            return read(self.name, tuple(slices)).index_select(self.place.axis, self.rows)
        if self.expert is None:
            return read(self.name, tuple(slices))
        slices[0] = slice(self.expert, self.expert + 1)
        return read(self.name, tuple(slices))[0]


def theirs(places: Mapping[str, Stored]) -> dict[str, list[_Part]]:
    """Each of their tensors, with the parts of ours that go into it."""
    parts: dict[str, list[_Part]] = {}
    for ours, place in places.items():
        for index, name in enumerate(place.names):
            part = _Part(ours, place, index if place.by_expert else None)
            if place.joined:
                one, rows = place.one_of(name)
                part = _Part(ours, one, None, rows)
            parts.setdefault(name, []).append(part)
    return parts


def write_weights(
    folder: Path,
    places: Mapping[str, Stored],
    read: ReadPart,
    dtype_of: Callable[[str], torch.dtype],
    *,
    most_bytes: float,
    numbers: Mapping[str, tuple[str, float]],
) -> Converted:
    """Write all tensors to `folder`.

    One file is held in memory at a time.

    Args:
        folder: an existing folder.
        places: where each tensor of ours goes.
        read: reads a part of a tensor of ours.
        dtype_of: type to which a tensor of theirs is rounded.
        most_bytes: largest size of a file, unless one tensor is larger.
        numbers: tensors of theirs that are a number: beside which other one, and the number.
    """
    parts = theirs(places)
    sizes = {
        name: math.prod(own[0].place.their_shape) * dtype_of(name).itemsize
        for name, own in parts.items()
    }
    scalars = {
        name: torch.tensor(number, dtype=dtype_of(beside))
        for name, (beside, number) in numbers.items()
    }
    sizes |= {name: scalar.nbytes for name, scalar in scalars.items()}
    files = list(_shards(sizes, most_bytes))
    index, found = dict[str, str](), list[str]()
    for number, names in enumerate(files, 1):
        file = WHOLE
        if len(files) > 1:
            file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors = {
            name: made_of(parts[name], read, dtype_of(name)) if name in parts else scalars[name]
            for name in names
        }
        write_tensors(folder / file, tensors, {"format": "pt"})
        found += spoilt(tensors)
        index |= dict.fromkeys(names, file)
    total = sum(sizes.values())
    if len(files) > 1:
        text = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        write_atomic(folder / INDEX, json.dumps(text, indent=2) + "\n")
    return Converted(total, found)


def _shards(sizes: Mapping[str, int], most_bytes: float) -> Iterator[list[str]]:
    names: list[str] = []
    used = 0
    for name, size in sizes.items():
        if names and used + size > most_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    yield names


def made_of(parts: list[_Part], read: ReadPart, dtype: torch.dtype) -> Tensor:
    """One of their tensors, made from all parts of ours.

    Raises:
        CheckpointError: an element is too large for the type.
    """
    made = torch.empty(parts[0].place.their_shape, dtype=dtype)
    for part in parts:
        view = part.place.bare(made)
        view = view.transpose(-1, -2) if part.place.transposed else view
        values = _rounded(part.read(read), dtype, part.name)
        if part.place.rows is None:
            view.copy_(values)
        else:
            view.index_copy_(part.place.axis, part.place.rows, values)
    return made


def _rounded(values: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Values in another type; none becomes infinite."""
    rounded = values.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        beyond = values.isfinite() & ~rounded.isfinite()
        if beyond.any():
            most = values[beyond].abs().max().item()
            largest = torch.finfo(dtype).max
            what = f"{name} has {most:g}, and the largest number of {dtype} is {largest:g}"
            raise CheckpointError(Mistake(what, works=("--dtype bf16", "--dtype fp32")))
    return rounded
