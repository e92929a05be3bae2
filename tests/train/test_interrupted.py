"""Commands that a signal or a failing disk ends at any of their changes of the file system leave
nothing half made and say what a shell expects; killed ones leave nothing that the next one does not
remove.
"""

import errno
import os
import random
import signal
import sys
from collections.abc import Callable
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest

import fivefold.__main__
from fivefold.cli.main import main
from tests.programs import Program, run

COMMANDS = ("to hub", "from hub", "data", "report")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.truncate")
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
CODES = (errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS)
# Changes of each command at which a signal comes, and errors of the system that it meets.
of_each = pytest.mark.parametrize("of_each", [1, pytest.param(4, marks=pytest.mark.exhaustive)])


def interrupted(words: list[str], folder: str, number: int, signum: int, code: int = 0) -> None:
    """Run a command that gets a signal, or an error of the system, at one of its changes in a
    folder; tell how many it made."""
    count = 0

    def see(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        writes = event == "open" and isinstance(flags := arguments[2], int) and flags & 3
        if not (writes or event in CHANGES) or isinstance(arguments[0], int):
            return
        if os.path.abspath(os.fsdecode(arguments[0])).startswith(folder):
            count += 1
            if count == number and code:
                raise OSError(code, os.strerror(code), os.fsdecode(arguments[0]))
            if count == number:
                os.kill(os.getpid(), signum)

    sys.argv = ["fivefold", *words]
    sys.addaudithook(see)
    try:
        sys.exit(main())
    finally:
        print(f"changes: {count}", file=sys.stderr)


Words = Callable[[Path], list[str]]


@pytest.fixture(scope="module")
def commands(
    finished: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Words]:
    hub = tmp_path_factory.mktemp("hub") / "hub"
    assert run(["convert", str(finished), str(hub)]).returncode == 0
    corpus = ["--data-path", str(cache), "--seq-length", "32", "--global-batch-size", "4"]
    return {
        "to hub": lambda at: ["convert", str(finished), str(at / "hub")],
        "from hub": lambda at: ["convert", str(hub), str(at / "run")],
        "data": lambda at: ["data", "debug", *corpus, "--data-cache-path", str(at / "cache")],
        "report": lambda at: ["report", str(finished), "--html", str(at / "report.html")],
    }


def begun(folder: Path) -> list[str]:
    return [str(p.relative_to(folder)) for p in folder.rglob("*") if p.name.startswith(".tmp-")]


@pytest.fixture(scope="module")
def changes(
    commands: dict[str, Words], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], int]:
    """How many changes of the file system a command makes that nothing interrupts."""

    @remembered
    def of(command: str) -> int:
        whole = tmp_path_factory.mktemp("whole")
        done = Program(interrupted, commands[command](whole), str(whole), 0, 0)
        _, errors = done.communicate(60)
        assert done.returncode == 0, errors
        return int(errors.split("changes: ")[-1])

    return of


@pytest.mark.slow
@of_each
@pytest.mark.parametrize("command", COMMANDS)
def test_an_error_of_the_system_at_any_change_is_one_message(
    command: str,
    of_each: int,
    commands: dict[str, Words],
    changes: Callable[[str], int],
    tmp_path: Path,
) -> None:
    words, draw = commands[command], random.Random(command)
    made = changes(command)
    for code in draw.sample(CODES, of_each):
        at, number = tmp_path / str(code), draw.randint(1, made)
        at.mkdir()
        process = Program(interrupted, words(at), str(at), number, 0, code)
        _, errors = process.communicate(60)
        where = f"{os.strerror(code)} at change {number} of {made}: {errors}"
        assert process.returncode in (0, 2), where  # 0: a folder that is there already
        assert errors.count("error: ") == (process.returncode == 2), where
        assert "Traceback" not in errors and not begun(at), where


@pytest.mark.slow
@of_each
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_at_any_change_leaves_nothing_half_made(
    command: str,
    of_each: int,
    commands: dict[str, Words],
    changes: Callable[[str], int],
    tmp_path: Path,
) -> None:
    words, draw = commands[command], random.Random(command)
    made = changes(command)
    for signum, status in STATUS.items():
        for number in draw.sample(range(1, made + 1), min(made, of_each)):
            at = tmp_path / f"{signum}-{number}"
            at.mkdir()
            process = Program(interrupted, words(at), str(at), number, signum)
            _, errors = process.communicate(60)
            where = f"{signal.Signals(signum).name} at change {number} of {made}: {errors}"
            assert process.returncode == status, where
            assert "error" not in errors and "Traceback" not in errors, where
            if signum == signal.SIGKILL:
                again = run(words(at))
                assert again.returncode == 0, f"{where}\n{again.stderr}"
            if signum != signal.SIGKILL or command != "report":  # no lock tells who writes a page
                assert not begun(at), where


def interrupted_import() -> None:
    class Interrupts:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "fivefold.cli.main":
                os.kill(os.getpid(), signal.SIGINT)

    del sys.modules["fivefold.cli.main"]
    sys.meta_path.insert(0, Interrupts())  # type: ignore[arg-type]
    fivefold.__main__.program()


def test_an_interrupt_before_the_program_begins_is_no_traceback() -> None:
    process = Program(interrupted_import)
    _, errors = process.communicate(60)
    assert process.returncode == -signal.SIGINT and errors == ""
