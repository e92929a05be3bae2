"""How a process begins and ends: whatever Python does at its exit but freeing memory is done."""

import os
import signal
import subprocess
import sys
from shlex import quote

import pytest

LEAVES = "import atexit, sys, threading, time; from fivefold import process; "
LATE = "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start(); "
RANK = """
import gc
usual = gc.get_threshold()
from fivefold import process
process.begin()
assert gc.get_threshold() != usual
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local

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


def test_an_interrupt_of_what_is_done_at_exit_is_no_traceback() -> None:
    code = f"{LEAVES}import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "atexit.register(print, 'never'); "
    code += "atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); process.leave(130)"
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_reader_who_has_gone_is_no_error() -> None:
    code = f"{LEAVES}import os; sys.stdout.write('text'); os.close(1); process.leave(0)"
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_streams_that_are_closed_go_nowhere_and_no_file_takes_their_place() -> None:
    """Whichever of the three whoever starts the process has closed."""
    code = "import sys; from fivefold import process; process.own_streams(); "
    code += "print('out', flush=True); "
    code += "print('err', file=sys.stderr, flush=True); assert not sys.stdin.read(); "
    code += "process.leave(open('/dev/null').fileno())"
    for closed in range(1, 8):
        ends = "".join(f" {n}>&-" for n in range(3) if closed & 1 << n)
        words = ["sh", "-c", f'exec "$0" -c "$1"{ends}', sys.executable, code]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        said = "" if closed & 2 else "out\n", "" if closed & 4 else "err\n"
        assert done.returncode == 3 and (done.stdout, done.stderr) == said, (ends, done)


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
@pytest.mark.parametrize("unbuffered", [(), ("-u",)])
def test_an_output_that_cannot_be_written_is_named(unbuffered: tuple[str, ...]) -> None:
    code = "from fivefold.cli.main import program; program()"
    words = [sys.executable, *unbuffered, "-c", code, "help"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: disk full: cannot write /dev/full\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="has no /dev/full")
def test_an_error_that_nobody_can_read_is_still_told_by_the_status() -> None:
    code = "from fivefold.cli.main import program; program()"
    words = [sys.executable, "-c", code, "trian"]
    with open("/dev/full", "w") as full:
        assert subprocess.run(words, stderr=full, check=False).returncode == 2
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as gone:
        assert subprocess.run(words, stderr=gone, check=False).returncode == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_LOGS", "nonsense"),
        ("TORCH_LOGS", ""),
        ("TORCH_LOGS_OUT", "/dev/null/file"),
        ("TORCH_DISTRIBUTED_DEBUG", "loud"),
    ],
)
def test_a_variable_that_pytorch_refuses_is_named(name: str, value: str) -> None:
    code = "from fivefold.cli import main; "
    code += "main._dispatch = lambda words: __import__('torch.distributed'); "
    code += "main.program()"
    environment = {n: v for n, v in os.environ.items() if not n.startswith("TORCH_")}
    logs = {"TORCH_LOGS": "dynamo"} if name == "TORCH_LOGS_OUT" else {}
    words = [sys.executable, "-c", code]
    environment |= logs | {name: value}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: PyTorch cannot be imported in this environment\n")
    assert f"\n  {name}={quote(value)}\n" in done.stderr
    assert f"try:   unset {' '.join(sorted({name, *logs}))}\n" in done.stderr


@pytest.mark.slow
def test_ranks_look_for_garbage_as_usual_share_imports_and_finish_their_turn() -> None:
    done = run(RANK)
    assert done.returncode == 0, done.stderr
