"""Folders that stay locked while a process uses them, so that others can recognise leftovers."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fivefold.train.folder.lock import lock_file

NEW_SECONDS = 60.0  # within which a new folder is locked


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder for the block; removes those whose processes were killed."""
    prefix = f"fivefold-{purpose}-"
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(FileNotFoundError), holding(left) as dead:
            if dead and time.time() - left.stat().st_mtime > NEW_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as folder, holding(Path(folder)):
        yield Path(folder)


@contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Lock a folder for the block, as long as this process lives; returns whether nobody else holds
    it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # just renamed or removed, or not ours
        yield False
        return
    try:
        yield lock_file(descriptor) is True
    finally:
        os.close(descriptor)
