"""Lets one of several processes, on one machine or several, create a file while the others wait."""

import fcntl
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from fivefold.files import temporary_paths

LEFT_SECONDS = 3600.0
"""Another machine that still writes a file touches it more often than this."""

_log = logging.getLogger(__name__)


@contextmanager
def once(path: str, waits: Callable[[], None]) -> Iterator[bool]:
    """Yield whether this process must create `path`; other processes wait until it exists.

    Args:
        path: a file that appears whole; its folder exists.
        waits: called if another process is at it.

    Raises:
        OSError: the folder cannot be written.
    """
    if os.path.exists(path):
        yield False
        return
    with open(f"{path}.lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            # Some network file systems have no locks. Then several do the same work; what they
            # make is equal and appears whole, so nothing is lost but time.
            _log.debug("no lock on %s: %s", path, error)
        else:
            _remove_left(Path(path), lock)
        yield not os.path.exists(path)


def _remove_left(path: Path, lock: TextIO) -> None:
    """Remove files left by a process that was killed while it created `path` and the files beside
    it.

    Some network file systems keep locks within one machine only, so another machine may be at work:
    only files that nobody has written to for long count as left.
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
