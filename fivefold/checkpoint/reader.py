"""Fills pieces of global tensors from the slots of a checkpoint, whatever layout wrote them."""

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from fivefold.checkpoint.index import SavedTensor, Slot
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece

Cut = tuple[slice, ...]


def fill(folder: Path, index: Mapping[str, SavedTensor], pieces: Mapping[str, Piece]) -> None:
    """Fill each piece in place from the checkpoint; values are converted to its type.

    Args:
        folder: folder of the checkpoint.
        index: tensors of the checkpoint, including those of `pieces` with the same global shapes.
        pieces: pieces by name; they are filled in place.

    Raises:
        CheckpointError: a file has gone, or its bytes are not the tensor that the index describes.
    """
    wanted: dict[str, list[tuple[Slot, torch.dtype, Tensor, Cut]]] = {}
    for name, piece in pieces.items():
        for slot in index[name].slots:
            if (cuts := _overlap(slot, piece)) is not None:
                there, here = cuts
                job = (slot, index[name].dtype, piece.local.detach()[here], there)
                wanted.setdefault(slot.file, []).append(job)
    for file, jobs in wanted.items():
        try:
            opened = (folder / file).open("rb")
        except FileNotFoundError:  # the run may have removed the checkpoint meanwhile
            raise CheckpointError(f"{folder / file} is no longer there") from None
        with opened as stream:
            for slot, dtype, target, there in sorted(jobs, key=lambda job: job[0].start):
                target.copy_(_read(stream, slot, dtype)[there])


def _overlap(slot: Slot, piece: Piece) -> tuple[Cut, Cut] | None:
    """The overlap of a slot and a piece, as slices of each; None if there is none."""
    there, here = [], []
    for offset, size, part in zip(slot.offsets, slot.sizes, piece.slices, strict=True):
        start, stop = max(offset, part.start), min(offset + size, part.stop)
        if start >= stop:
            return None
        there.append(slice(start - offset, stop - offset))
        here.append(slice(start - part.start, stop - part.start))
    return tuple(there), tuple(here)


def _read(stream: IO[bytes], slot: Slot, dtype: torch.dtype) -> Tensor:
    """The tensor of a slot; `torch.load` is restricted to tensors."""
    stream.seek(slot.start)
    data = io.BytesIO(stream.read(slot.length))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about damaged data, which is reported below
            found = torch.load(data, "cpu", weights_only=True)
    except Exception as error:  # torch documents no set of errors for invalid data
        raise _no_tensor(slot, f"{type(error).__name__} in torch.load") from None
    if type(found) is not Tensor or found.layout != torch.strided or found.device.type != "cpu":
        raise _no_tensor(slot, f"found {type(found).__name__}")
    if found.dtype != dtype or tuple(found.shape) != slot.sizes:
        raise _no_tensor(slot, f"found {found.dtype} of shape {tuple(found.shape)}")
    return found


def _no_tensor(slot: Slot, why: str) -> CheckpointError:
    where = f"bytes {slot.start:,} to {slot.start + slot.length:,} of {slot.file}"
    return CheckpointError(f"{where} are not the slice of shape {slot.sizes} expected there: {why}")
