"""The file of one rank's state, with a checksum over all of it.

A file system in memory has no checksums of its own, and no device reports a bit that changed there.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from fivefold.checkpoint.tensor_file import write_tensors
from fivefold.errors import CheckpointError
from fivefold.files import crc32
from fivefold.mesh.slices import Piece

_META, _CRC, _PLACE = "meta", "crc32", "place"


def write_state(path: Path, pieces: Mapping[str, Piece], meta: str) -> None:
    """Write tensors and `meta`, JSON as text, atomically.

    Raises:
        OSError: the file system did not take them.
    """
    tensors = {name: piece.local.contiguous() for name, piece in pieces.items()}
    said = {_META: meta, _CRC: _crc32(meta, tensors.items()), _PLACE: _place(path)}
    write_tensors(path, tensors, said)


def state_damage(path: Path) -> str:
    """What is wrong with a file, judged by its own checksum; empty if nothing is."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            meta, names = file.metadata() or {}, file.keys()
            found = _crc32(meta[_META], ((name, file.get_tensor(name)) for name in names))
            if found != (expected := meta[_CRC]):
                return f"expected CRC-32 {expected}, found {found}"
            if (place := meta.get(_PLACE, _place(path))) != _place(path):
                return f"it was written as {place}"
    except KeyError as error:
        return f"{error} is not in it"
    except (OSError, SafetensorError, TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return ""


def read_state(path: Path, pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """The meta of a file that must hold all these tensors.

    Raises:
        CheckpointError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            if absent := pieces.keys() - set(file.keys()):
                raise ValueError(f"{min(absent)} is not in it")
            meta: dict[str, Any] = json.loads(file.metadata()[_META])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return meta


def fill_from_state(path: Path, pieces: Mapping[str, Piece]) -> None:
    """Fill the local parts of pieces from a file that `read_state` has checked."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        for name, piece in pieces.items():
            piece.local.copy_(file.get_tensor(name))


def _place(path: Path) -> str:
    """Folder and name of a file, which identify step and rank; its checksum alone is right in any
    place."""
    return f"{path.parent.name}/{path.name}"


def _crc32(meta: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """CRC-32 of names, types, shapes and values, in an order that does not depend on the file's."""
    crc = crc32(meta.encode())
    parts = []
    for name, tensor in tensors:
        values = crc32(tensor.cpu().reshape(-1).view(uint8).numpy().data)
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {values:08x}")
    return f"{crc32(' '.join(sorted(parts)).encode(), crc):08x}"
