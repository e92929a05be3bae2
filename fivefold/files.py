"""Files that are either wholly there or not at all, whenever the process or the machine dies."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; what the block wrote there becomes `path` at its end.

    The temporary name ends in the same name, so writers that look at the suffix are content. If
    the block raises, the temporary file is removed and `path` is as it was. The bytes and then the
    directory entry are flushed to the disk, so a crash of the machine leaves the old file or the
    new one, never a part. Missing parent folders are created.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".tmp-{secrets.token_hex(4)}-{target.name}"
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(target.parent)


def write_atomic(path: str | os.PathLike[str], data: bytes | str) -> None:
    """Replace the contents of `path` by `data` in one step; text is written as UTF-8.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomic(pathlib.Path(folder, "latest"), "step-100")
    ...     pathlib.Path(folder, "latest").read_text()
    'step-100'
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
