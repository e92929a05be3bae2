"""The ranks that this process has forked: it starts and watches them, and replaces those that died.

The parent must stay clean: no CUDA context, no backward pass and no thread of its own before the
ranks are forked.
"""

import socket
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from fivefold.train.health.rank_status import RankStatus, answers, ask_ranks, find_suspect
from fivefold.train.ranks import failures
from fivefold.train.ranks.children import (
    POLL_SECONDS,
    Child,
    Worker,
    fork,
    signal_all,
    terminate,
)
from fivefold.train.ranks.failures import Failure
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.train.ranks.rejoin import Generations, Orders
from fivefold.train.ranks.signals import StopRequest, passed_on

HERE = "127.0.0.1"
SETTLE_SECONDS = 0.3  # wait for the report of a rank that failed a moment earlier
SEARCH_SECONDS = 3.0  # wait for the end of a rank that others lost: it frees its memory first


class LocalRanks:
    """Ranks on this machine, and the store in which they meet.

    Args:
        worker: what each of them runs.
        size: number of ranks.
        stop: signals that this process gets; it passes the first one on.
        goes_on: whether ranks that lose another one wait for orders, as `rejoin.keep_on` does.
        errors_folder: where their tracebacks are written; None: nowhere.
        threads: threads of each; None: its share of the cores.
    """

    def __init__(
        self,
        worker: Worker,
        size: int,
        stop: StopRequest,
        *,
        goes_on: bool,
        errors_folder: Path | None,
        threads: int | None,
    ) -> None:
        self._worker, self._size, self._stop = worker, size, stop
        self._goes_on, self._errors_folder, self._threads = goes_on, errors_folder, threads
        self._ranks: list[Child] = []
        self._port = 0
        self._store: dist.Store
        self._generations: Generations

    @property
    def failed(self) -> bool:
        """Whether a rank has failed, even if only because it was told to end."""
        return any(rank.failure for rank in self._ranks)

    def start(self) -> None:
        """Fork the ranks, then serve their store.

        The port is bound first, so that ranks that connect early wait in the backlog.
        """
        with socket.create_server((HERE, 0), backlog=max(128, 2 * self._size)) as listener:
            self._port = listener.getsockname()[1]
            for rank in range(self._size):
                self._ranks.append(self._fork(rank, 0))
            self._store = dist.TCPStore(
                HERE,
                self._port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self._generations = Generations(self._store, self._size)

    def _fork(self, rank: int, generation: int) -> Child:
        size = self._size
        env = RankEnv(rank, rank, size, size, HERE, self._port, "local", generation)
        return fork(self._worker, env, self._errors_folder, self._threads)

    def end(self) -> None:
        """Stop the ranks that still run."""
        terminate(self._ranks)

    def go_on(self, failed: int, orders: Orders) -> None:
        """Start new ranks for those that died or do not let go, and let all ranks continue.

        Args:
            failed: the rank that failed first.
            orders: what they do next.
        """
        if failed not in self._generations.waiting:  # it may be stopped, or hang
            terminate([self._ranks[failed]], at_once=True)
        late = self._generations.await_let_go(self._living)
        terminate([self._ranks[rank] for rank in late], at_once=True)
        for number, rank in enumerate(self._ranks):
            if not rank.running:
                self._ranks[number] = self._fork(number, self._generations.latest + 1)
        self._generations.begin(orders)

    def _living(self) -> set[int]:
        self._poll(stopping=False)
        return {rank.rank for rank in self._ranks if rank.running}

    def _poll(self, *, stopping: bool) -> None:
        for rank in self._ranks:
            if rank.running:
                rank.poll(stopping)

    def watch(self) -> tuple[int, Failure] | None:
        """Wait until every rank has ended or one has failed; return the first that did, and how.

        The failure of a rank that lost a connection, or that was told to end, counts only if there
        is no other failure and the run was not asked to stop.
        """
        forwarded = False
        deadline, question = None, 0
        waiting: set[int] = set()
        while any(r.running for r in self._ranks):
            self._poll(stopping=forwarded)
            failed = [r for r in self._ranks if r.failure]
            if self._goes_on:
                waiting = self._generations.waiting
            if (failed or waiting) and deadline is None:
                deadline = time.monotonic() + SEARCH_SECONDS
                question = ask_ranks(self._store, self._size)
            if any(r.failure and not r.failure.consequence for r in failed):
                deadline = min(deadline or 0.0, time.monotonic() + SETTLE_SECONDS)
            if deadline is not None and time.monotonic() > deadline:
                break
            if self._stop.signum and not forwarded:
                forwarded = True
                signal_all(self._ranks, passed_on(self._stop.signum))
            time.sleep(POLL_SECONDS)
        found = [(r.rank, r.failure) for r in self._ranks if r.failure]
        if forwarded:
            found = [(rank, failure) for rank, failure in found if not failure.consequence]
        ranks = [r.rank for r in self._ranks]
        given = answers(self._store, ranks, question) if question else {}
        if not found and waiting and any(r.running for r in self._ranks):
            lost = "lost the connection to another rank"
            found = [(min(waiting), Failure(lost, time.monotonic(), consequence=True))]
        if not found:
            return None
        first = min(found, key=lambda pair: (pair[1].consequence, pair[1].when, pair[0]))
        if not first[1].consequence:
            return first
        return self._behind(first, [r for r in self._ranks if r.rank not in waiting], given)

    def _behind(
        self, symptom: tuple[int, Failure], needed: list[Child], given: Mapping[int, RankStatus]
    ) -> tuple[int, Failure]:
        """The rank that caused a lost connection: it exited too early, or keeps others waiting.

        If there is none, the symptom with the place where each rank waited.

        Args:
            symptom: the rank that lost its connection, and how that failed.
            needed: the ranks that do not wait for the next generation.
            given: what ranks have answered.
        """
        rank, noticed = symptom
        gone = [(r.done, r.rank) for r in needed if r.done is not None]
        if gone and not noticed.timed_out:
            when, early = min(gone)
            cause = "left with status 0, while others still needed it"
            return early, Failure(cause, when, details=failures.noticed(symptom))
        running = {r.rank: r.pid for r in needed if r.running}
        if (suspect := find_suspect(running, given)) is not None:
            return suspect.rank, failures.suspected(suspect, symptom, self._errors_folder)
        places = {r.rank: r.failure.place for r in needed if r.failure}
        places |= {rank: given[rank].place for rank in running}
        return rank, failures.disagreeing(noticed, places)
