"""A run whose ranks die goes on from the memory of its host, with bitwise the same losses."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fivefold.cli.main import main
from fivefold.train.folder.run_folder import RunFolder
from tests import programs
from tests.programs import Program
from tests.train.test_run import FIVEFOLD, command, losses, wait_for

SECONDS = 30.0  # from a kill to the next step; about 2 on a quiet machine
LONG = ("--train-iters", "16", "--lr-decay-iters", "6", "--save-interval", "0")


def start(words: list[str]) -> "subprocess.Popen[str] | Program":
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if words[:3] == FIVEFOLD:
        return programs.start(words[3:], env=env)
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env=env, **pipes)  # type: ignore[call-overload, no-any-return]


def ranks(job: "subprocess.Popen[str] | Program") -> list[psutil.Process]:
    return psutil.Process(job.pid).children()


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", ["nproc", pytest.param("torchrun", marks=pytest.mark.exhaustive)]
)
def test_a_killed_rank_costs_the_steps_since_the_last_state(
    cache: Path, finished: Path, tmp_path: Path, launcher: str
) -> None:
    memory, run = tmp_path / "memory", tmp_path / "run"
    words = command(cache, run, *LONG, "--tp", "2", "--non-persistent-save-interval", "2")
    words += ["--non-persistent-local-ckpt-dir", str(memory)]
    if launcher == "nproc":
        words += ["--nproc", "2", "--max-restarts", "1"]
    else:
        torchrun = "-m torch.distributed.run --standalone --nproc_per_node 2 --max-restarts 1"
        words = [sys.executable, *torchrun.split(), *words[1:]]
    job = start(words)
    deadline = time.monotonic() + 60
    while not [*memory.glob("*/*/step-00000004/*")]:
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    ranks(job)[-1].send_signal(signal.SIGKILL)
    _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    if launcher == "nproc":
        assert "the other rank meets a new one" in errors
        again = re.search(r"restart 1 of 1 from the state of step (\d+) in memory", errors)
        assert again and int(again[1]) >= 2
    before = losses(finished)
    assert losses(run)[: len(before)] == before
    assert [*memory.glob("*/*")] == []  # nothing is left once the run is on the disk
    assert len([*(run / "checkpoints").glob("step-*")]) == 1


@pytest.mark.slow
def test_states_in_memory_are_the_run_s_own_as_its_checkpoints_are(
    cache: Path, finished: Path, tmp_path: Path
) -> None:
    """They come before what --load names, are of one model, and may be beyond the last step."""
    memory = tmp_path / "memory"
    words = command(cache, tmp_path / "run", *LONG, "--load", str(finished), "--finetune")
    words += ["--train-iters", "30", "--global-batch-size", "1"]
    words += ["--non-persistent-save-interval", "2", "--non-persistent-local-ckpt-dir", str(memory)]
    job = start(words)
    deadline = time.monotonic() + 60
    while not [*memory.glob("*/*/step-00000006/*")]:  # then step 4 is whole
        assert job.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    job.kill()
    job.wait()
    for more, says in (
        (["--rotary-base", "7"], "rotary_base: was 10000.0, is 7.0"),
        (["--train-iters", "2"], "train_iters is 2"),
    ):
        refused = programs.run([*words[3:], *more])
        assert refused.returncode == 2 and says in refused.stderr
        assert refused.stderr.count("error: ") == 1
    again = programs.run(words[3:])
    assert again.returncode == 0, again.stderr
    assert re.search(r"^continues after step ([4-9]|[12]\d)$", again.stdout, re.MULTILINE)


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_nothing(cache: Path, tmp_path: Path) -> None:
    """Eight ranks, any of which dies at any moment."""
    kills, memory = 50, tmp_path / "memory"
    layout = ["--nproc", "8", "--tp", "2", "--data-parallel-sharding-strategy", "optim"]
    words = [*layout, "--global-batch-size", "8", "--train-iters", "400", "--save-interval", "0"]
    whole = start(command(cache, tmp_path / "whole", *words))
    assert whole.communicate()[1] == "" and whole.returncode == 0
    keeping = ["--non-persistent-save-interval", "3", "--max-restarts", "200"]
    keeping += ["--non-persistent-local-ckpt-dir", str(memory)]
    job = start(command(cache, tmp_path / "run", *words, *keeping))
    chance, metrics = random.Random(50), tmp_path / "run" / "metrics.jsonl"
    wait_for(metrics, job)
    for _ in range(kills):
        time.sleep(chance.uniform(0.0, 2.0))
        chance.choice(ranks(job)).kill()
        killed = time.time()
        while metrics.stat().st_mtime <= killed + 0.3:  # a step may just have ended
            assert job.poll() is None and time.time() < killed + SECONDS
            time.sleep(0.02)
    errors = job.communicate(timeout=600)[1]
    assert job.returncode == 0, errors
    found = re.findall(r"from the state of step \d+ in memory(?:; (\d+) steps? run)?", errors)
    assert len(found) == kills
    assert all(int(lost or 0) <= 3 for lost in found)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/shm")
@pytest.mark.parametrize("steps", [6, 7])
def test_a_run_that_has_ended_leaves_no_states_of_an_earlier_start(
    cache: Path, finished: Path, tmp_path: Path, steps: int
) -> None:
    """Though it keeps none itself any more, or has nothing left to do."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    identity = RunFolder(run).identity()
    assert identity is not None
    memory = Path("/dev/shm/fivefold")
    left, of_another = memory / identity, memory / f"{identity}-of-another"
    for folder in (left, of_another):
        (folder / "step-00000002").mkdir(parents=True)
    try:
        assert main(command(cache, run, "--train-iters", str(steps))[3:]) == 0
        assert not left.exists() and of_another.exists()
    finally:
        shutil.rmtree(of_another)
