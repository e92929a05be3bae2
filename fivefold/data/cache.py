"""Files that one of several processes makes, and the others wait for."""

import fcntl
import logging
import math
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fivefold.data.indexed import CHECKSUMS, IndexedTokens
from fivefold.errors import DataError
from fivefold.files import temporary_paths

LEFT_SECONDS = 3600.0
"""A file that another machine is making is written to more often."""

_log = logging.getLogger(__name__)


def open_cached(prefix: str, *others: str) -> IndexedTokens:
    """Tokens in the cache; `others` have to be removed, too, for them to be made again."""
    paths = [*others, *(f"{prefix}{end}" for end in (".bin", ".idx", CHECKSUMS))]
    with cached(*paths):
        return IndexedTokens(prefix, _remedy(*paths))


@contextmanager
def cached(*paths: str) -> Iterator[None]:
    """Add to errors in reading cached files that the files can be created again."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error}{_remedy(*paths)}") from error


def _remedy(*paths: str) -> str:
    what = "it is in the cache, and is made again when it is not there"
    return f"\n  {what}\n  try:   rm -rf {shlex.join(paths)}"


def _remove_left(path: Path, lock: TextIO) -> None:
    """Remove what a process left that was killed while it made `path` and the files beside it.

    Some network file systems keep a lock on one machine only, and another one may be at work: once
    others have had it, only what nobody has written to for long is left over.
    """
    lock.seek(0)
    host, hosts = socket.gethostname(), lock.read().splitlines()
    if host not in hosts:
        lock.write(f"{host}\n")
        lock.flush()
        os.fsync(lock.fileno())
    newest = math.inf if {*hosts} <= {host} else time.time() - LEFT_SECONDS
    for temporary in temporary_paths(path.parent, f"{path.stem}*"):
        with suppress(FileNotFoundError):
            if temporary.stat().st_mtime < newest:
                temporary.unlink()


@contextmanager
def once(path: str, tell: Callable[[str], None]) -> Iterator[bool]:
    """Yield whether this process must create `path`; others wait until it is there."""
    if os.path.exists(path):
        yield False
        return
    try:
        with open(f"{path}.lock", "a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                tell("waiting for another process that prepares the same data")
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                # Some network file systems have no locks. Then several do the same work; what they
                # make is equal and appears whole, so nothing is lost but time.
                _log.debug("no lock on %s: %s", path, error)
            else:
                _remove_left(Path(path), lock)
            yield not os.path.exists(path)
    except OSError as error:  # those of reading are DataErrors already
        raise DataError(
            f"cannot write {path}: {error.strerror or error}\n"
            "  works: --data-cache-path with a folder that can be written and has room"
        ) from error
