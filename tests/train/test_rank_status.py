"""Ranks are asked what they do, and the right one is named on a busy machine, too."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict

import pytest
import torch.distributed as dist

from fivefold.train.health import stack_sampler
from fivefold.train.health.rank_status import (
    ANSWER_SECONDS,
    PATIENCE,
    RankStatus,
    StatusResponder,
    answers,
    ask_ranks,
    await_answers,
    key,
)
from fivefold.train.ranks.rank_env import RankEnv

LOOK = 0.1  # seconds between two looks, instead of half a second
WAITS = RankStatus("finish (a.py:1)", waits=True, moves=False, stack="", doing="step 1", idle=3.0)


@pytest.fixture
def store() -> Iterator[dist.TCPStore]:
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_new_rank_does_not_answer_what_the_dead_one_was_asked(store: dist.TCPStore) -> None:
    for _ in range(20):
        ask_ranks(store, 2)
    with StatusResponder(RankEnv(1, 1, 2, 2, "127.0.0.1", store.port, "local")):
        assert _await_answer(store, ask_ranks(store, 2))


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_sampler, "SAMPLE_SECONDS", LOOK)


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_leaves_lets_no_later_one_answer_before_it_is_asked(
    store: dist.TCPStore,
) -> None:
    """It wakes its own thread, in the store that the one in its place reads, too."""
    env = RankEnv(1, 1, 2, 2, "127.0.0.1", store.port, "local")
    for _ in range(2):
        with StatusResponder(env):
            question = ask_ranks(store, 2)
            assert _await_answer(store, question)
    with StatusResponder(env):
        time.sleep(4 * LOOK)
        assert not answers(store, [1], question + 1)
        assert _await_answer(store, ask_ranks(store, 2))


@pytest.mark.usefixtures("looks_often")
def test_a_rank_that_leaves_at_once_does_not_wait_for_its_thread(store: dist.TCPStore) -> None:
    ask_ranks(store, 2)
    began = time.monotonic()
    for _ in range(4):
        with StatusResponder(RankEnv(1, 1, 2, 2, "127.0.0.1", store.port, "local")):
            pass
        assert "rank status" not in {thread.name for thread in threading.enumerate()}
    assert time.monotonic() < began + 4 * (LOOK + 0.3)


def _await_answer(store: dist.Store, question: int) -> bool:
    deadline = time.monotonic() + 10.0
    while not answers(store, [1], question) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(answers(store, [1], question))


class Clock:
    """Time that passes only while somebody waits; then a rank answers."""

    def __init__(self, store: dist.Store, after: float) -> None:
        self._store, self._after, self.now = store, after, 0.0

    def monotonic(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if before < self._after <= self.now:
            self._store.set("rank status 0/answer/1/1", json.dumps(asdict(WAITS)))


@pytest.mark.parametrize(
    ("after", "stopped", "waited"),
    [
        (0.5, False, 0.5),
        (3 * ANSWER_SECONDS, False, 3 * ANSWER_SECONDS),
        (100.0, False, PATIENCE * ANSWER_SECONDS),
        (100.0, True, ANSWER_SECONDS),
    ],
)
def test_a_rank_that_answers_late_is_waited_for_unless_it_is_stopped(
    store: dist.TCPStore,
    after: float,
    stopped: bool,
    waited: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pid = os.getpid()
    if stopped:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        child.terminate()
        time.sleep(0.5)  # it has ended, and nobody has asked how
        pid = child.pid
    clock = Clock(store, after)
    monkeypatch.setattr("fivefold.train.health.rank_status.time.monotonic", clock.monotonic)
    given = await_answers(store, {1: pid}, 1, clock.pause)
    assert (given == {1: WAITS}) is (after < 100.0)
    assert clock.now == pytest.approx(waited, abs=0.25)
    if stopped:
        child.wait()


def test_another_number_of_hosts_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun keeps its store, and counts no restart where a host comes or goes."""
    alone = key("asking")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    keys = set()
    for world in ("2", "4"):
        monkeypatch.setenv("WORLD_SIZE", world)
        keys.add(key("asking"))
    assert len(keys | {alone}) == 3
