"""Files of the data cache: created by one of several processes, opened by all."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fivefold.data.indexed import CHECKSUMS, IndexedTokens
from fivefold.errors import DataError, Mistake
from fivefold.once import once


def open_cached(prefix: str, *others: str) -> IndexedTokens:
    """Tokens in the cache; to recreate them, `others` have to be removed as well."""
    paths = [*others, *(f"{prefix}{end}" for end in (".bin", ".idx", CHECKSUMS))]
    with cached(*paths):
        return IndexedTokens(prefix, _remedy(*paths))


@contextmanager
def cached(*paths: str) -> Iterator[None]:
    """Add to errors in reading cached files that the files can be created again."""
    try:
        yield
    except DataError as error:
        (mistake,), remedy = error.mistakes, _remedy(*paths)
        why = (*mistake.why, *remedy.why)
        raise DataError(replace(mistake, why=why, attempt=remedy.attempt)) from error


def _remedy(*paths: str) -> Mistake:
    """Advice that follows an error in cached files."""
    why = "it is in the cache, and is made again once it is removed"
    return Mistake("", (why,), attempt=f"rm -rf {shlex.join(paths)}")


@contextmanager
def prepared_once(path: str, tell: Callable[[str], None]) -> Iterator[bool]:
    """`once` for a file of the data cache; reports waiting, and a full disk."""
    waiting = "waiting for another process that prepares the same data"
    try:
        with once(path, lambda: tell(waiting)) as missing:
            yield missing
    except OSError as error:  # those of reading are DataErrors already
        what = f"cannot write {path}: {error.strerror or error}"
        works = ("--data-cache-path with a folder that can be written and has room",)
        raise DataError(Mistake(what, works=works)) from error
