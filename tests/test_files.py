import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import pytest

from fivefold.errors import CheckpointError, DataError
from fivefold.files import (
    as_kind,
    atomic_path,
    caused_by_full_disk,
    disk_full,
    free_bytes,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    telling_system_errors,
    telling_unwritable,
    write_atomic,
)

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


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    """Of root, who may write anywhere, a file would have taken the place of /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    master, terminal = os.openpty()
    link = tmp_path / "link"
    link.symlink_to(os.ttyname(terminal))
    file = tmp_path / "file"
    with file.open("w") as opened:
        for place in (pipe, link, f"/dev/fd/{opened.fileno()}"):
            kind, where = os.lstat(place), os.stat(place)
            write_atomic(place, "text\n")
            assert os.path.samestat(os.lstat(place), kind)
            assert os.path.samestat(os.stat(place), where)
    assert os.read(reader, 9) == b"text\n" and os.read(master, 9).strip() == b"text"
    assert file.read_text() == "text\n" and sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]
    for number in (reader, master, terminal):
        os.close(number)


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


@dataclass
class Meta:
    step: Annotated[int, msgspec.Meta(ge=0)]
    losses: list[float]


def test_json_of_its_type_is_read(tmp_path):
    path = tmp_path / "meta.json"
    path.write_text('{"step": 3, "losses": [1, 2.5]}')
    assert read_json(path, Meta) == Meta(3, [1.0, 2.5])
    assert parse_json("[null, true]", Any, "text") == [None, True]
    assert as_kind({"step": 3, "losses": []}, Meta, "table", DataError) == Meta(3, [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"step": "3", "losses": []}', r"\$\.step"),
        ('{"step": -1, "losses": []}', r">= 0 - at `\$\.step`"),
        ('{"step": 1e300, "losses": []}', r"\$\.step"),
        ('{"step": true, "losses": []}', r"\$\.step"),
        ('{"step": 1, "losses": [null]}', r"\$\.losses"),
        ('{"step": 1}', "losses"),
        ("null", "does not hold"),
        ("", "is not JSON"),
        ('{"step": NaN}', "is not JSON"),
        (r'{"a": "\ud83d\ude00\\\udbff", "b": "\ud800"}', r"JSON: \\udbff is half of a surrogate"),
        (r'{"a": "\ud83d\ude00\\ud800"', "JSON: Input data was truncated"),
        ('{"a":' * 100_000, "nested too deep"),
    ],
)
def test_other_json_is_refused_by_its_place(text, says):
    with pytest.raises(CheckpointError, match="^meta.json .*" + says):
        parse_json(text, Meta, "meta.json", CheckpointError)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a", ":1: this is not TOML"),
        ("a = 1\nb = ?\n", r":2:5: this is not TOML: .*\n  b = \?\n      \^$"),
        ("a = " + "9" * 500 + "x", r":1:505: .*\n  9{79}x\n {81}\^$"),
        ("a = " + "9" * 5000, " is not TOML"),
        ("a = " + "[" * 5000 + "]" * 5000, " is nested too deep"),
    ],
)
def test_other_toml_is_refused(text, says):
    with pytest.raises(DataError, match="^run.toml" + says):
        parse_toml(text, "run.toml", DataError)


def test_text_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"a\xff")
    with pytest.raises(DataError, match="not UTF-8 text: byte 1"):
        read_text(tmp_path / "bytes", DataError)
    for path in (tmp_path, tmp_path / "none", tmp_path / "bytes" / "below"):
        with pytest.raises(DataError, match=r"cannot read .*: \w"):
            read_text(path, DataError)


def test_a_full_disk_is_one_message_with_the_bytes_that_are_free(tmp_path):
    said = r"disk full: cannot write {}\n  No space left on device\n  [\d,]+ bytes free\n  try: "
    with (
        pytest.raises(DataError, match=said.format(tmp_path)),
        telling_system_errors(DataError, tmp_path),
        open("/dev/full", "w") as file,
    ):
        file.write("x" * 10_000)
    with (
        pytest.raises(DataError, match=said.format(tmp_path / "new" / "x")),
        telling_system_errors(DataError),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "new" / "x"))
    with pytest.raises(FileNotFoundError), telling_system_errors(DataError, tmp_path):
        (tmp_path / "none").read_bytes()


def test_a_disk_that_has_bytes_but_takes_no_further_file_says_so(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)

    def counted(files, left):
        return lambda _: SimpleNamespace(
            f_blocks=real.f_blocks, f_bfree=9, f_bavail=9, f_frsize=1, f_files=files, f_favail=left
        )

    for files, left, told in ((1000, 0, True), (1000, 1, False), (0, 0, False)):  # 0: not counted
        monkeypatch.setattr(os, "statvfs", counted(files, left))
        text = str(disk_full("cannot write x", tmp_path / "new" / "x"))
        assert ("no further file, of whatever size: 1,000 are there" in text) == told
        assert ("try:   fewer files there, then" in text) == told, text


def test_what_the_system_refuses_is_one_message(tmp_path):
    for code in (errno.EACCES, errno.EIO, errno.EROFS):
        with pytest.raises(DataError, match=r"cannot use .*: \w"), telling_system_errors(DataError):
            raise OSError(code, os.strerror(code), tmp_path)
        with pytest.raises(OSError, match="Errno"), telling_system_errors(DataError):  # of what?
            raise OSError(code, os.strerror(code))
    with (
        pytest.raises(DataError, match=f"full: cannot write {tmp_path}/file\n"),
        telling_system_errors(DataError),
        atomic_path(tmp_path / "file"),
        open("/dev/full", "w") as full,
    ):
        full.write("x" * 10_000)
    (tmp_path / "folder").mkdir()
    said = f"cannot use {tmp_path}/folder: Is a directory"
    with pytest.raises(DataError, match=said), telling_system_errors(DataError):
        write_atomic(tmp_path / "folder", "")  # not a word of its temporary file
    (tmp_path / "link").symlink_to("on/a/disk/that/is/gone")
    said = f"cannot use {tmp_path}/link: a link to nothing"
    with pytest.raises(DataError, match=said), telling_system_errors(DataError):
        (tmp_path / "link").open("a")


def test_what_cannot_be_written_is_one_message_and_a_full_disk_passes(tmp_path):
    (tmp_path / "file").touch()
    said, below = pytest.raises(DataError, match=r"cannot write .*x: \w"), tmp_path / "file" / "x"
    with said, telling_unwritable(below, DataError):
        write_atomic(below, "")
    with pytest.raises(OSError, match="No space"), telling_unwritable(tmp_path, DataError):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("folder", [".", "..", "/", "./", "sub"])
def test_a_folder_in_place_of_a_file_is_one_message(folder, tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(DataError, match=r"Is a directory|busy"),
        telling_unwritable(folder, DataError),
    ):
        write_atomic(folder, "")
    assert [path.name for path in tmp_path.iterdir()] == ["sub"]


def test_a_full_disk_is_found_behind_other_errors():
    full = OSError(errno.EDQUOT, "quota")
    try:
        try:
            raise full
        finally:
            raise RuntimeError("unexpected pos 704 vs 598")
    except RuntimeError as error:
        assert caused_by_full_disk(error) is full
    assert caused_by_full_disk(OSError(errno.EIO, "broken")) is None


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path):
    free = free_bytes(tmp_path / "a" / "b")
    assert free is not None and 0 < free <= shutil.disk_usage(tmp_path).total
    assert free_bytes("/proc/self") is None, "no file system of blocks"
