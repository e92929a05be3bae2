"""The manifest of a checkpoint: which files it has, how long they are, and their checksums."""

import json
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fivefold.checkpoint.team import Team
from fivefold.files import write_atomic

MANIFEST = "manifest.json"


class Stamp(NamedTuple):
    """What a file must be: `size` in bytes and the CRC-32 of its contents."""

    size: int
    crc32: int


def stamp(path: Path) -> Stamp:
    """Read a file and measure it."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(8 << 20):
            size += len(block)
            crc = zlib.crc32(block, crc)
    return Stamp(size, crc)


def stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    """Measure several files of a folder at once."""
    names = sorted(names)
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(names, pool.map(stamp, (folder / name for name in names)), strict=True))


def write_manifest(folder: Path, files: dict[str, Stamp]) -> None:
    """Write the list that makes a checkpoint complete."""
    listed = {name: {"size": s.size, "crc32": f"{s.crc32:08x}"} for name, s in files.items()}
    write_atomic(folder / MANIFEST, json.dumps({"files": listed}, indent=1, sort_keys=True))


def find_faults(folder: Path, team: Team) -> list[str]:
    """Everything in a checkpoint that is not as its manifest says; collective.

    Every file is read once, by one of the ranks. Every rank gets the same list, one line for each
    damaged file; an intact checkpoint has none.
    """
    job = f"checking {folder}"
    expected = team.leader(job, lambda: _read_manifest(folder))
    if isinstance(expected, str):
        return [expected]
    largest_first = sorted(expected, key=lambda name: (-expected[name].size, name))
    mine = largest_first[team.rank :: team.size]
    found = team.together(job, lambda: _faults(folder, {name: expected[name] for name in mine}))
    return sorted(fault for faults in found for fault in faults)


def _read_manifest(folder: Path) -> dict[str, Stamp] | str:
    """The manifest, or what is wrong with it."""
    try:
        text = (folder / MANIFEST).read_text("utf-8")
    except FileNotFoundError:
        return f"{MANIFEST}: missing, so the checkpoint is not complete"
    except UnicodeDecodeError:
        return f"{MANIFEST}: expected text, found other bytes"
    try:
        files = json.loads(text)["files"]
        return {name: Stamp(file["size"], int(file["crc32"], 16)) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST}: expected a list of files, found {text[:40]!r}"


def _faults(folder: Path, expected: dict[str, Stamp]) -> list[str]:
    faults, right_size = [], []
    for name, stamp_ in expected.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            faults.append(f"{name}: expected {stamp_.size:,} bytes, found no such file")
            continue
        if size != stamp_.size:
            faults.append(f"{name}: expected {stamp_.size:,} bytes, found {size:,}")
        else:
            right_size.append(name)
    for name, found in stamps(folder, right_size).items():
        if found.crc32 != expected[name].crc32:
            want = expected[name].crc32
            faults.append(f"{name}: expected CRC-32 {want:08x}, found {found.crc32:08x}")
    return faults
