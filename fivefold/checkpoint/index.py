"""Reads the index of a checkpoint: the place of each slice of each tensor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from msgspec import Meta, Struct

from fivefold.checkpoint.integrity import INDEX, META, Stamp
from fivefold.checkpoint.pickled import DTYPES, read_foreign_pickle, read_pickle
from fivefold.errors import CheckpointError
from fivefold.files import as_kind

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Counts = tuple[_Count, ...]


class Slot(NamedTuple):
    """A slice of a tensor, and the place of its bytes.

    Attributes:
        offsets: index of the slice's first element in the global tensor, one per dim.
        sizes: shape of the slice.
        file: name of the file within the checkpoint.
        start: offset of the first byte in the file.
        length: number of bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: its type, its global shape, and slots that tile it exactly."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    slots: list[Slot]


class _Chunk(Struct):
    offsets: _Counts
    sizes: _Counts


class _Properties(Struct):
    state: tuple[str, Any, Any, Any, Any]  # dtype, layout, requires_grad, memory format, pinned


class _Tensor(Struct):
    properties: _Properties
    size: _Counts
    chunks: list[_Chunk]


class _Place(Struct):
    relative_path: str
    offset: _Count
    length: _Count
    transform_descriptors: None = None  # e.g. compression; neither written nor read


class _Metadata(Struct):
    state_dict_metadata: dict[str, _Tensor]
    storage_data: dict[tuple[str, _Counts], _Place]


def read_index(folder: Path, files: Mapping[str, Stamp]) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint by name.

    Args:
        folder: folder of the checkpoint.
        files: manifest of the checkpoint.

    Raises:
        CheckpointError: the file is not in DCP's format, or contradicts itself or the manifest: the
            slices do not cover a tensor, or their bytes are outside of a file or overlap.
    """
    path = folder / INDEX
    try:
        plain = read_pickle(path.read_bytes())
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    return _indexed(plain, files, path)


def read_foreign_index(folder: Path) -> dict[str, SavedTensor]:
    """The tensors of a checkpoint that another program wrote with DCP, which has no manifest.

    What it holds besides tensors is left out.

    Raises:
        CheckpointError: as `read_index`.
    """
    path = folder / INDEX
    try:
        plain = read_foreign_pickle(path.read_bytes())
        files = {file.name: Stamp(file.stat().st_size, 0) for file in folder.glob("*.distcp")}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{path} {error}") from None
    try:
        entries = plain["state_dict_metadata"].items()
        tensors = {name: entry for name, entry in entries if "properties" in entry}
        stored = plain["storage_data"].items()
        places = {key: place for key, place in stored if type(key) is tuple and key[0] in tensors}
    except (TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path} is not what torch.distributed.checkpoint writes") from None
    kept = {"state_dict_metadata": tensors, "storage_data": places}
    return _indexed(kept, files, path)


def _indexed(plain: Any, files: Mapping[str, Stamp], path: Path) -> dict[str, SavedTensor]:
    found = as_kind(plain, _Metadata, str(path), CheckpointError)
    index = {}
    for name, tensor in found.state_dict_metadata.items():
        dtype = DTYPES.get(tensor.properties.state[0])
        if dtype is None:
            raise CheckpointError(f"{path} gives {name} no type of number")
        if not _tile(tensor.size, tensor.chunks):
            raise CheckpointError(f"{path} has slices of {name} that do not make up the tensor")
        slots = []
        for chunk in tensor.chunks:
            place = found.storage_data.pop((name, chunk.offsets), None)
            if place is None:
                raise CheckpointError(f"{path} does not say where {name} {chunk.offsets} lies")
            at = (place.relative_path, place.offset, place.length)
            slots.append(Slot(chunk.offsets, chunk.sizes, *at))
        index[name] = SavedTensor(dtype, tensor.size, slots)
    if found.storage_data:
        raise CheckpointError(f"{path} has bytes of slices that no tensor has")
    _check_places([slot for tensor in index.values() for slot in tensor.slots], files, path)
    return index


def _check_places(slots: Sequence[Slot], files: Mapping[str, Stamp], path: Path) -> None:
    """Check that slots are inside data files of the manifest, and do not overlap."""
    ends = dict.fromkeys(files, 0)
    for slot in sorted(slots, key=lambda slot: (slot.file, slot.start)):
        if slot.file not in files or slot.file in (INDEX, META):
            raise CheckpointError(f"{path} names {slot.file!r}, which is no file of the checkpoint")
        end = slot.start + slot.length
        if slot.start < ends[slot.file] or end > files[slot.file].size:
            raise CheckpointError(
                f"{path} places a slice at bytes {slot.start:,} to {end:,} of {slot.file}, "
                "where another one lies or the file has ended"
            )
        ends[slot.file] = end


def _tile(shape: _Counts, chunks: Sequence[_Chunk]) -> bool:
    """Whether chunks cover every element of a shape exactly once."""
    rank = len(shape)
    boxes = []
    for chunk in chunks:
        if len(chunk.offsets) != rank or len(chunk.sizes) != rank or 0 in chunk.sizes:
            return False
        box = [(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(end > size for (_, end), size in zip(box, shape, strict=True)):
            return False
        boxes.append(box)
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        return False
    # The elements add up, so the boxes cover the shape unless two overlap. It suffices to compare
    # boxes that meet along the dim with the most cuts, which are few.
    dim = max(range(rank), key=lambda d: len({box[d] for box in boxes}), default=None)
    if dim is None:
        return len(boxes) == 1
    near: list[list[tuple[int, int]]] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        near = [other for other in near if other[dim][1] > box[dim][0]]
        if any(all(a < d and c < b for (a, b), (c, d) in zip(box, o, strict=True)) for o in near):
            return False
        near.append(box)
    return True
