import os
import signal
import subprocess
import sys

import pytest

from fivefold.files import atomic_path, write_atomic

KILLED_WHILE_WRITING = """
import os, signal, sys
from fivefold.files import atomic_path
with atomic_path(sys.argv[1]) as temporary:
    temporary.write_text("half of the n")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_replaces_text_and_bytes_and_leaves_nothing_else(tmp_path):
    target = tmp_path / "new" / "folder" / "file.bin"
    write_atomic(target, b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"
    write_atomic(target, "naïve")
    assert target.read_text(encoding="utf-8") == "naïve"
    assert os.listdir(target.parent) == ["file.bin"]


def test_a_failing_block_keeps_the_old_file_and_cleans_up(tmp_path):
    target = tmp_path / "index.npy"
    write_atomic(target, "old")
    with pytest.raises(KeyError), atomic_path(target) as temporary:
        assert temporary.suffix == ".npy"
        temporary.write_text("new")
        raise KeyError
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["index.npy"]


def test_a_block_that_wrote_nothing_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), atomic_path(tmp_path / "file"):
        pass


def test_killed_in_the_middle_of_writing_the_old_file_stays_whole(tmp_path):
    target = tmp_path / "latest"
    write_atomic(target, "old")
    died = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(target)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert target.read_text() == "old"


def test_the_umask_decides_the_permissions(tmp_path):
    write_atomic(tmp_path / "file", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
