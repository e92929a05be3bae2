"""Real processes, but few and short-lived ones."""

import errno
import gc
import os
import re
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist

from fivefold import errors
from fivefold.cli.main import main
from fivefold.errors import FivefoldError
from fivefold.train.ranks import children
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local, run_ranks
from fivefold.train.ranks.rank_env import RankEnv, read_rank_env
from fivefold.train.ranks.signals import StopRequest
from tests.programs import Program

pytestmark = pytest.mark.slow

GRACE = 0.3  # seconds from SIGTERM to SIGKILL, instead of two


def place(rank: int) -> str:
    return f"PP({rank // 2}) TP({rank % 2})"


def step() -> None:
    dist.all_reduce(torch.ones(8))


def wait_until(true, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_meet_and_know_where_they_are(tmp_path):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu")
        total_1 = torch.tensor([float(env.rank)])
        dist.all_reduce(total_1)
        seen = read_rank_env()
        assert (seen.rank, seen.local_rank, seen.world_size) == (env.rank, env.rank, 3)
        (tmp_path / str(env.rank)).write_text(f"{total_1.item()} {os.getpgrp()}")

    assert launch_local(worker, 3) == 0
    assert {f.read_text() for f in tmp_path.iterdir()} == {f"3.0 {os.getpgrp()}"}


def alone() -> None:
    print(init_process_group(read_rank_env({}), "cpu"), dist.get_world_size())


def test_alone_without_a_launcher():
    process = Program(alone)
    said, errors = process.communicate(60)
    assert process.returncode == 0, errors
    assert said.split() == ["cpu", "1"]


def test_what_a_worker_returns_is_the_exit_status(capfd):
    assert launch_local(lambda env: 7 if env.rank == 1 else 0, 2) == 7
    assert "rank 1: left with status 7" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("signum", "says"),
    [(signal.SIGKILL, "killed by SIGKILL; .*memory"), (signal.SIGSEGV, "killed by SIGSEGV")],
)
def test_a_killed_rank_is_named_and_the_job_ends(capfd, signum, says):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu")
        for i in range(100_000):
            step()
            if env.rank == 2 and i == 20:
                os.kill(os.getpid(), signum)

    start = time.monotonic()
    assert run_ranks(worker, 4, describe=place).status == 128 + signum
    assert time.monotonic() - start < 5
    error = capfd.readouterr().err
    assert error.count("\nerror:") + error.startswith("error:") == 1
    assert re.search(rf"error: rank 2 PP\(1\) TP\(0\): {says}", error)
    assert "Connection" not in error


def test_an_exception_is_the_cause_although_the_others_fail_too(capfd, tmp_path):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu")
        step()
        if env.rank == 1:
            dist.destroy_process_group()  # the others lose the connection first
            time.sleep(0.5)
            raise ValueError("label 9 is out of range")
        step()

    assert run_ranks(worker, 3, describe=place, errors_folder=tmp_path / "errors").status == 1
    error = capfd.readouterr().err
    assert "error: rank 1 PP(0) TP(1): ValueError: label 9 is out of range" in error
    assert "the other 2 ranks were stopped" in error
    assert f"traceback: {tmp_path}/errors/rank-1.txt" in error
    assert "Traceback" not in error
    assert "raise ValueError" in (tmp_path / "errors" / "rank-1.txt").read_text()


def test_a_traceback_that_cannot_be_written_does_not_hide_the_cause(capfd, tmp_path):
    def worker(env: RankEnv) -> None:
        raise OSError("the true cause")

    (tmp_path / "errors").write_text("a file where the folder should be")
    assert run_ranks(worker, 1, errors_folder=tmp_path / "errors").status == 1
    errors = capfd.readouterr().err
    assert "OSError: the true cause" in errors and "in worker" in errors


@pytest.mark.parametrize(
    ("leave", "says"),
    [
        (dist.destroy_process_group, "left with status 0, while others still needed it"),
        (lambda: os._exit(0), "left with status 0 before the end"),
        (lambda: sys.exit(0), "left with sys.exit(0) before the end"),
    ],
)
def test_a_rank_that_leaves_early_is_named_not_one_that_lost_it(capfd, leave, says):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu")
        step()
        if env.rank == 1:
            leave()
            return
        step()

    assert run_ranks(worker, 3, describe=place).status == 1
    assert f"error: rank 1 PP(0) TP(1): {says}\n" in capfd.readouterr().err


def test_when_every_rank_waits_for_another_each_place_is_told(capfd):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu", timeout_seconds=2)
        step()
        if env.rank:
            dist.recv(torch.ones(1), 0)
        else:
            dist.recv(torch.ones(1), 1)

    assert launch_local(worker, 2) == 1
    error = capfd.readouterr().err
    assert "every rank waited for others:\n  rank 0 in worker" in error
    assert re.search(r"\n  rank 1 in worker \(.*test_launch.py:\d+\)\n", error)


ERRORS = (
    *(FivefoldError, errors.ConfigError, errors.PlaceError, errors.DataError),
    *(errors.CheckpointError, errors.TrainingError),
    lambda what: errors.OtherSettings(errors.Mistake(what)),
    lambda what: errors.DamagedCheckpoint(what, 3),
)
KINDS = [type(make("")) for make in ERRORS]


def test_every_error_is_tried():
    declared = [e for e in vars(errors).values() if isinstance(e, type)]
    assert {e for e in declared if issubclass(e, FivefoldError)} == {*KINDS, errors.RanksFailed}


@pytest.mark.parametrize("make", ERRORS, ids=[kind.__name__ for kind in KINDS])
def test_an_error_for_the_user_is_its_message_alone(capfd, monkeypatch, make):
    """With one status, whether the command itself meets it or a rank that it has started."""

    def worker(env: object) -> int:
        raise make("3 heads cannot be split over tp=2")

    status = launch_local(worker, 2)
    assert capfd.readouterr().err == "error: 3 heads cannot be split over tp=2\n"
    monkeypatch.setattr(sys.modules[main.__module__], "_dispatch", worker)
    assert main(["train"]) == status == (1 if isinstance(make(""), errors.TrainingError) else 2)
    assert capfd.readouterr().err == "error: 3 heads cannot be split over tp=2\n"


def test_a_long_message_does_not_block(capfd):
    def worker(env: RankEnv) -> None:
        raise ValueError("\u20ac\x00" * 500_000)

    assert launch_local(worker, 1) == 1
    assert "ValueError" in capfd.readouterr().err


def test_a_rank_that_ignores_sigterm_is_killed(monkeypatch):
    monkeypatch.setattr(children, "GRACE_SECONDS", GRACE)

    def worker(env: RankEnv) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if env.rank == 0:
            raise ValueError
        time.sleep(60)

    start = time.monotonic()
    assert launch_local(worker, 2) == 1
    assert GRACE < time.monotonic() - start < 6


def be_parent(folder: Path, manner: str) -> int:
    """In a process of its own: launch ranks that end when they are asked to, or never."""

    def worker(env: RankEnv) -> None:
        with StopRequest() as stop:
            (folder / f"pid-{env.rank}").write_text(str(os.getpid()))
            while not (manner == "polite" and stop.signum):
                time.sleep(0.02)
            (folder / f"saved-{env.rank}").write_text(stop.reason)

    with patch.object(children, "GRACE_SECONDS", GRACE):
        return launch_local(worker, 2)


@pytest.fixture
def parent(tmp_path):
    started = []

    def start(manner: str) -> tuple[Program, list[psutil.Process]]:
        started.append(Program(be_parent, tmp_path, manner, own_session=True))
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        wait_until(lambda: all(f.exists() and f.read_text() for f in files), 60)
        return started[0], [psutil.Process(int(f.read_text())) for f in files]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_no_rank_survives_a_killed_parent(parent):
    process, ranks = parent("polite")
    process.kill()
    wait_until(lambda: not any(alive(r) for r in ranks))


@pytest.mark.parametrize(
    ("how", "reason"), [("terminal", "interrupt"), ("scheduler", "SIGTERM"), ("usr1", "SIGUSR1")]
)
def test_a_first_signal_lets_the_ranks_save(parent, tmp_path, how, reason):
    process, _ = parent("polite")
    match how:
        case "terminal":
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C reaches parent and ranks
        case "scheduler":
            process.terminate()
        case "usr1":
            process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 0
    assert [(tmp_path / f"saved-{r}").read_text() for r in range(2)] == [reason] * 2


def test_a_second_ctrl_c_ends_ranks_that_will_not_leave(parent, tmp_path):
    process, ranks = parent("stubborn")
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.7)
    assert all(alive(r) for r in ranks)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT
    assert not any(alive(r) for r in ranks)
    assert list(tmp_path.glob("saved-*")) == []


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_what_the_parent_left_over_is_not_collected_by_a_rank() -> None:
    """Threads of a group are not there in a fork, and to wait for one would abort the rank."""

    class Cycle:
        def __init__(self) -> None:
            store = dist.HashStore()
            self.me, self.group = self, dist.ProcessGroupGloo(store, 0, 1)

    def worker(env: RankEnv) -> None:
        assert gc.isenabled()
        gc.collect()

    def allocate() -> None:  # as Python's own hooks of a fork do
        if usual and gc.isenabled():
            gc.collect()

    usual = gc.get_threshold()
    os.register_at_fork(after_in_child=allocate)
    gc.set_threshold(10**9)
    try:
        Cycle()
        assert launch_local(worker, 2) == 0
    finally:
        gc.set_threshold(*usual)
        usual = ()


def saved_by_torch(path: Path) -> None:
    """As torch.save tells of a full disk: by an error of its own."""
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        raise RuntimeError("unexpected pos 704 vs 598")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EISDIR, errno.ENOSPC, None])
def test_what_the_system_refuses_a_rank_is_one_message(tmp_path, code, capfd):
    def worker(env: RankEnv) -> None:
        if env.rank == 1 and code is None:
            saved_by_torch(tmp_path / "file")
        elif env.rank == 1:
            raise OSError(code, os.strerror(code), str(tmp_path / "file"))

    assert launch_local(worker, 2) == FivefoldError.status
    said = capfd.readouterr().err
    full = code in (errno.ENOSPC, None)
    assert said.startswith("error: disk full: cannot write" if full else "error: cannot use")
    assert said.count("error:") == 1 and f"{tmp_path / 'file'}" in said and "Traceback" not in said
