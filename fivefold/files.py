"""Writes files atomically, and reads and validates them.

A file may have been written by others, or changed. The readers here report anything wrong with it
as one message; nothing else in the project parses JSON or TOML.
"""

import errno
import os
import re
import resource
import secrets
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from math import isfinite
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar

from fivefold.errors import DataError, FivefoldError, Mistake

try:
    from zlib_ng.zlib_ng import crc32 as crc32  # the same CRC-32, several times as fast
except ImportError:
    from zlib import crc32 as crc32

T = TypeVar("T")

_REFUSED = (  # errors by which the system refuses, whatever the program does
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.ESTALE),
    *(errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP),
)
_POINTER = b"version https://git-lfs.github.com/"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, a quota, a limit (ulimit -f)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block wrote there becomes `path` at its end.

    The temporary name has the same suffix, which some writers depend on. If the block raises, the
    temporary file is removed and `path` does not change. The bytes and then the directory entry are
    flushed to the disk, so a crash of the machine leaves the old file or the new one, never a part.
    Missing parent folders are created.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target)
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(target)  # what a message is to name
        raise
    _fsync(target.parent)


def temporary_path(target: Path) -> Path:
    """A new name beside `target`, for a file that will be renamed to it.

    Raises:
        IsADirectoryError: nothing can lie beside it: it is the root, or `.`.
    """
    if not target.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    return target.with_name(f".tmp-{secrets.token_hex(4)}-{target.name}")


def temporary_paths(folder: Path, pattern: str) -> list[Path]:
    """Files in a folder that have names of `temporary_path`, for targets whose names match.

    Each is being written, or was left by a process that was killed.
    """
    return [*folder.glob(f".tmp-{'[0-9a-f]' * 8}-{pattern}")]


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Replace the contents of `path` by `data` in one step; text is written as UTF-8.

    Devices and pipes such as /dev/null and /dev/stdout are written to directly, since renaming
    would replace them by a file.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(pathlib.Path(folder, "latest"), "step-100")
    ...     pathlib.Path(folder, "latest").read_text()
    'step-100'
    """
    with nullcontext(Path(path)) if _is_stream(path) else atomic_path(path) as place:
        place.write_bytes(data.encode() if isinstance(data, str) else data)


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Whether this is a device, a pipe or, like /dev/stdout and /dev/fd/3, an open file."""
    place = Path(path)
    if place.is_symlink() and place.parent.resolve().parts[:2] in (("/", "dev"), ("/", "proc")):
        return True
    return place.exists() and not (place.is_file() or place.is_dir())


def caused_by_full_disk(error: BaseException) -> OSError | None:
    """The error of a full disk that is `error` itself or its cause; None if there is none."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def disk_full(
    what: str,
    folder: str | os.PathLike[str] | None,
    *why: str,
    needed: int | None = None,
    goes_on: str = "",
) -> Mistake:
    """The message for a full disk: the bytes needed and free, or that no further file fits.

    Args:
        what: description of the failure, such as "saving step 3 failed".
        folder: folder that was written to; None if it is not known.
        why: further lines, which come first.
        needed: least number of bytes needed; None if it is not known.
        goes_on: what the same command does afterwards, such as ": it goes on from step 3".
    """
    lines, free = list(why), None if folder is None else free_bytes(folder)
    if needed is not None:
        lines.append(f"at least {needed:,} bytes needed")
    if free is not None:
        lines.append(f"{free:,} bytes free")
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = limit != resource.RLIM_INFINITY
    if limited:
        lines.append(f"no file may have more than {limit:,} bytes (ulimit -f)")
    remedy = "free space there, or a higher limit" if limited else "free space there"
    if folder is not None and (inodes := _system_at(folder)).f_files and not inodes.f_favail:
        lines.append(f"no further file, of whatever size: {inodes.f_files:,} are there (df -i)")
        remedy = "fewer files there"
    attempt = f"{remedy}, then the same command{goes_on}"
    return Mistake(f"disk full: {what}", tuple(lines), attempt=attempt)


@contextmanager
def telling_system_errors(
    error: type[FivefoldError], folder: str | os.PathLike[str] | None = None
) -> Iterator[None]:
    """Turn an error of a full or failing disk, or of a missing right, into one message.

    Args:
        error: class of the error to raise.
        folder: folder to name if the OSError does not name a file.
    """
    try:
        yield
    except FivefoldError:
        raise
    except Exception as problem:
        full = caused_by_full_disk(problem)  # which torch.save tells as an error of its own
        cause = full or problem
        if not isinstance(cause, OSError):
            raise
        names = (cause.filename2, cause.filename)  # of a rename, the new name first
        named = next((name for name in names if isinstance(name, str | os.PathLike)), None)
        if full is None:
            nowhere = cause.errno == errno.ENOENT and named is not None and os.path.islink(named)
            if (cause.errno not in _REFUSED and not nowhere) or named is None:
                raise
            why = "a link to nothing" if nowhere else cause.strerror
            raise error(f"cannot use {named}: {why}") from problem
        if named is not None:
            folder = Path(named).parent
        what = f"cannot write {named or folder or 'a file'}"
        raise error(disk_full(what, folder, str(cause.strerror))) from problem


@contextmanager
def telling_unwritable(
    path: str | os.PathLike[str],
    error: type[FivefoldError] = FivefoldError,
    attempt: str | None = None,
) -> Iterator[None]:
    """Turn an OSError, raised in the block while it writes `path`, into one message.

    Errors of a full disk pass through, since `telling_system_errors` describes them better.

    Args:
        path: file or folder to name.
        error: class of the error to raise.
        attempt: what the user may try instead; None: nothing is known.
    """
    try:
        yield
    except OSError as problem:
        if caused_by_full_disk(problem) is not None:
            raise
        what = f"cannot write {path}: {problem.strerror or problem}"
        raise error(Mistake(what, attempt=attempt)) from problem


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user can still write at `path`, which need not exist yet.

    None if the file system does not tell it.
    """
    system = _system_at(path)
    blocks = system.f_bfree if os.geteuid() == 0 else system.f_bavail
    return blocks * system.f_frsize if system.f_blocks else None


def _system_at(path: str | os.PathLike[str]) -> os.statvfs_result:
    """What the file system at a path, which need not exist yet, says of itself."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return os.statvfs(place)


def at_home(path: str | os.PathLike[str], error: type[FivefoldError] = FivefoldError) -> Path:
    """A path in which `~` and `~NAME` are replaced by the homes of users.

    Raises:
        FivefoldError: of the class `error`; there is no such user, or this one has no home, as in
            containers that know no name for it.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        whose = Path(path).parts[0]
        raise error(f"{os.fspath(path)}: this system knows no home {whose}") from None


def finite(value: Any) -> Any:
    """A value for JSON, which has neither infinities nor NaN: they become None, inside it as well.

    >>> finite({"loss": float("nan"), "by layer": [1.5, float("inf")]})
    {'loss': None, 'by layer': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def read_text(path: str | os.PathLike[str], error: type[FivefoldError] = FivefoldError) -> str:
    """The contents of a UTF-8 file, without the mark that some editors put before it.

    Raises:
        FivefoldError: of the class `error`; the file cannot be read, or is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8 text: byte {problem.start} is wrong") from None


def read_json(
    path: str | os.PathLike[str], kind: type[T], error: type[FivefoldError] = FivefoldError
) -> T:
    """The contents of a JSON file, as `parse_json` returns them."""
    return parse_json(read_text(path, error), kind, str(path), error)


def read_json_lines(path: str | os.PathLike[str], kind: type[T]) -> list[T]:
    """The lines of a file that is appended to, as `parse_json` returns each.

    An incomplete last line is left out: it is being written, or a crash cut it short.

    Raises:
        DataError: the file cannot be read, or a line is damaged.
    """
    found = []
    for number, line in enumerate(read_text(path, DataError).split("\n")[:-1], 1):
        try:
            found.append(parse_json(line, kind, f"{path}:{number}", DataError))
        except DataError as problem:
            attempt = f"sed -i {number}d {quote(str(path))}"
            raise DataError(Mistake(str(problem), attempt=attempt)) from None
    return found


def parse_json(
    text: str, kind: type[T], source: str, error: type[FivefoldError] = FivefoldError
) -> T:
    """JSON text as a value of exactly the type `kind`; nothing is converted but int to float.

    Args:
        text: the JSON.
        kind: a dataclass, `msgspec.Struct`, TypedDict, `dict[str, int]`, ...; bounds of numbers
            are written as `Annotated[int, msgspec.Meta(ge=0)]`. `Any` takes every JSON.
        source: what to call the text in a message, such as the path of its file.
        error: the class of error to raise.

    Raises:
        FivefoldError: of the class `error`; the text is not JSON, or not of this type. The message
            names the place, such as `$.model.num_layers`.
    """
    import msgspec

    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as problem:
        raise error(f"{source} does not hold what it should: {problem}") from None
    except RecursionError:
        raise error(f"{source} is nested too deep to be read") from None
    except (msgspec.DecodeError, ValueError) as problem:
        raise error(f"{source} is not JSON: {_half_pair(text) or problem}") from None


def _half_pair(text: str) -> str | None:
    """The message for an escaped half of a surrogate pair: Python writes it, JSON forbids it."""
    pair_or_other = r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\[^u]"
    half = re.search(r"\\u[dD][89a-fA-F]..", re.sub(pair_or_other, "", text))
    return half and f"{half[0]} is half of a surrogate pair, which is no character"


def parse_toml(text: str, source: str, error: type[FivefoldError]) -> dict[str, Any]:
    """TOML text as a table.

    Raises:
        FivefoldError: of the class `error`; the text is not TOML (the message starts with
            file:line:column and shows the line), nests too deep, or has a number with more digits
            than Python reads.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise error(f"{source} is nested too deep to be read") from None
    except tomllib.TOMLDecodeError as problem:
        raise error(_toml_mistake(text, source, str(problem))) from None
    except ValueError:
        raise error(
            f"{source} is not TOML that can be read: a number has thousands of digits"
        ) from None


def _toml_mistake(text: str, source: str, message: str) -> Mistake:
    place = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if place is None:
        return Mistake(f"{source}:{text.count(chr(10)) + 1}: this is not TOML: {message}")
    line, column = int(place[1]), int(place[2])
    start = max(column - 80, 0)
    part = text.replace("\r\n", "\n").split("\n")[line - 1][start : start + 100]
    caret = " " * (column - 1 - start) + "^"
    what = f"{source}:{line}:{column}: this is not TOML: {message[: place.start()]}"
    return Mistake(what, (part, caret))


def as_kind(value: Any, kind: type[T], source: str, error: type[FivefoldError]) -> T:
    """Parsed JSON or TOML as a value of the type `kind`, with the checks of `parse_json`."""
    import msgspec

    try:
        return msgspec.convert(value, kind)
    except RecursionError:
        raise error(f"{source} is nested too deep to be read") from None
    except msgspec.ValidationError as problem:
        raise error(f"{source} does not hold what it should: {problem}") from None


def tensor_names(path: str | os.PathLike[str], error: type[FivefoldError]) -> list[str]:
    """The names of the tensors in a .safetensors file, without loading torch.

    Raises:
        FivefoldError: of the class `error`; it is no such file, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as problem:
        raise error(unread_tensors(path, problem)) from None


def unread_tensors(path: str | os.PathLike[str], problem: Exception) -> Mistake:
    """The message for a .safetensors file that cannot be read."""
    with suppress(OSError), open(path, "rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            folder = quote(os.path.dirname(path) or ".")
            what = f"{path} is Git LFS's pointer to a file, not that file"
            return Mistake(what, attempt=f"git -C {folder} lfs pull")
    return Mistake(f"{path} cannot be read: {problem}")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
