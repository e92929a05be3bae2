"""Files of tests, which need not outlive a cut of power: nothing waits for the disk."""

import os


def _at_once(file: object) -> None:
    """What `os.fsync` does, but for the wait."""


def do_not_wait() -> None:
    """In this process, and those that it forks."""
    os.fsync = _at_once
