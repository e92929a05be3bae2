"""Finds the files of a data path: a file, a folder, a glob, or Python's library."""

import glob
import os
import re
import shlex
import sysconfig
from collections.abc import Collection, Iterable
from pathlib import Path

from fivefold.errors import DataError, Mistake, did_you_mean
from fivefold.files import at_home, read_json
from fivefold.recipes import how_to_get
from fivefold.units import several

BUILTIN = "builtin"
TEXT_SUFFIXES = frozenset(
    {
        *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".toml", ".yaml", ".yml"),
        *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go"),
        *(".js", ".ts", ".java", ".sh", ".sql"),
    }
)
COMPRESSED = (".gz", ".zst")
JSON_SUFFIXES = frozenset(
    lines + end for lines in (".jsonl", ".ndjson") for end in ("", *COMPRESSED)
)
TABLE_SUFFIXES = frozenset({".parquet", ".arrow"})
SUFFIXES = TEXT_SUFFIXES | JSON_SUFFIXES | TABLE_SUFFIXES
# Not of the library proper; or tables of characters and help texts, from which little is learnt.
_NOT_BUILTIN = frozenset(
    {
        *("site-packages", "dist-packages", "_bundled", "__pycache__", "lib2to3"),
        *("test", "tests", "idle_test", "encodings", "pydoc_data"),
    }
)
# Hidden files, and what the library `datasets` caches beside the data of a folder.
_NOT_DATA = re.compile(r"\.|cache-.*\.arrow$")


def kind(path: Path) -> str:
    """The end of a file's name that says what it holds: `.jsonl`, or `.jsonl.zst`."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() + suffix if suffix in COMPRESSED else suffix


def resolve(spec: str, flag: str = "--data-path ") -> list[Path]:
    """The files that a data path names, sorted: a file, a folder, a glob or `builtin`.

    Folders are read recursively; hidden files and files of other kinds are left out.

    Args:
        spec: the data path.
        flag: what stands before it on a command line.

    Raises:
        DataError: the path does not exist, or names no file that can be read.
    """
    if spec == BUILTIN:
        return _builtin_files()
    try:
        return _resolve(spec, at_home(spec, DataError), flag)
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise DataError(f"{spec} cannot be read: {error.strerror}") from error


def _resolve(spec: str, path: Path, flag: str) -> list[Path]:
    if path.is_dir():
        _refuse_splits(spec, path, flag)
        return _known(spec, _walk(path), flag)
    if os.path.lexists(path):  # true for a broken link, too
        if kind(path) not in SUFFIXES:
            what = f"{path} cannot be read as text: unknown extension {kind(path) or '(none)'!r}"
            why = f"what can be read: {_kinds()}, or a .bin/.idx prefix"
            raise DataError(Mistake(what, (why,), (f"{flag}{BUILTIN}",)))
        return _known(spec, [path], flag)
    if glob.has_magic(spec):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        return _known(spec, (match for match in matches if not match.is_dir()), flag)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    where = path.absolute()
    what = f"no such file or folder: {spec}{did_you_mean(path.name, [*siblings, BUILTIN])}"
    looked = (
        f"looked for: {where}, or {where}.bin and .idx",
        *how_to_get(spec),
        f"what can be read: a file ({_kinds()}), a folder, a glob, or a .bin/.idx prefix",
    )
    raise DataError(Mistake(what, looked, (f"{flag}{BUILTIN}",)))


def _builtin_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, _NOT_BUILTIN) if path.suffix == ".py"]
    if not files:
        raise DataError(f"the standard library in {root} has no .py files to serve as {BUILTIN!r}")
    return files


def _walk(root: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Files below a folder in an order that does not depend on the file system.

    Links to folders are followed, each folder is read once.
    """
    found, seen = [], {os.path.realpath(root)}
    for folder, folders, names in os.walk(root, onerror=_refuse, followlinks=True):
        unread: dict[str, str] = {}  # real path -> name
        for name in sorted(folders):
            if name[0] != "." and name not in skipped:
                unread.setdefault(os.path.realpath(os.path.join(folder, name)), name)
        folders[:] = [name for real, name in unread.items() if real not in seen]
        seen |= unread.keys()
        found += [Path(folder, name) for name in names if not _NOT_DATA.match(name)]
    return sorted(found)


def _refuse_splits(spec: str, folder: Path, flag: str) -> None:
    """Refuse the folder of a `DatasetDict`, whose splits are not to be mixed unasked."""
    said = folder / "dataset_dict.json"
    if not said.is_file():
        return
    if splits := read_json(said, dict[str, list[str]], DataError).get("splits"):
        paths = [shlex.quote(f"{spec.rstrip('/')}/{name}") for name in splits]
        what = f"{spec} holds {several(len(splits), 'split')} of a data set: {', '.join(splits)}"
        raise DataError(Mistake(what, works=tuple(f"{flag}{path}" for path in paths)))


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def _known(spec: str, paths: Iterable[Path], flag: str) -> list[Path]:
    seen = list(paths)
    known = [path for path in seen if kind(path) in SUFFIXES]
    if not known:
        others = sorted({path.suffix or "(none)" for path in seen})
        what = f"nothing to read in {spec}: {several(len(seen), 'file')}"
        what += f", with extensions {' '.join(others[:8])}" if others else ""
        why = f"what can be read: {_kinds()}"
        raise DataError(Mistake(what, (why,), (f"{flag}{BUILTIN}",)))
    for path in known:
        if not path.is_file():
            raise DataError(f"{path} is a link to nothing, a folder, a pipe or a device, no file")
    return known


def _kinds() -> str:
    return " ".join(sorted(SUFFIXES))
