"""Tensors in files, read and written in checked parts, and also memory-mapped."""

import errno
import mmap
import os
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from ctypes import c_char
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import Tensor

from fivefold.config.settings import flag_of
from fivefold.errors import FivefoldError
from fivefold.files import crc32
from fivefold.units import human_bytes

Part = tuple[Hashable, slice]
"""Elements of a tensor that are read and written at once, by its name."""


class MappedTensors:
    """Tensors in one file, whose parts are read into memory and written back.

    Every part has a checksum from the time at which it was written. The tensors are mapped as well,
    for what is not done in every step; pages that the system has room for stay in its page cache.
    The file has no name, so that no other process can reach it and its room is free again as soon
    as this process has ended, however it ends. What has to outlive it is in checkpoints.

    Args:
        likes: tensors of the wanted shapes and dtypes by name, such as on the meta device.
        folder: folder of the file, made if it is missing.
        setting: name of the setting that names the folder.
        what: what the tensors are.

    Attributes:
        tensors: the tensors by name, mapped, zero at first.

    Raises:
        FivefoldError: the folder cannot be written, or has no room for the file.
    """

    def __init__(
        self,
        likes: Mapping[Any, Tensor],
        folder: Path,
        setting: str = "optimizer_offload_path",
        what: str = "optimizer state",
    ) -> None:
        self._folder, self._sums = folder, dict[tuple[Hashable, int], int]()
        self._flag = flag_of(setting)
        self.nbytes = sum(like.nbytes for like in likes.values())
        self._pages: mmap.mmap | None = None
        whole = torch.empty(0, dtype=torch.uint8)
        if self.nbytes:
            self._file = _new_file(folder, self.nbytes, self._flag, what)
            self._pages = mmap.mmap(self._file.fileno(), self.nbytes)
            whole = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._starts: dict[Hashable, int] = {}
        start = 0
        for name in sorted(likes, key=lambda name: -likes[name].itemsize):  # all are aligned
            self._starts[name], start = start, start + likes[name].nbytes
        self.tensors: dict[Any, Tensor] = {}
        for name, like in likes.items():
            flat = whole[self._starts[name] :][: like.nbytes]
            self.tensors[name] = flat.view(like.dtype).view(like.shape)

    def read(self, part: Part, onto: Tensor, whose: str) -> None:
        """Read a part into memory, after it has been written or sealed.

        Args:
            part: elements to read.
            onto: contiguous memory of their size.
            whose: name of the part for messages.

        Raises:
            FivefoldError: it came back from the disk with other bytes, or not at all.
        """
        at = self._transfer(os.preadv, part, bytes_ := _bytes_of(onto), "read")
        if crc32(bytes_) != self._sums[part[0], at]:
            raise FivefoldError(
                f"{whose} came back from a file in {self._folder} with other bytes than were "
                "written: the disk or the memory is faulty; continue from the last checkpoint "
                f"with another {self._flag}"
            )

    def write(self, part: Part, source: Tensor) -> None:
        """Write a part from contiguous memory.

        Raises:
            FivefoldError: it cannot be written.
        """
        checked = crc32(bytes_ := _bytes_of(source))
        self._sums[part[0], self._transfer(os.pwritev, part, bytes_, "written")] = checked

    def seal(self, parts: Iterable[Part]) -> None:
        """Compute the checksums of what was written to the mapped tensors."""
        for name, elements in parts:
            flat = self.tensors[name].view(-1)[elements]
            self._sums[name, self._place(name, elements)] = crc32(_bytes_of(flat))
        self.leave()

    def leave(self) -> None:
        """Release mapped pages from this process; written data is not lost."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _place(self, name: Hashable, elements: slice) -> int:
        return self._starts[name] + elements.start * self.tensors[name].itemsize

    def _transfer(
        self, move: Callable[[int, list[Any], int], int], part: Part, rest: Any, how: str
    ) -> int:
        """Read or write all bytes of a part; where it lies in the file."""
        place = at = self._place(*part)
        try:
            while len(rest):
                done = move(self._file.fileno(), [rest], at)
                if not done:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                rest, at = rest[done:], at + done
        except OSError as error:
            what = f"{self._flag} {self._folder} cannot be {how}"
            raise FivefoldError(f"{what}: {error.strerror}") from error
        return place


def _bytes_of(flat: Tensor) -> Any:
    """The bytes of contiguous memory, without a copy, while the tensor is alive."""
    assert flat.is_contiguous()
    return memoryview((c_char * flat.nbytes).from_address(flat.data_ptr())).cast("B")


def _new_file(folder: Path, nbytes: int, flag: str, what: str) -> Any:
    """A new file without a name, with room for all of its bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = TemporaryFile(dir=folder)  # noqa: SIM115
        _reserve(file, nbytes)
    except OSError as error:
        room = f"{human_bytes(nbytes)} more of {what}"
        why = "has no room for" if error.errno == errno.ENOSPC else "cannot hold"
        raise FivefoldError(f"{flag} {folder} {why} {room}: {error.strerror}") from error
    return file


def _reserve(file: Any, nbytes: int) -> None:
    """Allocate all bytes of a file on the disk, so that mapped pages can be written even if it
    fills up."""
    if sys.platform == "linux":
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:  # macOS has no such call
        zeros = bytes(min(nbytes, 1 << 24))
        for start in range(0, nbytes, len(zeros)):
            file.write(zeros[: nbytes - start])
        file.flush()
