"""A rank that does not go on is named while the run still waits. Ranks that hold up others are in
test_faults.py."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.pipeline.ir import Act, Direction, Kind, Message
from fivefold.train.health import watchdog as watchdog_
from fivefold.train.health.activity import Activity
from fivefold.train.health.stack_sampler import RankStatus
from fivefold.train.health.watchdog import Watchdog
from fivefold.train.ranks.rank_env import RankEnv

SECONDS = 0.4
MESSAGE = Message(5, 0, 1, 2, 3, mb=4, direction=Direction.FORWARD)
FORWARD = Act(Kind.F, stage=3, mb=4)
BACKWARD = Act(Kind.BW, stage=3, mb=4)


def watchdog(env: RankEnv, folder: Path, seconds: float = SECONDS) -> Watchdog:
    ends = "--distributed-timeout-minutes 10"
    return Watchdog(env, seconds, name="rank {}".format, ends=ends, folder=folder / "hangs")


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reached()


def sleeping(folder: Path) -> None:
    until(lambda: any(folder.glob("hangs/*")))


def test_a_process_alone_is_named_with_its_stack_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = RankEnv()
    said = []
    with watchdog(env, tmp_path):
        env.activity.begin(7)
        env.activity.enter(FORWARD)
        sleeping(tmp_path)
        env.activity.begin(8)
        until(lambda: said.append(capsys.readouterr().err) or "goes on" in "".join(said))
    first, *lines = "".join(said).splitlines()
    assert "no progress for " in first and " in step 7: hangs in " in first
    assert any("step 7, F of stage 3 microbatch 4" in line for line in lines)
    assert lines[-1].startswith("warning: goes on after ")
    assert "in sleeping" in (tmp_path / "hangs" / "step-7.txt").read_text()
    assert [t for t in threading.enumerate() if t.name == "watchdog"] == []


def test_a_process_that_computes_or_goes_on_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = RankEnv()
    with watchdog(env, tmp_path):
        end = time.monotonic() + 4 * SECONDS
        while time.monotonic() < end:  # computes
            pass
        for step in range(8):
            env.activity.begin(step + 1)
            time.sleep(SECONDS / 4)
    with watchdog(env, tmp_path, 0.0):  # none is wanted
        time.sleep(2 * SECONDS)
    assert capsys.readouterr().err == ""


def test_a_rank_that_was_late_and_then_hangs_is_told_again_and_no_third_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env, store = RankEnv(0, 0, 2, 2, "127.0.0.1", 1, "slurm"), dist.HashStore()
    waits = RankStatus("all_gather (x.py:1)", True, False, "", "step 1", 9.0)
    late, hangs = (
        RankStatus("work (x.py:2)", False, moves, "", "", 9.0) for moves in (True, False)
    )
    seen = [late, late, hangs, hangs, late]
    asked: list[RankStatus] = []

    def answers(*_: Any) -> dict[int, RankStatus]:
        asked.append(seen[len(asked)])
        return {0: waits, 1: asked[-1]}

    with (
        patch.object(watchdog_, "connect", lambda env: store),
        patch.object(watchdog_, "await_answers", answers),
        watchdog(env, tmp_path, SECONDS / 4),
    ):
        time.sleep(4 * SECONDS)
    said = re.findall("no progress for .*: rank 1 (.*) in work", capsys.readouterr().err)
    assert said == ["is busy", "hangs"] and asked == seen[:3]


@pytest.mark.parametrize("rank", [1, 2])
def test_a_store_that_does_not_answer_is_told_by_one_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    env = RankEnv(rank, rank, 4, 4, "127.0.0.1", 1, "slurm")
    said: list[str] = []
    with patch.object(watchdog_, "connect", lambda env: None), watchdog(env, tmp_path):
        if rank == 1:
            until(lambda: said.append(capsys.readouterr().err) or any(said))
        else:
            time.sleep(3 * SECONDS)
            said.append(capsys.readouterr().err)
    expected = "before the first step: the rendezvous store on 127.0.0.1 does not answer"
    assert (expected in "".join(said)) is (rank == 1)


def test_an_activity_knows_what_its_action_needs() -> None:
    activity = Activity()
    assert str(activity) == "before the first step" and activity.needs == ""
    activity.begin(3)
    for act in (Act(Kind.RECV, 3, 4, message=MESSAGE), Act(Kind.FB, 3, kids=(FORWARD, BACKWARD))):
        activity.enter(act)
    assert activity.needs == "the forward message of microbatch 4 from stage 2 on PP(0)"
    assert str(activity) == ("step 3, F of stage 3 microbatch 4&BW of stage 3 microbatch 4")
    activity.enter(replace(FORWARD, slice=1))
    assert activity.needs == ""
    activity.begin(4)
    assert str(activity) == "step 4"


def test_a_device_is_behind_its_host() -> None:
    @dataclass
    class Reached:
        yes: bool

        def query(self) -> bool:
            return self.yes

        def elapsed_time(self, later: Any) -> float:
            return 2000.0

    activity, marks = Activity(), [*map(Reached, (True, True, True, False, False))]
    activity.mark = iter(marks).__next__
    activity.begin(1)
    activity.enter(Act(Kind.RECV, 3, 4, message=MESSAGE))
    assert activity.device_act is None
    activity.enter(FORWARD)
    activity.enter(FORWARD)
    activity.enter(BACKWARD)
    activity.enter(None)
    assert str(activity) == "step 1; its GPU is in F of stage 3 microbatch 4"
    assert activity.compute_seconds == 4.0
