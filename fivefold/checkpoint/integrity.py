"""The manifest of a checkpoint, with the size and checksum of every file."""

import errno
import json
import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta, Struct

from fivefold.checkpoint.team import Team
from fivefold.errors import CheckpointError
from fivefold.files import crc32, parse_json, read_text, write_atomic

MANIFEST = "manifest.json"
INDEX = ".metadata"
META = "meta.json"
T = TypeVar("T")
_DATA = re.compile(r"__[0-9]+_[0-9]+\.distcp")


class Stamp(NamedTuple):
    """The expected state of a file: `size` in bytes, and the CRC-32 of its contents."""

    size: int
    crc32: int


class _File(Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=0)]
    crc32: Annotated[str, Meta(pattern="^[0-9a-f]{8}$")]


class _Manifest(Struct, forbid_unknown_fields=True):
    files: dict[str, _File]


def stamp(path: Path) -> Stamp:
    """Compute the stamp of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            size += len(block)
            crc = crc32(block, crc)
    return Stamp(size, crc)


def stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """Compute the stamps of several files of a folder in parallel."""
    return _in_parallel(stamp, folder, names)


def _in_parallel(work: Callable[[Path], T], folder: Path, names: Iterable[str]) -> dict[str, T]:
    names = sorted(names)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(work, (folder / name for name in names)), strict=True))


def complete(folder: Path, files: dict[str, Stamp]) -> None:
    """Write the manifest, which completes a checkpoint.

    Raises:
        CheckpointError: a rank has written a file to a disk that is not the first rank's.
    """
    here = _in_parallel(Path.is_file, folder, files)
    if gone := [name for name, is_here in here.items() if not is_here]:
        what = f"{len(gone)} of {len(files)} files are not in {folder}, such as {gone[0]}"
        why = "the ranks that wrote them have another file system there"
        raise CheckpointError(f"{what}: {why}")
    listed = {name: {"size": s.size, "crc32": f"{s.crc32:08x}"} for name, s in files.items()}
    write_atomic(folder / MANIFEST, json.dumps({"files": listed}, indent=1, sort_keys=True))


def read_manifest(folder: Path) -> dict[str, Stamp]:
    """The stamps of a checkpoint's files by name; names that lead out of its folder are refused.

    Raises:
        CheckpointError: the manifest is missing or wrong; the message is one line.
    """
    if not (folder / MANIFEST).exists():
        raise CheckpointError(f"{MANIFEST}: missing, so the checkpoint is not complete")
    try:
        text = read_text(folder / MANIFEST, CheckpointError)
        files = parse_json(text, _Manifest, "it", CheckpointError).files
    except CheckpointError as error:
        raise CheckpointError(f"{MANIFEST}: expected a list of files; {error}") from None
    for name in files:
        if name not in (INDEX, META) and not _DATA.fullmatch(name):
            raise CheckpointError(f"{MANIFEST}: expected files of a checkpoint, found {name!r}")
    if absent := [name for name in (INDEX, META) if name not in files]:
        raise CheckpointError(f"{MANIFEST}: expected {' and '.join(absent)} in its list")
    return {name: Stamp(file.size, int(file.crc32, 16)) for name, file in files.items()}


def find_faults(folder: Path, team: Team, only: str | None = None) -> list[str]:
    """The differences between a checkpoint and its manifest; collective.

    Each file is read once, by one of the ranks. Every rank gets the same list, with one line for
    each damaged file.

    Args:
        folder: folder of the checkpoint.
        team: ranks that share the work.
        only: name of the only file to check; None: all files.
    """
    job = f"checking {folder}"
    expected = team.leader(job, lambda: _manifest_or_fault(folder))
    if isinstance(expected, str):
        return [expected]
    if only is not None:
        expected = {only: expected[only]}
    largest_first = sorted(expected, key=lambda name: (-expected[name].size, name))
    mine = largest_first[team.rank :: team.size]
    found = team.together(job, lambda: _faults(folder, {name: expected[name] for name in mine}))
    return sorted(fault for faults in found for fault in faults)


def _manifest_or_fault(folder: Path) -> dict[str, Stamp] | str:
    try:
        return read_manifest(folder)
    except CheckpointError as error:
        return str(error)


def _stamp_if_readable(path: Path) -> Stamp | None:
    """The stamp of a file; None if the disk cannot read it back."""
    try:
        return stamp(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None


def _faults(folder: Path, expected: dict[str, Stamp]) -> list[str]:
    faults, right_size = [], []
    for name, stamp_ in expected.items():
        path = folder / name
        if not path.exists():
            faults.append(f"{name}: expected {stamp_.size:,} bytes, found no such file")
        elif not path.is_file():
            faults.append(f"{name}: expected a file, found something else of that name")
        elif (size := path.stat().st_size) != stamp_.size:
            faults.append(f"{name}: expected {stamp_.size:,} bytes, found {size:,}")
        else:
            right_size.append(name)
    for name, found in _in_parallel(_stamp_if_readable, folder, right_size).items():
        if found is None:
            faults.append(f"{name}: cannot be read: {os.strerror(errno.EIO)}")
        elif found.crc32 != expected[name].crc32:
            want = expected[name].crc32
            faults.append(f"{name}: expected CRC-32 {want:08x}, found {found.crc32:08x}")
    return faults
