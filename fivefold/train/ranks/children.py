"""Processes forked from this one, each of which runs a rank and reports how that ended."""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold.errors import FivefoldError
from fivefold.files import telling_system_errors
from fivefold.process import die_with_parent
from fivefold.train.health.rank_status import StatusResponder
from fivefold.train.machine.threads import said_in
from fivefold.train.ranks import failures
from fivefold.train.ranks.failures import Failure
from fivefold.train.ranks.meeting import INTERFACES
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.ranks.signals import STOP_SIGNALS, held_back

Worker = Callable[[RankEnv], int | None]

POLL_SECONDS = 0.02
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
DONE = b"done"  # reports that a rank's work is done


@dataclass
class Child:
    """A child process and the pipe on which it reports how it ended.

    Attributes:
        failure: the reason for which it failed; None if it did not.
        done: time at which its work was done, in seconds on the system's monotonic clock.
    """

    rank: int
    pid: int
    reports: int
    failure: Failure | None = None
    done: float | None = None
    running: bool = True

    def poll(self, stopping: bool) -> None:
        """Check whether the process has ended; `stopping` says whether it was told to end."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return
        self.running = False
        with open(self.reports, "rb", buffering=0) as pipe:
            report = pipe.read()  # None if nothing came but a helper of the rank holds the pipe
        code = os.waitstatus_to_exitcode(status)
        if report == DONE and code == 0:
            self.done = time.monotonic()
        elif report and report != DONE:
            self.failure = Failure(**json.loads(report))
        elif code < 0:
            self.failure = failures.killed(-code, stopping)
        else:
            self.failure = failures.left(code)


def leave_signals_to_parent(parent: int) -> None:
    """Follow process `parent`, which forked this one while signals were `held_back`: end when it
    ends, and heed only its signals, since a terminal sends Ctrl-C to the whole process group."""
    die_with_parent(parent)
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def import_what_ranks_import() -> None:
    """Import, before forking, what every rank would import afterwards.

    The first DTensor or optimizer of a process has PyTorch import its compiler, used or not: a
    second of CPU time for each rank.
    """
    import_module("torch._dynamo")


def fork(worker: Worker, env: RankEnv, errors_folder: Path | None, threads: int | None) -> Child:
    """Run a rank in a new process."""
    sys.stdout.flush()
    sys.stderr.flush()
    reports_in, reports_out = os.pipe()
    parent = os.getpid()
    # Do not collect the parent's garbage in the child, where it may wait for threads that are gone;
    # Python's own fork hooks could do so before the child freezes it.
    collects = gc.isenabled()
    with held_back():
        gc.disable()
        pid = os.fork()
        if pid == 0:
            gc.freeze()
        if collects:
            gc.enable()
        if pid == 0:
            status = 1
            try:
                _become_rank(env, parent, threads)
                status = _run_worker(worker, env, reports_out, errors_folder)
            finally:
                # Not sys.exit: the frames and exit handlers of the parent must not run here.
                os._exit(status)
    os.close(reports_out)
    os.set_blocking(reports_in, False)
    return Child(env.rank, pid, reports_in)


def _become_rank(env: RankEnv, parent: int, threads: int | None) -> None:
    leave_signals_to_parent(parent)
    faulthandler.enable(file=2)
    os.environ.update(env.variables)
    # Gloo would look the host's name up, which fails on many laptops.
    os.environ.setdefault(INTERFACES, "lo" if sys.platform == "linux" else "lo0")
    if said_in(os.environ):  # as under torchrun, a user's value is per rank
        threads = torch.get_num_threads()
    threads = threads or max(1, torch.get_num_threads() // env.world_size)
    if said_in(os.environ) != "OMP_NUM_THREADS":
        os.environ["OMP_NUM_THREADS"] = str(threads)
    # Even to what it is: this replaces the pool of threads that a fork leaves broken. Autograd's
    # threads, one for each GPU, would do so at the same time, and one would find none.
    torch.set_num_threads(threads)


def _run_worker(worker: Worker, env: RankEnv, reports: int, errors_folder: Path | None) -> int:
    try:
        with StatusResponder(env), telling_system_errors(FivefoldError):
            status = worker(env) or 0
        if dist.is_initialized():
            dist.destroy_process_group()
        report = DONE
    except BaseException as error:
        failure = failures.raised(error, env.rank, errors_folder)
        report = json.dumps(asdict(failure), ensure_ascii=False).encode(errors="replace")
        status = failure.status
    os.write(reports, report)
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def signal_all(ranks: list[Child], signum: int) -> None:
    """Send a signal to the ranks that still run."""
    for rank in ranks:
        if rank.running:
            os.kill(rank.pid, signum)


def terminate(ranks: list[Child], *, at_once: bool = False) -> None:
    """Stop the ranks that still run: SIGTERM, then SIGKILL, or that at once."""
    signal_all(ranks, signal.SIGKILL if at_once else signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(r.running for r in ranks):
        if time.monotonic() > deadline:
            signal_all(ranks, signal.SIGKILL)
        for rank in ranks:
            if rank.running:
                rank.poll(stopping=True)
        time.sleep(POLL_SECONDS)
