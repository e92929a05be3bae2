"""Saves that are killed, or met by an error of the disk, at every single disk operation.

At every eleventh, that is, of each kind of save others; at all of them under `-m exhaustive`.
"""

import errno
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import CheckpointError
from tests.checkpoint.forge import names, tensors
from tests.pool import run

KEEP = 2
# Steps to save one after the other: new ones, the latest again, an older one again, and on.
SAVES = (1, 2, 3, 3, 2, 4)
every = pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.exhaustive)])


class Disk:
    """Calls `before` ahead of every operation on the disk: folders, names, writes, flushes.

    Attributes:
        operations: how many there have been.
    """

    def __init__(self, before: Callable[[int], None]) -> None:
        self.operations = 0
        self._before = before
        self._lock = threading.RLock()
        self._inside = False

    def meet(self) -> None:
        """Count one operation, unless it is one of `before` itself."""
        with self._lock:
            if self._inside:
                return
            self._inside = True
            try:
                self.operations += 1
                self._before(self.operations)
            finally:
                self._inside = False

    @contextmanager
    def watched(self) -> Iterator["Disk"]:
        """Meet the operations of the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in (
                "mkdir",
                "rename",
                "replace",
                "unlink",
                "remove",
                "rmdir",
                "fsync",
                "open",
            ):
                patch.setattr(os, name, self._met(getattr(os, name)))
            patch.setattr(io, "open", self._opened(io.open))
            yield self

    def _met(self, function: Callable) -> Callable:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.meet()
            return function(*arguments, **settings)

        return call

    def _opened(self, function: Callable) -> Callable:
        def call(path: Any, mode: str = "r", *arguments: Any, **settings: Any) -> Any:
            self.meet()
            file = function(path, mode, *arguments, **settings)
            return file if mode in ("r", "rb") else WrittenFile(self, file)

        return call


class WrittenFile:
    """A file whose first write and whose end, which writes what is buffered, are operations."""

    def __init__(self, disk: Disk, file: Any) -> None:
        self._disk, self._file, self._written = disk, file, False

    def write(self, data: Any) -> int:
        if not self._written:
            self._disk.meet()
            self._written = True
        written: int = self._file.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "WrittenFile":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._disk.meet()
        finally:
            self._file.close()


def save(folder: Path, number: int, *, async_save: bool = False) -> None:
    """The save of that number in `SAVES`; its tensors tell which save they are of."""
    checkpointer = Checkpointer(folder, keep_latest=KEEP, async_save=async_save)
    checkpointer.save(SAVES[number], tensors(float(number)), {"number": number})
    checkpointer.wait()


def newest(folder: Path) -> int:
    """The number of the save that a new start loads, whole; -1 if there is none."""
    checkpointer = Checkpointer(folder)
    if checkpointer.latest() is None:
        return -1
    held = tensors()
    number = checkpointer.load(None, held)["number"]
    assert all((tensor == number).all() for tensor in held.values())
    return number


def left_over(folder: Path) -> list[str]:
    """Names that the next save should have removed."""
    steps = [path.name for path in folder.glob("step-*")]
    known = {"latest", *(name for name in steps if name[5:].isdigit())}
    return sorted({path.name for path in folder.iterdir()} - known)


def check(folder: Path, number: int, *, saved: bool) -> None:
    """What has to hold after a save was cut off: nothing older is found than there was before."""
    found = newest(folder)
    assert found in ((number,) if saved else (number - 1, number)), f"found save {found}"
    for step in Checkpointer(folder).steps():
        Checkpointer(folder).load(step, tensors())
    following = min(number + 1, len(SAVES) - 1)
    save(folder, following)
    assert newest(folder) == following
    assert left_over(folder) == []
    assert len(Checkpointer(folder).steps()) <= KEEP


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folder as it is before each save."""
    root = tmp_path_factory.mktemp("before")
    folders = []
    for number in range(len(SAVES)):
        save(root / "run", number)
        folders.append(shutil.copytree(root / "run", root / str(number)))
    (root / "empty").mkdir()
    return [root / "empty", *folders[:-1]]


def operations(folder: Path, number: int) -> int:
    """How many there are in a save."""
    with Disk(lambda _: None).watched() as disk:
        save(folder, number)
    return disk.operations


@pytest.mark.slow
@every
@pytest.mark.parametrize("async_save", [False, True])
def test_killed_at_every_operation(
    before: list[Path], tmp_path: Path, async_save: bool, every: int
) -> None:
    """A copy of the folder ahead of each operation is what a kill at that moment leaves."""
    kills = 0
    for number, folder in enumerate(before):
        run_ = shutil.copytree(folder, tmp_path / "run")
        copies: list[Path] = []

        def copy(at: int, number: int = number, run_: Path = run_, to: list = copies) -> None:
            if (at - number) % every == 0:
                to.append(shutil.copytree(run_, tmp_path / str(at)))

        with Disk(copy).watched():
            save(run_, number, async_save=async_save)
        check(run_, number, saved=True)
        for copied in copies:
            check(copied, number, saved=False)
            shutil.rmtree(copied)
        kills += len(copies)
        shutil.rmtree(run_)
    assert kills > 200 // every


@pytest.mark.slow
@every
@pytest.mark.parametrize(
    ("code", "lasting", "async_save"),
    [
        (errno.EIO, False, False),
        (errno.ENOSPC, True, False),
        pytest.param(errno.ENOSPC, False, True, marks=pytest.mark.exhaustive),
    ],
)
def test_an_error_at_every_operation(
    before: list[Path], tmp_path: Path, code: int, lasting: bool, async_save: bool, every: int
) -> None:
    failures = 0
    for number, folder in enumerate(before):
        count = operations(shutil.copytree(folder, tmp_path / "counted"), number)
        shutil.rmtree(tmp_path / "counted")
        for first in range(1 + number % every, count + 1, every):
            run_ = shutil.copytree(folder, tmp_path / "run")

            def fail(at: int, first: int = first) -> None:
                if at == first or (lasting and at > first):
                    raise OSError(code, os.strerror(code))

            saved = True
            with Disk(fail).watched():
                try:
                    save(run_, number, async_save=async_save)
                except CheckpointError as error:
                    saved, failures = False, failures + 1
                    assert ("disk full" in str(error)) == (code == errno.ENOSPC), error
                    assert os.strerror(code) in str(error)
            check(run_, number, saved=saved)
            shutil.rmtree(run_)
    assert failures > 150 // every


def _fail_on_one_rank(rank: int, world: int, root: Path, victim: int) -> list[str]:
    """Messages of saves that meet a full disk on one rank, each at a later operation."""
    held = {f"{rank}.weight": tensors(1.0)["a.weight"], "b.weight": tensors(1.0)["b.weight"]}
    messages: list[str] = []
    checkpointer = Checkpointer(root)
    for first in range(1, 12) if victim else range(1, 60, 2):  # rank 1 has six or fewer

        def fail(at: int, first: int = first) -> None:
            if rank == victim and at == first:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with Disk(fail).watched():
                checkpointer.save(7, held, {})
        except CheckpointError as error:
            messages.append(str(error))
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_of_one_rank_stops_all(tmp_path: Path, victim: int) -> None:
    first, second = run(2, _fail_on_one_rank, tmp_path, victim)
    assert first == second and len(first) > (12 if victim == 0 else 4)
    assert all(message.startswith("disk full: saving step 7") for message in first)
    assert all(f"rank {victim}: OSError: [Errno 28]" in message for message in first)
    assert names(tmp_path) == ["latest", "step-00000007"]
