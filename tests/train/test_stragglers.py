"""Replicas that compute more slowly than the others are named."""

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.cli.main import main
from fivefold.mesh.grid import Grid
from fivefold.pipeline.ir import Act, Direction, Kind, Message
from fivefold.pipeline.run.executor import ProgramRun
from fivefold.train.health.activity import Activity
from fivefold.train.health.stragglers import compare
from fivefold.train.ranks.rank_env import read_rank_env

GRID = Grid(pp=2, dp_shard=4, tp=2)


def seconds(**slow: float) -> list[float]:
    """The second stage takes twice as long as the first; r5=1.3: rank 5 takes 1.3 times as long."""
    return [(1.0 if r < 8 else 2.0) * slow.get(f"r{r}", 1.0) for r in range(16)]


def test_replicas_are_compared_with_their_own_kind() -> None:
    found = compare(GRID, seconds(), 10)
    assert found.text == "" and found.numbers["straggler_ratio"] == 1.0
    found = compare(GRID, seconds(r12=1.25, r13=1.25, r2=1.05), 10)
    assert found.text == (
        "stragglers in 10 steps: rank 12 PP(1) DP(2) CP(0) TP(0) computes 2.5 s a step, 1.25 times "
        "the median of its replicas; rank 13 PP(1) DP(2) CP(0) TP(1) computes 2.5 s a step, 1.25 "
        "times the median of its replicas"
    )
    assert found.numbers == {"straggler_ratio": 1.25, "straggler_rank": 12.0}
    assert compare(GRID, [0.0] * 16, 1).numbers["straggler_ratio"] == 1.0


def test_waits_and_messages_are_not_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    forward, backward = Act(Kind.F, 1), Act(Kind.BW, 1)
    receive = Act(Kind.RECV, 1, message=Message(0, 0, 1, 0, 1, 0, Direction.FORWARD))
    activity = Activity()
    activity.begin(1)
    for act, took in (
        (receive, 1.0),
        (forward, 2.0),  # waits
        (forward, 4.0),
        (receive, 8.0),
        (backward, 16.0),  # waits
        (backward, 32.0),
        (Act(Kind.REDUCE, 1), 64.0),
        (None, 128.0),
    ):
        activity.enter(act)
        now += took
    assert activity.compute_seconds == 36.0


@pytest.mark.slow
def test_a_slow_replica_of_a_run_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("some words that are read again and again\n" * 3000)
    original = ProgramRun._run_stage

    def slowed(step: ProgramRun, *args: Any) -> Any:
        if read_rank_env().rank == 1:
            time.sleep(0.2)
        return original(step, *args)

    words = ["train", "debug", "--nproc", "2", "--train-iters", "4", "--log-interval", "2"]
    words += ["--seq-length", "32", "--global-batch-size", "4", "--log-straggler"]
    words += ["--data-path", str(tmp_path / "text.txt"), "--save", str(tmp_path / "run")]
    with patch.object(ProgramRun, "_run_stage", slowed):
        assert main(words) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("stragglers in 2 steps: rank 1 PP(0) DP(1) CP(0) TP(0) computes ") == 2
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    found = [line["straggler_rank"] for line in lines if "straggler_rank" in line]
    assert found == [1.0, 1.0]
