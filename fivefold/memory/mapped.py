"""Memory that lies in files: mapped, checked, and brought in ahead of its use."""

import errno
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.units import human_bytes


class MappedTensors:
    """Tensors in one file, which the system brings into memory and writes back page by page.

    The file has no name, so that no other process can reach it and its room is free again as soon
    as this process has ended, however it ends. What has to outlive it is in checkpoints.

    Args:
        shapes: shape of each tensor by name.
        dtype: dtype of all tensors.
        folder: folder of the file, made if it is missing.

    Attributes:
        tensors: the tensors by name, zero at first.

    Raises:
        FivefoldError: the folder cannot be written, or has no room for the file.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, folder: Path) -> None:
        self._folder, self._sums = folder, dict[str, int]()
        sizes = [shape.numel() for shape in shapes.values()]
        self.nbytes = sum(sizes) * dtype.itemsize
        self._pages: mmap.mmap | None = None
        whole = torch.empty(0, dtype=dtype)
        if self.nbytes:
            self._pages = _mapped(folder, self.nbytes)
            whole = torch.frombuffer(self._pages, dtype=dtype)
        self.tensors = {
            name: part.view(shape)
            for (name, shape), part in zip(shapes.items(), whole.split(sizes), strict=True)
        }

    def fetch(self) -> None:
        """Start reading the file, without waiting."""
        self._advise(mmap.MADV_WILLNEED)

    def check(self) -> None:
        """See that the tensors are those of the last `seal`.

        Raises:
            FivefoldError: a tensor came back from the disk with other bytes.
        """
        for name, tensor in self.tensors.items():
            if name in self._sums and _sum(tensor) != self._sums[name]:
                raise FivefoldError(
                    f"{name} came back from a file in {self._folder} with other bytes than were "
                    "written: the disk or the memory is faulty; continue from the last checkpoint "
                    "with another --optimizer-offload-path"
                )

    def seal(self) -> None:
        """Remember the tensors' checksums, and let their pages leave memory."""
        self._sums = {name: _sum(tensor) for name, tensor in self.tensors.items()}
        # Dirty pages are written back by the system in its own time, and are not lost.
        self._advise(mmap.MADV_DONTNEED)

    def _advise(self, what: int) -> None:
        if self._pages is not None:
            self._pages.madvise(what)


def _sum(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    return zlib.crc32(tensor.detach().view(-1).view(torch.uint8).numpy().data)


def _mapped(folder: Path, nbytes: int) -> Any:
    """A new file without a name, with room for all of its bytes, mapped."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        room = f"{human_bytes(nbytes)} more of optimizer state"
        why = "has no room for" if error.errno == errno.ENOSPC else "cannot hold"
        raise FivefoldError(
            f"--optimizer-offload-path {folder} {why} {room}: {error.strerror}"
        ) from error
