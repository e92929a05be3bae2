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
        likes: tensors of the wanted shapes and dtypes by name, such as on the meta device.
        folder: folder of the file, made if it is missing.
        setting: name of the setting that names the folder.
        what: what the tensors are.

    Attributes:
        tensors: the tensors by name, zero at first.

    Raises:
        FivefoldError: the folder cannot be written, or has no room for the file.
    """

    def __init__(
        self,
        likes: Mapping[str, Tensor],
        folder: Path,
        setting: str = "optimizer_offload_path",
        what: str = "optimizer state",
    ) -> None:
        self._folder, self._sums = folder, dict[str, int]()
        self._flag = f"--{setting.replace('_', '-')}"
        self.nbytes = sum(like.nbytes for like in likes.values())
        self._pages: mmap.mmap | None = None
        whole = torch.empty(0, dtype=torch.uint8)
        if self.nbytes:
            self._pages = _mapped(folder, self.nbytes, self._flag, what)
            whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._places: dict[str, slice] = {}
        start = 0
        for name in sorted(likes, key=lambda name: -likes[name].itemsize):  # all are aligned
            self._places[name] = slice(start, start := start + likes[name].nbytes)
        self.tensors = {
            name: whole[self._places[name]].view(like.dtype).view(like.shape)
            for name, like in likes.items()
        }

    def fetch(self) -> None:
        """Start reading the file, without waiting."""
        self._advise(mmap.MADV_WILLNEED)

    def check(self) -> None:
        """See that the tensors are those of the last `seal`.

        Raises:
            FivefoldError: a tensor came back from the disk with other bytes.
        """
        for name, expected in self._sums.items():
            if self._sum(name) != expected:
                raise FivefoldError(
                    f"{name} came back from a file in {self._folder} with other bytes than were "
                    "written: the disk or the memory is faulty; continue from the last checkpoint "
                    f"with another {self._flag}"
                )

    def seal(self) -> None:
        """Remember the tensors' checksums, and let their pages leave memory."""
        self._sums = {name: self._sum(name) for name in self.tensors}
        self.leave()

    def leave(self) -> None:
        """Let the tensors' pages leave memory."""
        # Dirty pages are written back by the system in its own time, and are not lost.
        self._advise(mmap.MADV_DONTNEED)

    def _sum(self, name: str) -> int:
        if self._pages is None:
            return 0
        return zlib.crc32(memoryview(self._pages)[self._places[name]])

    def _advise(self, what: int) -> None:
        if self._pages is not None:
            self._pages.madvise(what)


def _mapped(folder: Path, nbytes: int, flag: str, what: str) -> Any:
    """A new file without a name, with room for all of its bytes, mapped."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        room = f"{human_bytes(nbytes)} more of {what}"
        why = "has no room for" if error.errno == errno.ENOSPC else "cannot hold"
        raise FivefoldError(f"{flag} {folder} {why} {room}: {error.strerror}") from error
