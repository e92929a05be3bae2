"""What killed processes leave in the folder for temporary files is removed by the next of them."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from fivefold.train.folder.scratch import NEW_SECONDS, scratch_folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_in(purpose: str) -> None:
    """A process that uses such a folder, killed there."""
    child = os.fork()
    if not child:
        with scratch_folder(purpose) as folder:
            (folder / "trace").write_text("large")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def aged(folder: Path) -> Path:
    then = folder.stat().st_mtime - 2 * NEW_SECONDS
    os.utime(folder, (then, then))
    return folder


def test_a_folder_is_there_for_the_block(place: Path) -> None:
    with scratch_folder("verify") as folder:
        assert folder.is_dir() and folder.parent == place
    assert not folder.exists()


def test_folders_of_the_killed_are_removed_and_no_others(place: Path) -> None:
    killed_in("verify")
    (left,) = map(aged, place.iterdir())
    killed_in("verify")
    (new,) = place.iterdir()  # which could be one that is about to be locked
    assert new != left
    killed_in("eval")
    (another,) = {*place.iterdir()} - {new}
    aged(another)
    with scratch_folder("verify") as used:
        aged(used)
        aged(new)
        with scratch_folder("verify") as beside:
            assert {*place.iterdir()} == {another, used, beside}
