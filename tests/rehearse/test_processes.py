"""The processes that rehearse ranks: they end with the command, and their end is noticed."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from fivefold.cli.main import program
from fivefold.rehearse import run
from tests.programs import Program

WORDS = ["rehearse", "debug", "--nproc", "4", "--tp", "2", "--pp", "2", "--jobs", "2"]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait(*_: Any, **__: Any) -> None:
    Path(f"waits-{os.getpid()}").touch()
    time.sleep(100)


def rehearse(what: Any) -> None:
    sys.argv = ["fivefold", *WORDS]
    with patch.object(run, "rehearse_rank", what):
        program()


def test_one_that_is_killed_is_one_message(tmp_path: Path) -> None:
    process = Program(rehearse, die, cwd=tmp_path)
    _, errors = process.communicate(60)
    assert process.returncode == 2
    assert errors.splitlines() == [
        "error: one of 2 processes that rehearse ranks was killed",
        "  if nobody ran kill -9, the machine ran out of memory (dmesg says so)",
        "  try:   --jobs 1",
    ]


def rehearse_and_interrupt_the_fork(what: Any) -> None:
    pressed: list[None] = []

    def press() -> None:
        if not pressed:
            pressed.append(None)
            os.killpg(0, signal.SIGINT)

    os.register_at_fork(after_in_parent=press)
    rehearse(what)


def test_an_interrupt_while_they_are_forked_is_not_swallowed(tmp_path: Path) -> None:
    """Python ignores, and prints, what is raised in its own hooks of a fork."""
    process = Program(rehearse_and_interrupt_the_fork, wait, cwd=tmp_path, own_session=True)
    _, errors = process.communicate(60)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.parametrize("how", ["terminal", "scheduler", "killed"])
def test_they_end_with_the_command_in_silence(how: str, tmp_path: Path) -> None:
    process = Program(rehearse, wait, cwd=tmp_path, own_session=True)
    deadline = time.monotonic() + 60
    while len(begun := [*tmp_path.glob("waits-*")]) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    if how == "terminal":
        os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches them, too
    else:
        process.send_signal(signal.SIGTERM if how == "scheduler" else signal.SIGKILL)
    _, errors = process.communicate(20)
    assert process.returncode == {"terminal": 130, "scheduler": 143, "killed": -9}[how]
    assert errors == ""
    while any(psutil.pid_exists(int(path.name[6:])) for path in begun):
        assert time.monotonic() < deadline
        time.sleep(0.02)
