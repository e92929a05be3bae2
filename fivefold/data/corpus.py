"""Reads documents from text, JSON lines, Parquet and Arrow."""

import codecs
import gzip
import io
import shlex
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.data.borders import last_border
from fivefold.data.paths import COMPRESSED, JSON_SUFFIXES, TABLE_SUFFIXES, kind
from fivefold.errors import DataError, Mistake, did_you_mean, json_kind
from fivefold.files import parse_json

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch, Schema

BYTE_ORDER_MARK = "\ufeff"
# Text files are read in pieces of about this size, so that memory stays bounded: tokenising takes
# about a hundred bytes a character.
PIECE_BYTES = 1 << 20
_STRINGS = frozenset({"string", "large_string", "string_view"})  # types of Arrow


def pieces(
    path: Path, text_key: str = "text", *, whole: bool = False
) -> Iterator[tuple[str, bool]]:
    """The text of a file as (piece, whether a document ends with it), in order.

    A text file is one document, cut into pieces of about a megabyte unless it is asked for whole;
    each line of a .jsonl and each row of a table is one document. Empty documents are left out.

    Raises:
        DataError: the file is not UTF-8 or not JSON, or has no such key or column; the error
            names the place.
    """
    try:
        if kind(path) in TABLE_SUFFIXES:
            yield from _rows(path, text_key)
        elif kind(path) in JSON_SUFFIXES:
            for place, record in _json_records(path):
                if document := _json_text(record, place, text_key):
                    yield document, True
        else:
            yield from _text(path, whole)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def records(path: Path, keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a .jsonl or rows of a table, each with its place: the file and line.

    Of a table only the columns of these keys are read; others are None.

    Raises:
        DataError: the file is not UTF-8, not JSON or no table; the error names the place.
    """
    try:
        if kind(path) in TABLE_SUFFIXES:
            yield from _row_records(path, keys)
        else:
            yield from _json_records(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _decode(data: bytes, path: Path, offset: int, place: str = "") -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        coding = "utf-16" if wide and offset == 0 else "latin1"
        copy = path.with_suffix(f".utf8{path.suffix}")
        what = f"{path}{place} is not UTF-8: byte {offset + error.start} is "
        what += f"0x{data[error.start]:02x} ({error.reason})"
        why = f"if it is {coding}, this makes a copy that works:"
        made = f"iconv -f {coding} -t utf-8 -o {shlex.join([str(copy), str(path)])}"
        raise DataError(Mistake(what, (why,), attempt=made)) from error


def _text(path: Path, whole: bool) -> Iterator[tuple[str, bool]]:
    pending: list[str] = []  # since the last cut
    with open(path, "rb") as file:
        offset = 0
        while lines := file.readlines(PIECE_BYTES):
            data = b"".join(lines)
            text = _decode(data, path, offset)
            if offset == 0:
                text = text.removeprefix(BYTE_ORDER_MARK)
            offset += len(data)
            border = 0 if whole else last_border(text)
            if border:
                yield "".join([*pending, text[:border]]), False
                pending.clear()
            pending.append(text[border:])
    if text := "".join(pending):
        yield text, True


def _json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line that is not empty, with its file and number."""
    with _open_lines(path) as file:
        offset = 0
        for number, line in enumerate(file, start=1):
            place = f"{path}:{number}"
            text = _decode(line, path, offset, f":{number}")
            if offset == 0:
                text = text.removeprefix(BYTE_ORDER_MARK)
            offset += len(line)
            if not text.strip(" \t\r\n"):
                continue
            record = parse_json(text, Any, place, DataError)
            if not isinstance(record, dict):
                raise DataError(f"{place} is {json_kind(record)}, not an object")
            yield place, record


@contextmanager
def _open_lines(path: Path) -> Iterator[Iterable[bytes]]:
    """The lines of a file, which may be compressed."""
    if path.suffix.lower() in COMPRESSED and not path.stat().st_size:
        raise DataError(
            f"{path} cannot be read: it has no bytes, but even an empty text compresses to some"
        )
    try:
        if path.suffix.lower() == ".zst":
            with _pyarrow(path).input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream)
        else:
            with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rb") as file:
                yield file
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _json_text(record: dict[str, Any], place: str, text_key: str) -> str:
    if text_key not in record:
        texts = [key for key, value in record.items() if isinstance(value, str)]
        what = f"{place} has no key {text_key!r}{did_you_mean(text_key, texts)}"
        why = f"its keys: {', '.join(record) or 'none'}"
        raise DataError(Mistake(what, (why,), _text_keys(texts)))
    text = record[text_key]
    if not isinstance(text, str | None):
        raise DataError(f"{place}: {text_key!r} is {json_kind(text)}, not a text")
    return text or ""  # null is no text, as in a table


def _text_keys(names: Iterable[str]) -> tuple[str, ...]:
    """Flags that would choose one of these names."""
    return tuple(f"--text-key {shlex.quote(name)}" for name in names)


def _rows(path: Path, text_key: str) -> Iterator[tuple[str, bool]]:
    with _open_table(path) as (schema, batches):
        columns = schema.names
        if text_key not in columns:
            texts = [field.name for field in schema if _holds_text(field.type)]
            what = f"{path} has no column {text_key!r}{did_you_mean(text_key, texts)}"
            why = f"its columns: {', '.join(columns)}"
            raise DataError(Mistake(what, (why,), _text_keys(texts)))
        if not _holds_text(kind_of_column := schema.field(text_key).type):
            raise DataError(f"{path}: column {text_key!r} is {kind_of_column}, not a string")
        for batch in batches([text_key]):
            for text in batch.column(0).to_pylist():
                if text:
                    yield text, True


def _holds_text(column: "DataType") -> bool:
    from pyarrow.types import is_dictionary

    # A dictionary holds each value once.
    return str(column.value_type if is_dictionary(column) else column) in _STRINGS


def _row_records(path: Path, keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row with its file and number; null fields are left out, since every row has all
    columns."""
    with _open_table(path) as (schema, batches):
        number = 0
        unread = dict.fromkeys(name for name in schema.names if name not in keys)
        for batch in batches([name for name in schema.names if name in keys]):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", {**_without_nulls(row), **unread}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(of) for key, of in value.items() if of is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _open_table(
    path: Path,
) -> Iterator[tuple["Schema", Callable[[list[str]], Iterable["RecordBatch"]]]]:
    """The columns of a Parquet or Arrow file, and a function that reads some of them by batches."""
    pyarrow = _pyarrow(path)
    name = "Arrow" if path.suffix.lower() == ".arrow" else "Parquet"
    try:
        if name == "Parquet":
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path, page_checksum_verification=True) as file:
                yield (
                    _distinct(path, file.schema_arrow),
                    # A name with a point is also that of a field within a column: only a column is.
                    lambda columns: (b.select(columns) for b in file.iter_batches(columns=columns)),
                )
            return
        with pyarrow.memory_map(str(path)) as source:
            # The stream is what `datasets` writes, the other one is Arrow's own file (Feather).
            stream = source.read(6) != b"ARROW1"
            source.seek(0)
            if stream:
                reader = pyarrow.ipc.open_stream(source)
                every = reader
            else:
                reader = pyarrow.ipc.open_file(source)
                every = map(reader.get_batch, range(reader.num_record_batches))
            schema = _distinct(path, reader.schema)
            yield schema, lambda columns: (batch.select(columns) for batch in every)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} has a text that is not UTF-8 ({error.reason})") from error
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # a time that Python lacks
        raise DataError(f"{path} cannot be read as {name}: {error}") from error


def _distinct(path: Path, schema: "Schema") -> "Schema":
    """The schema, in which each name stands for one column only."""
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise DataError(f"{path} has several columns of one name: {', '.join(twice)}")
    return schema


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        works = ("pip install 'fivefold[parquet]'",)
        raise DataError(Mistake(f"{path} needs pyarrow", works=works)) from error
    return pyarrow
