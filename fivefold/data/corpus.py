"""Documents out of text files, folders, globs, JSON lines, Parquet and the standard library."""

import glob
import json
import os
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from fivefold.errors import DataError, did_you_mean

BUILTIN = "builtin"
TEXT_SUFFIXES = (
    frozenset({".txt", ".text", ".md", ".rst", ".tex", ".html", ".toml", ".yaml", ".yml"})
    | frozenset({".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go"})
    | frozenset({".js", ".ts", ".java", ".sh", ".sql"})
)
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})
SUFFIXES = TEXT_SUFFIXES | JSON_SUFFIXES | PARQUET_SUFFIXES
# Text files are read in pieces of about this size, so that memory stays bounded.
PIECE_BYTES = 1 << 20
# Not of the library proper; or tables of characters and help texts, from which little is learnt.
_NOT_BUILTIN = frozenset({"site-packages", "dist-packages", "_bundled", "__pycache__", "lib2to3"})
_NOT_BUILTIN |= {"test", "tests", "idle_test", "encodings", "pydoc_data"}


def resolve(spec: str) -> list[Path]:
    """The files that a data path names, sorted: a file, a folder, a glob or `builtin`.

    Folders are read recursively, hidden files and files of other kinds left out.

    Raises:
        DataError: nothing there, or nothing that can be read.
    """
    if spec == BUILTIN:
        return _builtin_files()
    path = Path(spec).expanduser()
    if path.is_dir():
        return _known(spec, _walk(path))
    if path.exists():
        if path.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"{path} cannot be read as text: unknown extension {path.suffix or '(none)'!r}\n"
                f"  works: {_kinds()} | a .bin/.idx prefix | {BUILTIN}"
            )
        return [path]
    if glob.has_magic(spec):
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        return _known(spec, (match for match in matches if match.is_file()))
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise DataError(
        f"no such file or folder: {spec}{did_you_mean(path.name, [*siblings, BUILTIN])}\n"
        f"  works: a file ({_kinds()}) | a folder | a glob | a .bin/.idx prefix | {BUILTIN}"
    )


def pieces(path: Path, text_key: str = "text") -> Iterator[tuple[str, bool]]:
    """The text of a file as (piece, whether a document ends with it), in order.

    A text file is one document, cut at line ends into pieces of about a megabyte; each line of
    a .jsonl and each row of a .parquet is one document. Empty documents are left out.

    Raises:
        DataError: not UTF-8, not JSON, no such key or column; says where.
    """
    suffix = path.suffix.lower()
    try:
        if suffix in PARQUET_SUFFIXES:
            yield from _parquet(path, text_key)
        elif suffix in JSON_SUFFIXES:
            yield from _json_lines(path, text_key)
        else:
            yield from _text(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def _builtin_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(root, _NOT_BUILTIN) if path.suffix == ".py"]
    if not files:
        raise DataError(f"the standard library in {root} has no .py files to serve as {BUILTIN!r}")
    return files


def _walk(root: Path, skipped: Collection[str] = ()) -> list[Path]:
    """Files below a folder in an order that does not depend on the file system."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        found += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(found)


def _known(spec: str, paths: Iterable[Path]) -> list[Path]:
    seen = list(paths)
    known = [path for path in seen if path.suffix.lower() in SUFFIXES]
    if not known:
        others = sorted({path.suffix or "(none)" for path in seen})
        raise DataError(
            f"nothing to read in {spec}: {len(seen)} files"
            + (f", with extensions {' '.join(others[:8])}" if others else "")
            + f"\n  works: {_kinds()}"
        )
    return known


def _kinds() -> str:
    return " ".join(sorted(SUFFIXES))


def _decode(data: bytes, path: Path, offset: int, place: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}{place} is not UTF-8: byte {offset + error.start} is "
            f"0x{data[error.start]:02x} ({error.reason})\n"
            f"  works: iconv -f latin1 -t utf-8 {path.name} (if it is Latin-1)"
        ) from error


def _text(path: Path) -> Iterator[tuple[str, bool]]:
    with open(path, "rb") as file:
        offset = 0
        lines = file.readlines(PIECE_BYTES)
        while lines:
            following = file.readlines(PIECE_BYTES)
            data = b"".join(lines)
            text = _decode(data, path, offset)
            yield text.removeprefix("\ufeff") if offset == 0 else text, not following
            offset += len(data)
            lines = following


def _json_lines(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
    with open(path, "rb") as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            place = f":{number}"
            text = _decode(line, path, offset, place)
            offset += len(line)
            if text.isspace():
                continue
            document = _json_text(text, f"{path}{place}", text_key)
            if document:
                yield document, True


def _json_text(line: str, place: str, text_key: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{place} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} is a JSON {type(record).__name__}, not an object")
    if text_key not in record:
        raise DataError(
            f"{place} has no key {text_key!r}{did_you_mean(text_key, record)}\n"
            f"  its keys: {', '.join(record) or 'none'}\n  works: text_key = one of them"
        )
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {text_key!r} is a {type(text).__name__}, not a string")
    return text


def _parquet(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path} needs pyarrow\n  works: pip install 'fivefold[parquet]'"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if text_key not in columns:
                raise DataError(
                    f"{path} has no column {text_key!r}{did_you_mean(text_key, columns)}\n"
                    f"  its columns: {', '.join(columns)}\n  works: text_key = one of them"
                )
            kind = file.schema_arrow.field(text_key).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise DataError(f"{path}: column {text_key!r} is {kind}, not a string")
            for batch in file.iter_batches(columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    if text:
                        yield text, True
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
