"""Other systems than Linux: what is called exists there; where nothing runs, that is said."""

import subprocess
import sys

import pytest

from fivefold import __main__ as started
from fivefold.memory import mapped
from tests.test_floors import ROOT


@pytest.mark.exhaustive
def test_macos_has_every_call() -> None:
    """mypy knows which functions of the standard library a system has."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "-p", "fivefold", "--platform", "darwin"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_windows_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        SystemExit, match="error: Fivefold needs Linux or macOS\n  works: Linux in Windows"
    ):
        started.program()


@pytest.mark.parametrize("nbytes", [1, 4096, (1 << 24) + 5])
def test_files_have_their_room_where_the_system_reserves_none(
    nbytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    file = mapped._new_file(tmp_path, nbytes, "--optimizer-offload-path", "moments")
    room = mapped.os.fstat(file.fileno())
    assert room.st_size == nbytes and room.st_blocks * 512 >= nbytes
