"""How a process begins and ends: whatever Python does at its exit but freeing memory is done."""

import subprocess
import sys

import pytest

LEAVES = "import atexit, sys, threading, time; from fivefold import process; "
LATE = "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); "
RANK = """
import gc
usual = gc.get_threshold()
from fivefold import process
process.begin()
assert gc.get_threshold() != usual
from fivefold.train.ranks.launch import init_process_group, launch_local

def rank(env):
    import os, sys, torch
    assert "torch._dynamo" in sys.modules, "each rank would import it by itself"
    before = os.listdir("/proc/self/task") if sys.platform == "linux" else []
    init_process_group(env, "cpu")
    assert gc.get_threshold() == usual, gc.get_threshold()
    if sys.platform == "linux":
        of_gloo = set(os.listdir("/proc/self/task")) - set(before)
        assert of_gloo
        policies = {os.sched_getscheduler(int(thread)) for thread in (*of_gloo, os.getpid())}
        assert policies == {os.SCHED_BATCH}
    torch.distributed.barrier()  # the other may still connect

process.leave(launch_local(rank, 2))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("sys.stdout.write('written'); ", "written"),
        ("atexit.register(print, 'at exit'); ", "at exit\n"),
        (LATE, "late\n"),
        (f"{LATE}atexit.register(print, 'at exit'); ", "late\nat exit\n"),
    ],
)
def test_what_a_process_still_has_to_say_is_said(before: str, said: str) -> None:
    done = run(f"{LEAVES}{before}process.leave(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, said, "")


def test_a_reader_who_has_gone_is_no_error() -> None:
    code = f"{LEAVES}import os; sys.stdout.write('text'); os.close(1); process.leave(0)"
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_ranks_look_for_garbage_as_usual_share_imports_and_finish_their_turn() -> None:
    done = run(RANK)
    assert done.returncode == 0, done.stderr
