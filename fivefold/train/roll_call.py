"""Asks ranks what they are doing, without collectives, to find the one that others wait for.

A thread on each rank sleeps on a key of the rendezvous store, at no cost, until another process
asks. It then looks twice at the rank's main thread and answers. That a rank does not answer also
tells something: it is stopped, gone or stuck in native code.
"""

import concurrent.futures.thread
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import psutil
import torch
import torch.distributed as dist

from fivefold.train.rank_env import RankEnv

LOOK_SECONDS = 0.5  # between two looks at a rank, to see whether it makes progress
ANSWER_SECONDS = 1.5  # time in which every rank that can answer has answered
FOR_EVER = timedelta(days=3650)
CONNECT_SECONDS = 5.0
PLACES = 12  # innermost frames of an answer

_PACKAGE = Path(__file__).parents[1]
_TORCH = Path(torch.__file__).parent
_SENDING = (str(_PACKAGE / "mesh" / "collectives.py"), str(_PACKAGE / "pipeline" / "messages.py"))
# Where a rank is that waits for another one. On a GPU, it waits where the engine reads a result.
_WAITING = (*_SENDING, str(_TORCH / "distributed"), str(_PACKAGE / "train" / "engine.py"))


@dataclass(frozen=True)
class Answer:
    """The activity of a rank's main thread, or of the thread that it waits for.

    Attributes:
        place: innermost function that belongs neither to Python nor to torch.
        waits: whether it is in a collective or a message.
        moves: whether it was in another function half a second before.
        stack: innermost frames, as in a traceback.
    """

    place: str
    waits: bool
    moves: bool
    stack: str


@dataclass(frozen=True)
class Suspect:
    """The rank that the others wait for, the reason, and its stack if it answered."""

    rank: int
    cause: str
    stack: str = ""


class RollCall:
    """Answers for this process while its block runs; does nothing for a single process.

    Args:
        env: environment of this rank; its store may be started later.
    """

    def __init__(self, env: RankEnv) -> None:
        self._env, self._main = env, threading.get_ident()
        self._thread: threading.Thread | None = None
        self._ended = False

    def __enter__(self) -> Self:
        if self._env.launcher != "single":
            self._thread = threading.Thread(target=self._answer, name="roll call", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the thread: it would abort the process if it woke while the interpreter ends."""
        self._ended = True
        if self._thread is None or not self._thread.is_alive():
            return
        if (store := connect(self._env)) is not None:
            call(store, [self._env.rank])
            self._thread.join(CONNECT_SECONDS)

    def _answer(self) -> None:
        try:
            store = dist.TCPStore(
                self._env.master_addr, self._env.master_port, is_master=False, timeout=FOR_EVER
            )
            here = json.dumps([socket.gethostname(), os.getpid()])
            store.set(key("process", self._env.rank), here)
            store.wait([key("call", self._env.rank)], FOR_EVER)
            if not self._ended:
                store.set(key("answer", self._env.rank), json.dumps(asdict(self._look())))
        except dist.DistError:  # whoever kept the store has gone: nobody is left to ask
            return

    def _look(self) -> Answer:
        before = [frame.name for frame in self._active()]
        time.sleep(LOOK_SECONDS)
        stack = self._active()
        return Answer(
            place_of(stack),
            stack[-1].filename.startswith(_WAITING),
            before != [frame.name for frame in stack],
            "".join(traceback.format_list(stack[-PLACES:])),
        )

    def _active(self) -> traceback.StackSummary:
        """The stack of the main thread, or of the thread that it waits for."""
        frames = sys._current_frames()
        main, own = frames.pop(self._main), threading.get_ident()
        others = [f for ident, f in frames.items() if ident != own and not _idle(f)]
        return traceback.extract_stack(others[0] if _idle(main) and others else main)


def _idle(frame: FrameType) -> bool:
    """Whether a thread waits for another thread of the process, or for work."""
    return frame.f_code.co_filename in (threading.__file__, concurrent.futures.thread.__file__)


def key(kind: str, rank: int | None = None) -> str:
    """A key of the store, which torchrun keeps when it restarts the ranks."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"roll call {attempt}/{kind}" + ("" if rank is None else f"/{rank}")


def connect(env: RankEnv) -> dist.TCPStore | None:
    """A connection to the store of a run, or None if it is gone."""
    try:
        return dist.TCPStore(
            env.master_addr,
            env.master_port,
            is_master=False,
            timeout=timedelta(seconds=CONNECT_SECONDS),
        )
    except dist.DistError:
        return None


def call(store: dist.Store, ranks: Iterable[int]) -> None:
    """Ask ranks for their activity; they answer within `ANSWER_SECONDS`, or not at all."""
    for rank in ranks:
        store.set(key("call", rank), "")


def answers(store: dist.Store, ranks: Iterable[int]) -> dict[int, Answer]:
    """The answers of ranks so far."""
    keys = {rank: key("answer", rank) for rank in ranks}
    return {r: Answer(**json.loads(store.get(k))) for r, k in keys.items() if store.check([k])}


def process_of(store: dist.Store, rank: int) -> int | None:
    """The process id of a rank, if it has registered and is on this machine."""
    if not store.check([key("process", rank)]):
        return None
    host, pid = json.loads(store.get(key("process", rank)))
    return pid if host == socket.gethostname() else None


def find_suspect(
    processes: Mapping[int, int | None], given: Mapping[int, Answer]
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
            verb = "is busy" if answer.moves else "hangs"
            cause = f"{verb} in {answer.place}, while others wait for it"
            found.append((3 if answer.moves else 2, Suspect(rank, cause, answer.stack)))
    return min(found, key=lambda pair: (pair[0], pair[1].rank))[1] if found else None


def place_of(stack: traceback.StackSummary) -> str:
    """The innermost function outside of Python, torch and communication code, such as
    'next_batch (data/loader.py:88)'."""
    standard = Path(sysconfig.get_paths()["stdlib"])
    frame = stack[-1]
    for frame in reversed(stack):
        parents = Path(frame.filename).parents
        of_python = standard in parents and not any(p.name == "site-packages" for p in parents)
        if not of_python and _TORCH not in parents and frame.filename not in _SENDING:
            break
    path = Path(frame.filename)
    inside = _PACKAGE in path.parents
    return f"{frame.name} ({path.relative_to(_PACKAGE) if inside else path}:{frame.lineno})"


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
