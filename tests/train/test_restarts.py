"""Ranks that failed are started again, and the run loses nothing."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import CheckpointError, ConfigError, TrainingError
from fivefold.train.engine import Engine
from fivefold.train.folder.origin import Origin
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.ranks import rejoin
from fivefold.train.ranks.launch import End, run_ranks
from fivefold.train.ranks.rank_env import RankEnv, check_restarts
from fivefold.train.ranks.rejoin import Generations
from fivefold.train.ranks.restarts import NextStart, Restart, Restarts
from tests import programs
from tests.programs import Program
from tests.train.test_run import command, losses, wait_for

TWO = ("--nproc", "2", "--tp", "2")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2"]


def kill_a_rank(job: subprocess.Popen[str] | Program, run: Path) -> None:
    """One that has no part in writing metrics, once there is a checkpoint."""
    wait_for(run / "checkpoints" / "latest", job)
    psutil.Process(job.pid).children()[-1].send_signal(signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["nproc", pytest.param("torchrun", marks=pytest.mark.exhaustive)]
)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(
    cache: Path, finished: Path, tmp_path: Path, launcher: str
) -> None:
    run = tmp_path / "run"
    words = command(cache, run, "--save-interval", "1", "--train-iters", "10")
    words += ["--lr-decay-iters", "6"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if launcher == "nproc":
        on_disk = ["--optimizer-cpu-offload", "--optimizer-offload-path", str(tmp_path / "disk")]
        words += [*TWO, "--max-restarts", "2", *on_disk]
        job: subprocess.Popen[str] | Program = programs.start(words[3:], env=env)
    else:
        words = [sys.executable, "-m", *TORCHRUN, *words[1:], "--tp", "2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        job = subprocess.Popen(words, env=env, **pipes)  # type: ignore[call-overload]
    kill_a_rank(job, run)
    said, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    assert re.search(r"continues after step \d+", said)
    before = losses(finished)
    assert losses(run)[: len(before)] == before
    starts = json.loads((run / "environment.json").read_text())
    assert len(starts) == 2, errors
    if launcher == "nproc":
        assert not [*(tmp_path / "disk").iterdir()]  # what a killed rank had there is gone
        assert re.search(r"restart 1 of 2 from the checkpoint of step \d+", errors)
        assert "rank 1 PP(0) DP(0) CP(0) TP(1): killed by SIGKILL" in starts[1]["after"]


@pytest.mark.slow
def test_a_failure_that_comes_back_is_not_tried_for_ever(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = command(cache, tmp_path / "run", *TWO, "--max-restarts", "9", "--lr", "1e300")
    assert main([*words[3:], "--lr-decay-style", "constant"]) == 1
    errors = capfd.readouterr().err
    assert errors.count("is not finite") == 2 and "restart 1 of 9 from the beginning" in errors
    assert "not started again: it failed in the same way before, after the same step, " in errors


def test_restarts_end_when_they_help_no_more() -> None:
    restarts = Restarts(3)
    assert restarts.refusal(End(1, "rank 1", "lost"), 4) is None
    assert restarts.refusal(End(1, "rank 1", "lost"), 9) is None
    assert restarts.refusal(End(1, "rank 1", "killed"), 9) is None
    assert restarts.used == 3
    assert restarts.refusal(End(1, "rank 0", "lost"), 10) == "--max-restarts 3 is used up"
    assert "same step, 9" in (restarts.refusal(End(1, "rank 0", "lost"), 9) or "")
    wrong = End(2, "rank 0", "4 GPUs", of_settings=True)
    assert Restarts(2).refusal(wrong, 0) == "its settings cannot run"


def test_ranks_that_end_later_than_the_first_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three ranks fail in the same way; the slower one dies while it is waited for."""
    generations = Generations(dist.HashStore(), 3)
    began, looks = time.monotonic(), []

    def living() -> set[int]:
        looks.append(1)
        return {1} if len(looks) < 5 else set()

    assert generations.await_let_go(living) == set()
    assert time.monotonic() - began < rejoin.LET_GO_SECONDS / 2
    monkeypatch.setattr(rejoin, "LET_GO_SECONDS", 0.1)
    assert generations.await_let_go(lambda: {1}) == {1}  # this one lives, and does not let go


def following(find_origin: Callable[[], None], folder: Path) -> NextStart:
    config = Config(PRESETS["debug-llama"])
    return NextStart(Restarts(3), find_origin, RunFolder(folder), config)


def test_what_cannot_be_found_again_is_not_started_again(tmp_path: Path) -> None:
    end = End(1, "rank 0", "the run folder was deleted", rank=0)

    def gone() -> None:
        raise TrainingError(f"{end.why}\n  try:   start the run again")

    def damaged() -> None:
        raise CheckpointError("no checkpoint is intact\n  step 3: gone")

    assert following(gone, tmp_path)(end) == (None, f"the ranks are not started again: {end.why}")
    assert following(damaged, tmp_path)(end)[1].endswith("no checkpoint is intact\n  step 3: gone")


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["starts", pytest.param("folder", marks=pytest.mark.exhaustive)])
def test_damage_to_the_run_folder_while_a_rank_dies(
    cache: Path, tmp_path: Path, harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A list of starts is only an account of what was; a folder that is gone is the run's end."""
    run, original, most = tmp_path / "run", Engine.step, time.monotonic() + 100

    def step(engine: Engine, *args: Any, **settings: Any) -> Any:
        if engine.groups.rank == 1 and engine.steps == 4 and not (tmp_path / "done").exists():
            (tmp_path / "done").touch()
            while not (run / "checkpoints" / "latest").exists():  # written while steps go on
                assert time.monotonic() < most
                time.sleep(0.01)
            if harm == "folder":
                run.rename(tmp_path / "away")  # at once, whatever others write there
            else:
                (run / "environment.json").write_text("[{")
                os.kill(os.getpid(), signal.SIGKILL)
        return original(engine, *args, **settings)

    with patch.object(Engine, "step", step):
        status = main([*command(cache, run, *TWO, "--max-restarts", "3")[3:]])
    errors = capfd.readouterr().err
    if harm == "starts":
        assert status == 0 and "restart 1 of 3 from the checkpoint of step 3" in errors
        assert "environment.json is not JSON" in errors and "killed by SIGKILL" in errors
        assert (run / "environment.json.damaged").read_text() == "[{"
        (start,) = json.loads((run / "environment.json").read_text())
        assert "killed by SIGKILL" in start["after"]
    else:
        assert status == 1 and "restart 1" not in errors
        assert f"not started again: the run folder {run} was moved" in errors


def test_a_rank_that_fails_after_a_stop_was_asked_for_is_not_started_again() -> None:
    def worker(env: RankEnv) -> None:
        received: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        if env.rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        while not received:
            time.sleep(0.01)
        raise OSError("no space left")

    end = run_ranks(worker, 2)
    assert end.stopped and end.why == "OSError: no space left"
    assert Restarts(2).refusal(end, 5) == "they were asked to stop"


@pytest.mark.parametrize(
    ("most", "launcher", "torchrun", "save", "message"),
    [
        (1, "torchrun", "0", "runs/a", "torchrun --max-restarts 1 starts them"),
        (1, "slurm", "0", "runs/a", "submitted again, goes on"),
        (0, "torchrun", "3", None, "needs --save"),
    ],
)
def test_what_cannot_restart_is_refused(
    most: int,
    launcher: str,
    torchrun: str,
    save: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", torchrun)
    with pytest.raises(ConfigError, match=message):
        check_restarts(most, launcher, save)
    check_restarts(0, launcher, "runs/a")


def test_orders_arrive_as_they_were_sent() -> None:
    values = {int: 3, bool: True, str: "why"}
    whole = {f.name: values.get(f.type, Path(f.name)) for f in fields(Origin)}
    for origin in (Origin(**whole), Origin(Path("weights"), 0, weights_only=True), None):
        again = Restart(origin, "rank 1: killed")
        assert Restart.of(json.loads(json.dumps(again.orders))) == again
