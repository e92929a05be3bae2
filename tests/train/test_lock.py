"""One owner of a run folder: races, kills, other machines, and file systems without locks."""

import errno
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.errors import ConfigError, TrainingError
from fivefold.train.folder import lock
from fivefold.train.folder.lock import FILE, FolderInUse, claim

ELSEWHERE = {"host": "node7", "machine": "another boot", "pid": 4711, "since": "then"}


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(true, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


@pytest.fixture
def impatient(monkeypatch):
    """Seconds of waiting become milliseconds."""
    for name in ("BEAT_SECONDS", "WATCH_SECONDS", "ENDING_SECONDS"):
        monkeypatch.setattr(lock, name, getattr(lock, name) / 50)


def test_an_owner_is_named_and_keeps_others_out(tmp_path):
    run = tmp_path / "runs" / "a"
    with claim(run) as held:
        assert held.made == [tmp_path / "runs", run]
        assert json.loads((run / FILE).read_text())["pid"] == os.getpid()
        with pytest.raises(FolderInUse) as refused:
            claim(run)
        assert f"in use by process {os.getpid()} on {socket.gethostname()}" in str(refused.value)
        assert f"kill {os.getpid()}" in str(refused.value)
        held.check()
    assert list(tmp_path.iterdir()) == []


def test_what_has_begun_stays_and_the_lock_goes(tmp_path):
    run = tmp_path / "a"
    with claim(run) as held:
        held.begin()
        held.check()
        (run / "config.toml").write_text("")
    assert tree(tmp_path) == {"a": None, "a/config.toml": b""}


CONTENDER = """
    import sys, time
    from pathlib import Path
    from fivefold.train.folder.lock import FolderInUse, claim
    number, *places = sys.argv[1:]
    for place in map(Path, places):
        (place / f"ready-{number}").touch()
        while not (place / "go").exists():
            time.sleep(0.001)
        try:
            with claim(place / "run") as held:
                held.begin()
                print("won", flush=True)
                sys.stdin.readline()
        except FolderInUse as error:
            print(str(error).splitlines()[0], flush=True)
"""


@pytest.mark.slow
def test_of_many_that_start_at_once_one_wins_and_the_others_name_it(tmp_path):
    number, places = 8, [tmp_path / str(attempt) for attempt in range(3)]
    for place in places:
        place.mkdir()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    code = textwrap.dedent(CONTENDER)
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(n), *map(str, places)], **pipes)
        for n in range(number)
    ]
    try:
        for place in places:
            wait_until(lambda place=place: len([*place.glob("ready-*")]) == number, 60)
            (place / "go").touch()
            first = [process.stdout.readline() for process in started]
            assert first.count("won\n") == 1
            winner = started[first.index("won\n")]
            for line in first:
                assert line == "won\n" or f"in use by process {winner.pid} on " in line
            winner.stdin.write("\n")
            winner.stdin.flush()
        for process in started:
            process.communicate("")
    finally:
        for process in started:
            process.kill()
    assert not [*tmp_path.glob(f"*/run/{FILE}")]


OWNER = """
    import os, sys, time
    from pathlib import Path
    from fivefold.train.folder.lock import claim
    sys.stdout = None  # that it takes the folder over
    with claim(Path(sys.argv[1])) as held:
        held.begin()
        if sys.argv[2] == "with a rank" and os.fork() == 0:
            time.sleep(float(sys.argv[3]))
            os._exit(0)
        print("owns", file=sys.__stdout__, flush=True)
        time.sleep(60)
"""


def test_a_killed_owner_is_followed_at_once(tmp_path, capsys):
    for _ in range(3):
        owner = python(OWNER, tmp_path / "run", "alone", 0)
        assert owner.stdout.readline() == "owns\n"
        owner.kill()
        owner.wait()
        with claim(tmp_path / "run"):
            said = capsys.readouterr().out
            assert f"takes {tmp_path / 'run'} over from process {owner.pid} on " in said


def test_a_rank_that_outlives_its_parent_is_waited_for(tmp_path):
    owner = python(OWNER, tmp_path / "run", "with a rank", 1.0)
    assert owner.stdout.readline() == "owns\n"
    owner.kill()
    owner.wait()
    began = time.monotonic()
    with claim(tmp_path / "run"):
        assert time.monotonic() - began > 0.2


def test_ranks_that_will_not_end_are_told_apart_from_their_parent(tmp_path, impatient):
    owner = python(OWNER, tmp_path / "run", "with a rank", 2.0)
    assert owner.stdout.readline() == "owns\n"
    owner.kill()
    owner.wait()
    with pytest.raises(FolderInUse, match="that process has ended, and others that it started"):
        claim(tmp_path / "run")


CLAIMS_AGAIN_AND_AGAIN = """
    import os, random, sys, time
    from pathlib import Path
    from fivefold.train.folder.lock import FolderInUse, claim
    run, seed, begin, until = Path(sys.argv[1]), *map(float, sys.argv[2:])
    chance, mine, holder = random.Random(seed), str(os.getpid()), run.with_name("holder")
    until += time.monotonic()
    sys.stdout = None  # that it takes the folder over
    while time.monotonic() < until:
        try:
            with claim(run) as held:
                if chance.random() < begin:
                    held.begin()
                holder.write_text(mine)
                time.sleep(chance.random() / 100)
                held.check()
                if holder.read_text() != mine:
                    print("two owners at once", file=sys.stderr, flush=True)
        except FolderInUse:
            pass
"""


@pytest.mark.slow
def test_kills_at_any_moment_even_of_a_takeover_leave_one_owner(tmp_path):
    chance, seconds = random.Random(0), float(os.environ.get("FIVEFOLD_KILL_SECONDS", "1.2"))
    running = [python(CLAIMS_AGAIN_AND_AGAIN, tmp_path / "run", n, 0.7, 600) for n in range(4)]
    wait_until(lambda: (tmp_path / "run").exists(), 60)
    until, kills, ended = time.monotonic() + seconds, 0, []
    while time.monotonic() < until:
        time.sleep(chance.uniform(0.02, 0.15))
        victim = running.pop(chance.randrange(len(running)))
        victim.kill()
        ended.append(victim)
        kills += 1
        running.append(python(CLAIMS_AGAIN_AND_AGAIN, tmp_path / "run", kills, 0.7, 600))
    for process in running:
        process.kill()
    said = [process.communicate() for process in [*ended, *running]]
    assert kills >= 5 and all(pair == ("", "") for pair in said), said
    with claim(tmp_path / "run"):
        pass


def test_another_machine_that_beats_is_left_alone_and_a_silent_one_followed(
    tmp_path, impatient, capsys
):
    (tmp_path / FILE).write_text(json.dumps(ELSEWHERE))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(lock.BEAT_SECONDS):
            os.utime(tmp_path / FILE)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(FolderInUse, match="in use by process 4711 on node7"):
            claim(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert json.loads((tmp_path / FILE).read_text()) == ELSEWHERE
    with claim(tmp_path):
        pass
    said = capsys.readouterr().out
    assert "names process 4711 on node7: watching for 0.4 s" in said
    assert "over from process 4711 on node7, which has ended" in said


@pytest.mark.parametrize("found", [json.dumps(ELSEWHERE), "", "no JSON", '{"pid": -1}', "\0" * 99])
def test_who_never_begins_leaves_the_file_as_it_was(tmp_path, impatient, found):
    (tmp_path / FILE).write_text(found)
    with claim(tmp_path):
        assert (tmp_path / FILE).read_text() != found
    if found:
        assert (tmp_path / FILE).read_text() == found


def test_without_locks_of_the_kernel_beats_decide(tmp_path, impatient, monkeypatch):
    monkeypatch.setattr(lock, "lock_file", lambda descriptor: None)
    with claim(tmp_path) as held, held.beating():
        with pytest.raises(FolderInUse, match=f"process {os.getpid()} on"):
            claim(tmp_path)
        held.check()
    silent = claim(tmp_path)
    with claim(tmp_path) as taken:
        taken.check()
        owner = json.loads((tmp_path / FILE).read_text())
        (tmp_path / FILE).write_text(json.dumps(owner | {"pid": 4711}))
        with pytest.raises(TrainingError, match="was taken over by process 4711"):
            silent.check()
    silent.release()


def test_a_folder_that_is_deleted_moved_or_emptied_is_named(tmp_path):
    run = tmp_path / "run"
    for harm, says in (
        (lambda: run.rename(tmp_path / "away"), f"was moved to {tmp_path / 'away'} while"),
        (lambda: shutil.rmtree(run), "run was deleted while the run went on"),
        (lambda: (run / FILE).unlink(), f"{FILE} was removed while the run went on"),
        (lambda: (shutil.rmtree(run), run.mkdir()), f"{FILE} was removed while the run went on"),
    ):
        with claim(run) as held:
            held.begin()
            harm()
            with pytest.raises(TrainingError, match=says):
                held.check()


@pytest.mark.parametrize("where", ["file", "file/below", "link", "x" * 300])
def test_a_folder_that_cannot_be_is_refused_and_nothing_is_made(tmp_path, where):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere/at/all")
    before = tree(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        claim(tmp_path / where)
    assert tree(tmp_path) == before
    with pytest.raises(ConfigError, match="cannot write the run folder"):
        claim(tmp_path / "new" / where / ("x" * 300))


@pytest.mark.slow
def test_a_folder_removed_by_one_is_made_again_for_another(tmp_path):
    """An owner that never began takes its new folder with it, while others ask for it."""
    run = tmp_path / "run"
    running = [python(CLAIMS_AGAIN_AND_AGAIN, run, n, 0.0, 0.6) for n in range(3)]
    assert [process.communicate() for process in running] == [("", "")] * 3


@pytest.mark.parametrize(
    ("code", "helps"),
    [
        (errno.EACCES, "another --save"),
        (errno.EROFS, "another --save"),
        (errno.ENOSPC, "free space there, then the same command"),
        (errno.EDQUOT, "free space there, then the same command"),
    ],
)
def test_what_helps_against_a_folder_that_cannot_be_written(
    code: int, helps: str, tmp_path: Path
) -> None:
    """Another folder is no help to a run that is to go on."""
    with (
        patch("os.open", side_effect=OSError(code, os.strerror(code))),
        pytest.raises(ConfigError) as told,
    ):
        claim(tmp_path / "run")
    assert f"cannot write the run folder {tmp_path / 'run'}: {os.strerror(code)}" in str(told.value)
    assert str(told.value).endswith(f"try:   {helps}")
