"""Which threads may push others aside, as the kernel has it."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from fivefold.train.machine.cpu_environment import finish_before_others

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's policies")


def _policies(before: int) -> tuple[int, int]:
    """Of a thread with this policy that calls, and of one that it starts."""
    found = []
    os.sched_setscheduler(0, before, os.sched_param(0))
    finish_before_others()
    started = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
    started.start()
    started.join()
    return os.sched_getscheduler(0), *found


def test_threads_finish_their_turn_unless_the_user_has_chosen_otherwise() -> None:
    here = os.sched_getscheduler(0)
    with ThreadPoolExecutor(1) as pool:  # a thread's policy is its own
        assert pool.submit(_policies, os.SCHED_OTHER).result() == (os.SCHED_BATCH,) * 2
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_policies, os.SCHED_IDLE).result() == (os.SCHED_IDLE,) * 2
    assert os.sched_getscheduler(0) == here


def test_a_container_may_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    here = os.sched_getscheduler(0)
    monkeypatch.setattr(os, "sched_getscheduler", lambda _: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    finish_before_others()
    monkeypatch.undo()
    assert os.sched_getscheduler(0) == here
