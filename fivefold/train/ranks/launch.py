"""Starts ranks on this machine, watches them, and reports which one failed first, and why.

Forking a parent that has already imported torch starts eight ranks in a fraction of the seconds
that eight interpreters take. The parent must therefore stay clean: no CUDA context, no backward
pass and no thread of its own before `launch_local`.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from fivefold import process
from fivefold.errors import ConfigError, Mistake, RanksFailed
from fivefold.mesh.shared_gpu import Pause, share_gpu
from fivefold.train.health.roll_call import Answer, answers, call, find_suspect
from fivefold.train.machine.cpu_environment import finish_before_others, keep_freed_memory
from fivefold.train.machine.cuda_environment import (
    let_segments_grow,
    make_deterministic,
    set_defaults,
)
from fivefold.train.machine.devices import sees_own_gpu_only
from fivefold.train.ranks import failures
from fivefold.train.ranks.children import (
    POLL_SECONDS,
    Child,
    Worker,
    fork,
    import_what_ranks_import,
    signal_all,
    terminate,
)
from fivefold.train.ranks.failures import Failure
from fivefold.train.ranks.fresh_store import fresh_store, keeps_store
from fivefold.train.ranks.meeting import check_interfaces, meet
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.ranks.rejoin import Generations, Orders
from fivefold.train.ranks.signals import StopRequest, passed_on

SETTLE_SECONDS = 0.3  # to wait for the report of a rank that failed a moment earlier
SEARCH_SECONDS = 3.0  # to wait for the end of a rank that others lost: it frees its memory first


@dataclass(frozen=True)
class End:
    """How ranks ended.

    Attributes:
        status: exit status for the shell: 0 if every rank returned 0 or None; that of the error;
            128 + signal if killed; else 1 or what the worker returned.
        place: the rank that failed first, with its coordinates; empty if none failed by itself.
        why: the first line of its failure.
        signum: signal that asked the run to stop; None if none did.
        rank: that rank; None if none failed by itself.
        of_settings: as in `Failure`.
    """

    status: int
    place: str = ""
    why: str = ""
    signum: int | None = None
    rank: int | None = None
    of_settings: bool = False

    @property
    def stopped(self) -> bool:
        """Whether a signal asked the run to stop."""
        return self.signum is not None

    def raise_if_failed(self, what: str) -> None:
        """Raise an error if a rank failed, which has printed why.

        Raises:
            RanksFailed: with the message `what`.
            SystemExit: nothing failed, but a signal asked to stop.
        """
        if self.signum is not None:
            raise SystemExit(self.status or 128 + self.signum)
        if self.status:
            raise RanksFailed(what, self.status)


def launch_local(worker: Worker, nproc: int) -> int:
    """Run `worker(rank_env)` as `run_ranks` does, and return the exit status for the shell."""
    return run_ranks(worker, nproc).status


def run_ranks(
    worker: Worker,
    nproc: int,
    *,
    describe: Callable[[int], str] | None = None,
    errors_folder: Path | None = None,
    threads: int | None = None,
    revive: Callable[[End], tuple[Orders | None, str]] | None = None,
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
        revive: how the ranks would end -> what the living ones and new ones do together, as
            `rejoin.keep_on` does it, or None if they end, and a line that says so; None: they end.
    """
    assert not torch.cuda.is_initialized(), "CUDA does not survive a fork"
    import_what_ranks_import()
    # The port is bound before and the server starts after the first fork, so that ranks that
    # connect early wait in the backlog.
    with closing(socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * nproc))) as listener:
        port = listener.getsockname()[1]
        ranks: list[Child] = []

        def start(rank: int, generation: int) -> Child:
            env = RankEnv(rank, rank, nproc, nproc, "127.0.0.1", port, "local", generation)
            return fork(worker, env, errors_folder, threads)

        cause: tuple[int, Failure] | None = None
        told = ""
        with StopRequest() as stop:
            ranks += [start(rank, 0) for rank in range(nproc)]
            try:
                store = dist.TCPStore(
                    "127.0.0.1",
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),
                )
                generations = Generations(store, nproc)
                cause = _watch(ranks, stop, store, errors_folder, generations if revive else None)
                while cause is not None and revive is not None:
                    end = _end(cause, describe, stop)
                    orders, told = revive(end)
                    if orders is None:
                        break
                    failures.explain(cause[1], end.place, nproc, goes_on=True)
                    print(told, file=sys.stderr, flush=True)
                    if cause[0] not in generations.waiting:  # it may be stopped, or hang
                        terminate([ranks[cause[0]]], at_once=True)
                    _replace(ranks, generations, orders, start)
                    cause = _watch(ranks, stop, store, errors_folder, generations)
            except KeyboardInterrupt:  # a second Ctrl-C
                cause = None
            finally:
                terminate(ranks)
            del store  # the ranks needed it until here
    if cause is None:
        status = 128 + (stop.signum or 0) if any(r.failure for r in ranks) else 0
        return End(status, signum=stop.signum)
    end = _end(cause, describe, stop)
    failures.explain(cause[1], end.place, nproc)
    if told:
        print(told, file=sys.stderr, flush=True)
    return end


def _end(
    cause: tuple[int, Failure], describe: Callable[[int], str] | None, stop: StopRequest
) -> End:
    rank, failure = cause
    why = failure.cause.splitlines()[0]
    return End(
        failure.status,
        place_name(rank, describe),
        why,
        signum=stop.signum,
        rank=rank,
        of_settings=failure.of_settings,
    )


def _replace(
    ranks: list[Child], generations: Generations, orders: Orders, start: Callable[[int, int], Child]
) -> None:
    """Start new ranks for those that died or do not let go, and have all of them go on."""

    def living() -> set[int]:
        for rank in ranks:
            if rank.running:
                rank.poll(stopping=False)
        return {rank.rank for rank in ranks if rank.running}

    late = generations.await_let_go(living)
    terminate([ranks[rank] for rank in late], at_once=True)
    for number, rank in enumerate(ranks):
        if not rank.running:
            ranks[number] = start(number, generations.latest + 1)
    generations.begin(orders)


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
        PlaceError: ranks cannot meet.
    """
    process.work()
    if deterministic:
        make_deterministic()
    device = torch.device("cpu")
    backend = "gloo"
    if device_type == "cuda":
        set_defaults()
        device = _bind_gpu(env, shared)
        if not torch.cuda.memory_reserved(device):  # not again, for a new generation
            let_segments_grow(device)
        backend = share_gpu(device, pause) if shared else "cpu:gloo,cuda:nccl"
    else:
        keep_freed_memory()
        finish_before_others()
    timeout = timedelta(seconds=timeout_seconds)
    check_interfaces()
    dist.init_process_group(
        backend,
        timeout=timeout,
        rank=env.rank,
        world_size=env.world_size,
        store=_store(env, timeout),
        device_id=device if device.type == "cuda" and not shared else None,
    )
    if shared:  # torch takes a back end for its own only by a name in capitals
        dist.distributed_c10d._get_default_group()._set_default_backend(
            dist.ProcessGroup.BackendType.GLOO
        )
    return device


def _store(env: RankEnv, timeout: timedelta) -> dist.Store:
    """The store in which ranks find each other."""
    match env.launcher:
        case "single":
            return dist.HashStore()
        case "local":
            place = env.master_addr, env.master_port
            store = dist.TCPStore(*place, is_master=False, timeout=timeout)
            return dist.PrefixStore(f"generation {env.generation}", store)
        case "torchrun" if keeps_store():
            return fresh_store(env, timeout)
    return meet(env, timeout)


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


def place_name(rank: int, describe: Callable[[int], str] | None) -> str:
    """The name of a rank, with its coordinates if `describe` is given."""
    return f"rank {rank}" + (f" {describe(rank)}" if describe else "")


def _watch(
    ranks: list[Child],
    stop: StopRequest,
    store: dist.Store,
    errors_folder: Path | None,
    generations: Generations | None,
) -> tuple[int, Failure] | None:
    """Wait until every rank has ended or one has failed; return the first failure and its rank.

    The failure of a rank that lost a connection, or that was told to end, counts only if there is
    no other failure and the run was not asked to stop.
    """
    forwarded = False
    deadline, question = None, 0
    waiting: set[int] = set()
    while any(r.running for r in ranks):
        for rank in ranks:
            if rank.running:
                rank.poll(stopping=forwarded)
        failed = [r for r in ranks if r.failure]
        if generations is not None:
            waiting = generations.waiting
        if (failed or waiting) and deadline is None:
            deadline = time.monotonic() + SEARCH_SECONDS
            question = call(store, len(ranks))
        if any(r.failure and not r.failure.consequence for r in failed):
            deadline = min(deadline or 0.0, time.monotonic() + SETTLE_SECONDS)
        if deadline is not None and time.monotonic() > deadline:
            break
        if stop.signum and not forwarded:
            forwarded = True
            signal_all(ranks, passed_on(stop.signum))
        time.sleep(POLL_SECONDS)
    found = [(r.rank, r.failure) for r in ranks if r.failure]
    if forwarded:
        found = [(rank, failure) for rank, failure in found if not failure.consequence]
    given = answers(store, [r.rank for r in ranks], question) if question else {}
    if not found and waiting and any(r.running for r in ranks):
        lost = "lost the connection to another rank"
        found = [(min(waiting), Failure(lost, time.monotonic(), consequence=True))]
    if not found:
        return None
    first = min(found, key=lambda pair: (pair[1].consequence, pair[1].when, pair[0]))
    if not first[1].consequence:
        return first
    needed = [r for r in ranks if r.rank not in waiting]
    return _behind(first, needed, given, errors_folder)


def _behind(
    symptom: tuple[int, Failure],
    ranks: Sequence[Child],
    given: Mapping[int, Answer],
    errors_folder: Path | None,
) -> tuple[int, Failure]:
    """The rank that caused a lost connection: it exited too early, or keeps others waiting.

    If there is none, the symptom with the place where each rank waited.

    Args:
        symptom: the rank that lost its connection, and how that failed.
        ranks: those that do not wait for the next generation.
        given: what ranks have answered.
        errors_folder: where the traceback of the rank is written; None: nowhere.
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
