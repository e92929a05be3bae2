"""Reads what a Megatron-core checkpoint has besides its sharded tensors; nothing is unpickled."""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivefold.checkpoint.pickled import read_foreign_pickle
from fivefold.errors import CheckpointError

COMMON = "common.pt"
_DATA = "/data.pkl"
_SCALARS: Mapping[str, str] = MappingProxyType(
    {
        "torch.FloatStorage": "<f",
        "torch.DoubleStorage": "<d",
        "torch.IntStorage": "<i",
        "torch.LongStorage": "<q",
    }
)


def read_common(folder: Path) -> dict[str, Any]:
    """The objects in the common.pt of a checkpoint, by name; none if there is no such file.

    Raises:
        CheckpointError: the file cannot be read.
    """
    path = folder / COMMON
    try:
        with zipfile.ZipFile(path) as archive:
            common = read_foreign_pickle(_member(archive, _DATA))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile, CheckpointError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return common if isinstance(common, dict) else {}


def number_in(folder: Path, value: Any) -> float | None:
    """A number of `read_common`, which may be a tensor with one element; None: it is none.

    Raises:
        CheckpointError: the bytes of the tensor cannot be read.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    try:
        (_, kind, key, *_), offset, shape, *_ = value["given"]
        form = _SCALARS[kind]
        if value["of"] != "torch._utils._rebuild_tensor_v2" or shape not in ((), (1,)):
            return None
    except (TypeError, KeyError, ValueError):
        return None
    try:
        with zipfile.ZipFile(folder / COMMON) as archive:
            held = _member(archive, f"/data/{key}")
        (number,) = struct.unpack_from(form, held, offset * struct.calcsize(form))
    except (OSError, TypeError, ValueError, RuntimeError, zipfile.BadZipFile, struct.error):
        raise CheckpointError(f"{folder / COMMON} does not give a number that it has") from None
    return float(number)


def _member(archive: zipfile.ZipFile, end: str) -> bytes:
    (inside,) = [name for name in archive.namelist() if name.endswith(end)]
    if archive.getinfo(inside).compress_type != zipfile.ZIP_STORED:
        raise ValueError("torch compresses nothing")
    return archive.read(inside)
