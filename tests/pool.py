"""Processes with a gloo group, kept alive between tests, so that a distributed test takes
milliseconds.

`run(world_size, fn, *args)` calls `fn(rank, world_size, *args)` on every rank and returns the
results by rank. `fn` must be at the top level of its module; arguments and results are pickled.
Each call starts with seed 0 and default dtype float32. If a rank fails or time runs out, `run`
raises with that rank's traceback and the next call gets fresh processes.
"""

import atexit
import contextlib
import functools
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, Pipe, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from fivefold.mesh.groups import lost_connection
from fivefold.process import die_with_parent
from fivefold.train.machine.cpu_environment import finish_before_others
from fivefold.train.ranks.children import import_what_ranks_import

REPORT_SECONDS = 1.0  # for the other ranks' reports after the first failure
MOST_THREADS = 100
"""Threads of a rank with which it begins no further call: each of gloo's groups has three, one of
which wakes a hundred times a second, so that ranks with hundreds of groups do little else."""


class RankError(Exception):
    """A rank raised, died or took too long."""


class Pool:
    """Groups of 1, 2, 4, 8 ... ranks, each started at its first use.

    They are forked from a helper, itself forked before the first test runs: a process that has
    run a backward pass or touched a GPU cannot be forked any more.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fivefold-pool-")
        self._listener = Listener(str(Path(self._folder.name) / "pool"), backlog=64)
        self._orders, orders_in = Pipe()
        self._groups: dict[int, dict[int, tuple[Connection, int]]] = {}
        self._started = 0
        parent = os.getpid()
        if os.fork() == 0:
            self._orders.close()
            _child(parent, _fork_on_order, orders_in, self._listener.address)
        orders_in.close()

    def run(
        self, world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0
    ) -> list[Any]:
        """`fn(rank, world_size, *args)` of every rank; raises RankError if one fails."""
        __tracebackhide__ = True
        group = self._groups.get(world_size) or self._start(world_size)
        order = pickle.dumps((fn, args))
        try:
            for connection, pid in group.values():
                os.kill(pid, signal.SIGCONT)
                connection.send_bytes(order)
            results = _collect(group, time.monotonic() + timeout)
            if max(psutil.Process(pid).num_threads() for _, pid in group.values()) > MOST_THREADS:
                self._kill(world_size)
            else:  # those threads wake where no group is used, too
                for _, pid in group.values():
                    os.kill(pid, signal.SIGSTOP)
            return results
        except BaseException:
            self._kill(world_size)
            raise

    def close(self) -> None:
        """Stop every process."""
        for world_size in list(self._groups):
            self._kill(world_size)
        self._orders.close()
        self._listener.close()
        self._folder.cleanup()

    def _start(self, world_size: int) -> dict[int, tuple[Connection, int]]:
        self._started += 1
        self._orders.send((world_size, f"{self._folder.name}/store-{self._started}"))
        group = {}
        for _ in range(world_size):
            connection = self._listener.accept()
            rank, pid = connection.recv()
            group[rank] = (connection, pid)
        self._groups[world_size] = dict(sorted(group.items()))
        return self._groups[world_size]

    def _kill(self, world_size: int) -> None:
        for connection, pid in self._groups.pop(world_size).values():
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _collect(group: dict[int, tuple[Connection, int]], deadline: float) -> list[Any]:
    """The result of each rank, or the error of the one that failed first."""
    __tracebackhide__ = True
    ranks = {connection: rank for rank, (connection, _) in group.items()}
    results: dict[int, Any] = {}
    errors: list[tuple[bool, int, str]] = []
    while ranks:
        ready = wait(list(ranks), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = ranks.pop(connection)
            try:
                ok, value = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                ok, value = False, (False, "the process died")
            if ok:
                results[rank] = value
            else:
                consequence, text = value
                errors.append((consequence, len(errors), f"rank {rank} of {len(group)}: {text}"))
                deadline = min(deadline, time.monotonic() + REPORT_SECONDS)
    if errors:
        raise RankError(min(errors)[-1])
    if ranks:
        raise RankError(f"no answer from ranks {sorted(ranks.values())} of {len(group)}")
    return [results[rank] for rank in range(len(group))]


def _child(parent: int, body: Callable[..., None], *args: Any) -> None:
    """Become `body(*args)` and never return into pytest."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        body(*args)
    except EOFError:  # the other end is gone: nothing more to do
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _fork_on_order(orders: Connection, address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
    helper = os.getpid()
    while True:
        world_size, store = orders.recv()
        import_what_ranks_import()
        for rank in range(world_size):
            if os.fork() == 0:
                orders.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _child(helper, _serve, rank, world_size, address, store)


def _serve(rank: int, world_size: int, address: str, store: str) -> None:
    torch.set_num_threads(1)
    finish_before_others()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    connection = Client(address)
    connection.send((rank, os.getpid()))
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    while True:
        order = connection.recv_bytes()
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float32)
        try:
            fn, args = pickle.loads(order)
            answer = pickle.dumps((True, fn(rank, world_size, *args)))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            answer = pickle.dumps((False, (lost_connection(error), text)))
        sys.stdout.flush()
        connection.send_bytes(answer)


@functools.cache
def shared_pool() -> Pool:
    """The pool of this test session."""
    pool = Pool()
    atexit.register(pool.close)
    return pool


def run(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
    """`Pool.run` on the pool of this session."""
    __tracebackhide__ = True
    return shared_pool().run(world_size, fn, *args, timeout=timeout)
