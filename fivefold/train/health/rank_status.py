"""Asks ranks what they are doing, without collectives, to find the one that others wait for.

A thread on each rank sleeps on a key of the rendezvous store, at no cost, until another process
asks. It then looks twice at the rank's main thread and answers. That a rank does not answer also
tells something: it is stopped, gone or stuck in native code. Questions are numbered from 1, and
each is put to every rank that has registered; one that registers later answers the last of them.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Self

import psutil
import torch.distributed as dist

from fivefold.train.health.stack_sampler import RankStatus, StackSampler
from fivefold.train.ranks.fresh_store import answers_at, connected
from fivefold.train.ranks.rank_env import RankEnv

ANSWER_SECONDS = 1.5  # time in which every rank that can answer has answered, on a quiet machine
PATIENCE = 4  # factor for a busy machine
POLL_SECONDS = 0.1
FOR_EVER = timedelta(days=3650)
CONNECT_SECONDS = 5.0


@dataclass(frozen=True)
class Suspect:
    """The rank that the others wait for, the reason, its stack if it answered, and whether it moved
    between two looks, so that it is late rather than hung."""

    rank: int
    cause: str
    stack: str = ""
    moves: bool = False


class StatusResponder:
    """Answers for this process while its block runs; does nothing if there is one process only.

    Args:
        env: environment of this rank; its store may be started later.
    """

    def __init__(self, env: RankEnv) -> None:
        self._env, self._sampler = env, StackSampler(env.activity)
        self._thread: threading.Thread | None = None
        # Calls carry the name of who is called: what wakes this one to leave wakes no later one.
        self._name = uuid.uuid4().hex
        self._ended, self._question = False, 0

    def __enter__(self) -> Self:
        if self._env.launcher != "single":
            self._thread = threading.Thread(target=self._answer, name="rank status", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the thread: it would abort the process if it woke while the interpreter ends."""
        self._ended = True
        if self._thread is None or not self._thread.is_alive():
            return
        if (store := connect(self._env)) is not None:
            store.set(key("call", self._question, self._name), "")
            self._thread.join(CONNECT_SECONDS)

    def _answer(self) -> None:
        while not _hosted(self._env):
            if self._ended:
                return
            time.sleep(POLL_SECONDS)
        try:
            store = connected(self._env.master_addr, self._env.master_port, FOR_EVER)
            here = [socket.gethostname(), os.getpid(), self._name]
            store.set(key("process", self._env.rank), json.dumps(here))
            asked = store.add(key("questions"), 0)
            while True:
                if asked:
                    answer = json.dumps(asdict(self._sampler.sample()))
                    store.set(key("answer", asked, self._env.rank), answer)
                asked = self._question = asked + 1
                if not self._ended:  # else nobody could know which question wakes it
                    store.wait([key("call", asked, self._name)], FOR_EVER)
                if self._ended:
                    return
        except dist.DistError:  # the process that kept the store has gone: nobody is left to ask
            return


def key(kind: str, *names: int | str) -> str:
    """A key of the store, which torchrun keeps when it restarts ranks."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A host that comes or goes is no restart to torchrun's count, but another number of ranks.
        attempt += f" of {os.environ['WORLD_SIZE']}"
    return "/".join([f"rank status {attempt}", kind, *map(str, names)])


def connect(env: RankEnv) -> dist.TCPStore | None:
    """A connection to the store of a run; None if the store is gone."""
    if not _hosted(env):
        return None
    try:
        return connected(env.master_addr, env.master_port, timedelta(seconds=CONNECT_SECONDS))
    except dist.DistError:
        return None


def _hosted(env: RankEnv) -> bool:
    """Whether there is a store; asked first, because PyTorch prints its stack where it waits for
    one."""
    return env.launcher == "local" or answers_at(env.master_addr, env.master_port)


def ask_ranks(store: dist.Store, world_size: int) -> int:
    """Ask ranks for their activity; they answer within `ANSWER_SECONDS`, or not at all.

    Returns:
        The number of the question.
    """
    question = store.add(key("questions"), 1)
    for rank in range(world_size):
        if (registered := _registered(store, rank)) is not None:
            store.set(key("call", question, registered[2]), "")
    return question


def answers(store: dist.Store, ranks: Iterable[int], question: int) -> dict[int, RankStatus]:
    """The answers of ranks so far."""
    keys = {rank: key("answer", question, rank) for rank in ranks}
    return {r: RankStatus(**json.loads(store.get(k))) for r, k in keys.items() if store.check([k])}


def await_answers(
    store: dist.Store,
    processes: Mapping[int, int | None],
    question: int,
    pause: Callable[[float], object],
) -> dict[int, RankStatus]:
    """The answers of ranks, once all have answered or the missing ones will not.

    On a machine with more work than cores an answer takes seconds; to call such a rank unresponsive
    would hide the one that hangs. The wait is shorter for a rank that is stopped.

    Args:
        processes: process id of each rank; None for a process on another machine.
        pause: waits for so many seconds.
    """
    asked = time.monotonic()
    while True:
        given, waited = answers(store, processes, question), time.monotonic() - asked
        silent = [pid for rank, pid in processes.items() if rank not in given]
        patience = 1 if all(_state(pid) is not None for pid in silent) else PATIENCE
        if not silent or waited > patience * ANSWER_SECONDS:
            return given
        pause(POLL_SECONDS)


def process_of(store: dist.Store, rank: int) -> int | None:
    """The process id of a rank, if it has registered and is on this machine."""
    registered = _registered(store, rank)
    if registered is None or registered[0] != socket.gethostname():
        return None
    return registered[1]


def _registered(store: dist.Store, rank: int) -> tuple[str, int, str] | None:
    """Host, process id and name of whoever answers for a rank; None if nobody does yet."""
    if not store.check([key("process", rank)]):
        return None
    host, pid, name = json.loads(store.get(key("process", rank)))
    return host, pid, name


def find_suspect(
    processes: Mapping[int, int | None], given: Mapping[int, RankStatus]
) -> Suspect | None:
    """The rank that holds up the others; None if all of them wait.

    Args:
        processes: process id of each rank that has neither ended nor failed; None for a process
            on another machine.
        given: answers of the ranks.
    """
    found = []
    for rank, pid in sorted(processes.items()):
        answer, state = given.get(rank), _state(pid)
        if answer is None and state is not None:
            found.append((0, Suspect(rank, state)))
        elif answer is None:
            why = "does not answer: it hangs outside of Python, or its machine is gone"
            found.append((1, Suspect(rank, why)))
        elif not answer.waits:
            cause = f"{answer.state}, while others wait for it"
            suspect = Suspect(rank, cause, answer.stack, answer.moves)
            found.append((3 if answer.moves else 2, suspect))
    return min(found, key=lambda pair: (pair[0], pair[1].rank))[1] if found else None


def _state(pid: int | None) -> str | None:
    """The state of a process, as far as it explains why the process does not answer."""
    if pid is None:
        return None
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        status = psutil.STATUS_DEAD
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return "is stopped (by SIGSTOP, Ctrl-Z or a debugger), while others wait for it"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "left before the end, while others waited for it"
    return None
