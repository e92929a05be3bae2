"""Starts ranks on this machine, watches them, and reports which one failed first, and why.

Forking a parent that has already imported torch starts eight ranks in a fraction of the seconds
that eight interpreters take. The parent must therefore stay clean: no CUDA context, no backward
pass and no thread of its own before `launch_local`.
"""

import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold.errors import ConfigError, Mistake
from fivefold.mesh.shared_gpu import Pause, share_gpu
from fivefold.train import failures
from fivefold.train.cuda_environment import let_segments_grow, make_deterministic, set_defaults
from fivefold.train.devices import sees_own_gpu_only
from fivefold.train.failures import Failure
from fivefold.train.fresh_store import fresh_store, keeps_store
from fivefold.train.heap import keep_freed_memory
from fivefold.train.rank_env import RankEnv
from fivefold.train.roll_call import Answer, RollCall, answers, call, find_suspect
from fivefold.train.signals import STOP_SIGNALS, StopRequest, passed_on

Worker = Callable[[RankEnv], int | None]

POLL_SECONDS = 0.02
SETTLE_SECONDS = 0.3  # to wait for the report of a rank that failed a moment earlier
SEARCH_SECONDS = 3.0  # to wait for the end of a rank that others lost: it frees its memory first
GRACE_SECONDS = 2.0  # between SIGTERM and SIGKILL
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DONE = b"done"  # the report of a rank whose work is done


@dataclass
class _Child:
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
        """Check whether the process has ended; `stopping` says whether it was told to."""
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


@dataclass(frozen=True)
class End:
    """How ranks ended.

    Attributes:
        status: exit status for the shell: 0 if every rank returned 0 or None; 2 after a
            ConfigError; 128 + signal if killed; else 1 or what the worker returned.
        place: the rank that failed first, with its coordinates; empty if none failed by itself.
        why: the first line of its failure.
        stopped: whether a signal asked the run to stop.
    """

    status: int
    place: str = ""
    why: str = ""
    stopped: bool = False


def launch_local(
    worker: Worker, nproc: int, *, describe: Callable[[int], str] | None = None
) -> int:
    """Run `worker(rank_env)` as `run_ranks` does, and return the exit status for the shell."""
    return run_ranks(worker, nproc, describe=describe).status


def run_ranks(
    worker: Worker,
    nproc: int,
    *,
    describe: Callable[[int], str] | None = None,
    errors_folder: Path | None = None,
    threads: int | None = None,
) -> End:
    """Run `worker(rank_env)` in `nproc` forked processes.

    Each rank has torchrun's environment variables, and ends when the parent ends, however it ends.
    When a rank fails, the first cause is printed to stderr with the rank's coordinates and the
    others are stopped. The first SIGINT, SIGTERM or SIGUSR1 is passed to every rank once; a second
    Ctrl-C ends them.

    Args:
        worker: called in each child; what it returns is the child's exit status (None = 0).
        describe: rank -> its coordinates, such as "PP(1) DP(0) CP(0) TP(1)".
        errors_folder: where `rank-N.txt` with the full traceback of rank N is written. If None,
            the traceback of the first cause is printed.
        threads: threads of each rank, unless OMP_NUM_THREADS says otherwise; None: its share of the
            cores.
    """
    assert not torch.cuda.is_initialized(), "CUDA does not survive a fork"
    # The port is bound before and the server starts after the fork: no thread is ever forked, and
    # ranks that connect early wait in the backlog.
    with closing(socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * nproc))) as listener:
        port = listener.getsockname()[1]
        ranks: list[_Child] = []
        with StopRequest() as stop:
            for rank in range(nproc):
                env = RankEnv(rank, rank, nproc, nproc, "127.0.0.1", port, "local")
                ranks.append(_fork(worker, env, errors_folder, threads))
            try:
                store = dist.TCPStore(
                    "127.0.0.1",
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
                cause = _watch(ranks, stop, store, errors_folder)
            except KeyboardInterrupt:  # a second Ctrl-C
                cause = None
            finally:
                _terminate(ranks)
            del store  # the ranks needed it until here
    if cause is None:
        status = 128 + (stop.signum or 0) if any(r.failure for r in ranks) else 0
        return End(status, stopped=stop.signum is not None)
    rank, failure = cause
    place = place_name(rank, describe)
    failures.explain(failure, place, nproc)
    why = failure.cause.splitlines()[0]
    return End(failure.status, place, why, stopped=stop.signum is not None)


def init_process_group(
    env: RankEnv,
    device_type: str,
    *,
    shared: bool = False,
    timeout_seconds: float = 600.0,
    deterministic: bool = False,
    pause: Pause | None = None,
) -> torch.device:
    """Join the default process group; the same under torchrun, srun, `launch_local` and alone.

    Args:
        device_type: "cpu" (gloo), or "cuda" (NCCL, with gloo for CPU tensors).
        shared: whether the ranks of this machine share its GPUs, in turn; they send through the
            host.
        timeout_seconds: how long a collective may wait before the run counts as hung.
        deterministic: whether this process is to give the same bits every time.
        pause: called before each copy of ranks that share GPUs, in its stream, which it may hold up
            for a test.

    Returns:
        The device of this rank, made current if it is a GPU.

    Raises:
        ConfigError: this machine has fewer GPUs than ranks.
    """
    if deterministic:
        make_deterministic()
    device = torch.device("cpu")
    backend = "gloo"
    if device_type == "cuda":
        set_defaults()
        device = _bind_gpu(env, shared)
        let_segments_grow(device)
        backend = share_gpu(device, pause) if shared else "cpu:gloo,cuda:nccl"
    else:
        keep_freed_memory()
    timeout = timedelta(seconds=timeout_seconds)
    rendezvous: dict[str, Any] = {"rank": env.rank, "world_size": env.world_size}
    match env.launcher:
        case "single":
            rendezvous["store"] = dist.HashStore()
        case "local":
            rendezvous["store"] = dist.TCPStore(
                env.master_addr, env.master_port, is_master=False, timeout=timeout
            )
        case "torchrun" if keeps_store():
            rendezvous["store"] = fresh_store(env, timeout)
        case "torchrun":
            rendezvous["init_method"] = "env://"
        case "slurm":
            rendezvous["init_method"] = f"tcp://{env.master_addr}:{env.master_port}"
    dist.init_process_group(
        backend,
        timeout=timeout,
        device_id=device if device.type == "cuda" and not shared else None,
        **rendezvous,
    )
    if shared:  # torch takes a back end for its own only by a name in capitals
        dist.distributed_c10d._get_default_group()._set_default_backend(
            dist.ProcessGroup.BackendType.GLOO
        )
    return device


def _bind_gpu(env: RankEnv, shared: bool) -> torch.device:
    count = torch.cuda.device_count()
    index = 0 if sees_own_gpu_only(env, count) else env.local_rank
    if shared and count:
        index %= count
    if index >= count:
        raise ConfigError(
            Mistake(
                f"{env.local_world_size} ranks on this machine, but {count} visible GPUs",
                (f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '(not set)')}",),
                attempt="one rank a GPU, or train on the CPU",
            )
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which forked it, ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)


def place_name(rank: int, describe: Callable[[int], str] | None) -> str:
    """The name of a rank, with its coordinates if `describe` is given."""
    return f"rank {rank}" + (f" {describe(rank)}" if describe else "")


def _fork(worker: Worker, env: RankEnv, errors_folder: Path | None, threads: int | None) -> _Child:
    sys.stdout.flush()
    sys.stderr.flush()
    reports_in, reports_out = os.pipe()
    parent = os.getpid()
    # Signals wait until the child has its own handlers: the inherited ones would swallow them.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _become_rank(env, parent, threads)
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            status = _run_worker(worker, env, reports_out, errors_folder)
        finally:
            # Not sys.exit: the frames and exit handlers of the parent must not run here.
            os._exit(status)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    os.close(reports_out)
    os.set_blocking(reports_in, False)
    return _Child(env.rank, pid, reports_in)


def _become_rank(env: RankEnv, parent: int, threads: int | None) -> None:
    die_with_parent(parent)
    # A terminal sends Ctrl-C to the whole process group; only the parent answers, with another.
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(file=2)
    os.environ.update(env.variables)
    # Gloo would look the host's name up, which fails on many laptops.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if "OMP_NUM_THREADS" not in os.environ:  # as with torchrun, what the user set is per rank
        threads = threads or max(1, torch.get_num_threads() // env.world_size)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)


def _run_worker(worker: Worker, env: RankEnv, reports: int, errors_folder: Path | None) -> int:
    try:
        with RollCall(env):
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


def _watch(
    ranks: list[_Child], stop: StopRequest, store: dist.Store, errors_folder: Path | None
) -> tuple[int, Failure] | None:
    """Wait until every rank has ended or one has failed; return the first failure and its rank.

    The failure of a rank that lost a connection, or that was told to end, counts only if there is
    no other failure and the run was not asked to stop.
    """
    forwarded = False
    deadline, question = None, 0
    while any(r.running for r in ranks):
        for rank in ranks:
            if rank.running:
                rank.poll(stopping=forwarded)
        failed = [r for r in ranks if r.failure]
        if failed and deadline is None:
            deadline = time.monotonic() + SEARCH_SECONDS
            question = call(store, len(ranks))
        if any(r.failure and not r.failure.consequence for r in failed):
            deadline = min(deadline or 0.0, time.monotonic() + SETTLE_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            break
        if stop.signum and not forwarded:
            forwarded = True
            _signal_all(ranks, passed_on(stop.signum))
        time.sleep(POLL_SECONDS)
    found = [(r.rank, r.failure) for r in ranks if r.failure]
    if forwarded:
        found = [(rank, failure) for rank, failure in found if not failure.consequence]
    if not found:
        return None
    first = min(found, key=lambda pair: (pair[1].consequence, pair[1].when, pair[0]))
    if not first[1].consequence:
        return first
    given = answers(store, [r.rank for r in ranks], question)
    return _behind(first, ranks, given, errors_folder)


def _behind(
    symptom: tuple[int, Failure],
    ranks: Sequence[_Child],
    given: Mapping[int, Answer],
    errors_folder: Path | None,
) -> tuple[int, Failure]:
    """The rank that caused a lost connection: it exited too early, or keeps others waiting.

    If there is none, the symptom with the place where each rank waited.
    """
    rank, noticed = symptom
    gone = [(r.done, r.rank) for r in ranks if r.done is not None]
    if gone and not noticed.timed_out:
        when, early = min(gone)
        cause = "left with status 0, while others still needed it"
        return early, Failure(cause, when, details=failures.noticed(symptom))
    running = {r.rank: r.pid for r in ranks if r.running}
    if (suspect := find_suspect(running, given)) is not None:
        return suspect.rank, failures.suspected(suspect, symptom, errors_folder)
    places = {r.rank: r.failure.place for r in ranks if r.failure}
    places |= {rank: given[rank].place for rank in running}
    return rank, failures.disagreeing(noticed, places)


def _signal_all(ranks: list[_Child], signum: int) -> None:
    for rank in ranks:
        if rank.running:
            os.kill(rank.pid, signum)


def _terminate(ranks: list[_Child]) -> None:
    """Stop the ranks that still run: SIGTERM, then SIGKILL."""
    _signal_all(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(r.running for r in ranks):
        if time.monotonic() > deadline:
            _signal_all(ranks, signal.SIGKILL)
        for rank in ranks:
            if rank.running:
                rank.poll(stopping=True)
        time.sleep(POLL_SECONDS)
