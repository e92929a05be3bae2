"""A device that is gone costs the run its ranks' share, not the run."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from benchmarks.peers import free_port
from fivefold.cli.fewer_ranks import DEVICES, leave_out
from fivefold.cli.main import main
from fivefold.train.engine import Engine
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.step_result import DeviceResult
from tests.train.test_run import command, losses, wait_for


@contextmanager
def broken(*ranks: tuple[int, int], step: int) -> Iterator[None]:
    """In this step of a run on so many ranks, one of them fails: (ranks, the one that does)."""
    original = Engine.gradients

    def gradients(engine: Engine, *args: Any, **settings: Any) -> DeviceResult:
        here = engine.layout.grid.world_size, engine.groups.rank
        if here in ranks and engine.steps == step:
            raise OSError("the device is gone")
        return original(engine, *args, **settings)

    with patch.object(Engine, "gradients", gradients):
        yield


@pytest.mark.slow
def test_the_planner_lays_out_the_ranks_that_are_left(
    cache: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    split = ("--nproc", "3", "--pp", "3", "--pipeline-model-parallel-layout", "Et|tt|tL")
    words = command(cache, tmp_path / "run", *split, "--max-restarts", "3", "--min-nproc", "2")
    with broken((3, 1), step=4):
        assert main([*words[3:], "--precision", "fp32"]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "restart 1 of 3 from the " in said
    assert "not started again: it failed in the same way before" in said
    assert "layout: " in said and "goes on with 2 ranks, without rank 1" in said
    assert losses(tmp_path / "run") == pytest.approx(losses(finished), rel=1e-5)
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert len(starts) == 3


@pytest.mark.slow
def test_a_layout_that_fits_fewer_ranks_stays(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = command(cache, tmp_path / "run", "--nproc", "3", "--global-batch-size", "12")
    with broken((3, 0), (2, 0), step=4):
        assert main([*words[3:], "--min-nproc", "1"]) == 1
    said = " ".join(capfd.readouterr().err.split())
    assert "goes on with 2 ranks, without rank 0" in said and "layout: " not in said
    assert "goes on with 1" not in said  # the same failure after the same step is of the run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--min-nproc 2 --save runs/a", "is for the ranks of --nproc or of torchrun"),
        ("--nproc 2 --min-nproc 2 --save runs/a", "less than --nproc 2, not 2"),
        ("--nproc 2 --min-nproc 1", "needs --save"),
    ],
)
def test_what_cannot_go_on_is_refused(
    words: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "debug", *words.split()]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("launcher", "words", "message"),
    [
        ("torchrun", "--min-nproc 4 --save runs/a", "torchrun has started 2 ranks, and --min-np"),
        ("slurm", "--min-nproc 1 --save runs/a", "srun starts as many ranks as the job has"),
    ],
)
def test_what_a_launcher_cannot_do_is_refused(
    launcher: str,
    words: str,
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = RankEnv(0, 0, 2, 2, "127.0.0.1", 1, launcher)  # type: ignore[arg-type]
    monkeypatch.setattr("fivefold.cli.train.read_rank_env", lambda: env)
    assert main(["train", "debug", *words.split()]) == 2
    assert message in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize(
    ("ranks", "tp", "pp", "kept"), [(4, 2, 2, True), (2, 2, 2, False), (2, 2, 1, True)]
)
def test_under_torchrun_the_planner_is_asked_where_the_layout_does_not_fit(
    ranks: int, tp: int, pp: int, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = RankEnv(0, 0, ranks, ranks, "127.0.0.1", 1, "torchrun")
    monkeypatch.setattr("fivefold.cli.train.read_rank_env", lambda: env)
    found = []
    monkeypatch.setattr("fivefold.cli.preview.preview", lambda layout: found.append(layout) or [])
    words = f"--tp {tp} --pp {pp} --min-nproc 1 --save runs/a --dry-run"
    assert main(["train", "debug", *words.split()]) == 0
    (layout,) = found
    assert layout.grid.world_size == ranks
    assert ((layout.grid.tp, layout.grid.pp) == (tp, pp)) is kept


@pytest.mark.parametrize(
    ("given", "there", "left", "said"),
    [
        (None, 4, "0,1,3", " and GPU 2"),
        ("4,5,6,7", 4, "4,5,7", " and GPU 6"),
        ("GPU-a,GPU-b,GPU-c", 3, "GPU-a,GPU-b", " and GPU GPU-c"),
        ("4,5", 2, "4,5", ""),
        (None, 0, None, ""),
    ],
)
def test_the_gpu_of_the_rank_is_left_out(
    given: str | None, there: int, left: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DEVICES, raising=False)
    if given is not None:
        monkeypatch.setenv(DEVICES, given)
    ranks = 3 if given != "4,5,6,7" else 4
    with patch("fivefold.cli.fewer_ranks.visible_gpus", return_value=there):
        assert leave_out(2, max(ranks, 3)) == said
    assert os.environ.get(DEVICES) == left


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", ["auto", "given", "spare"])
def test_torchrun_goes_on_with_the_hosts_that_are_left(
    cache: Path, tmp_path: Path, way: str
) -> None:
    """Two agents stand for hosts; one of them dies with its ranks, without a word, or joins late.

    Four ranks have the layout that is given, which does not fit two of them.
    """
    run, port = tmp_path / "run", free_port()
    layout = {
        "auto": ["--layout", "auto"],
        "given": ["--tp", "2", "--pp", "2", "--min-nproc", "2"],
        "spare": ["--tp", "2"],
    }[way]
    words = command(cache, run, *layout, "--precision", "fp32", "--train-iters", "400")

    def agent(first: bool) -> subprocess.Popen[bytes]:
        how = f"is_host={int(first)},join_timeout=300,read_timeout=300,last_call_timeout=3"
        elastic = ["--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3"]
        elastic += ["--rdzv-backend", "c10d"]
        elastic += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", how]
        starts = [sys.executable, "-m", "torch.distributed.run", *elastic, *words[1:]]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if way == "spare":  # else the address of the store is told in the first round only
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        said = (tmp_path / how).open("w")
        return subprocess.Popen(starts, env=env, cwd=tmp_path, stdout=said, stderr=said)

    stays = agent(first=True)
    if way == "spare":
        wait_for(run / "checkpoints" / "latest", stays)
    goes = agent(first=False)
    wait_for(run / "checkpoints" / "latest", stays)
    until = time.monotonic() + 400
    while way == "spare" and len(json.loads((run / "environment.json").read_text())) < 2:
        assert stays.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    for process in (*psutil.Process(goes.pid).children(recursive=True), psutil.Process(goes.pid)):
        process.kill()
    goes.wait()
    assert stays.wait(timeout=900) == 0
    said = next(tmp_path.glob("is_host=1*")).read_text()
    worlds = re.findall("^  world  +(\\d) ", said, re.MULTILINE)
    assert worlds == (["2", "4", "2"] if way == "spare" else ["4", "2"])
    if way == "given":
        assert "layout: " in said
    assert re.search(r"continues after step \d+", said) and "400/400" in said
