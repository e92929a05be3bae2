"""Names the rank that holds up a run while the run still waits, long before collectives time out.

A thread on each rank looks at what its own rank has done, which costs no message. Where a rank has
begun no pipeline action for the time that is set, the first rank to notice asks all of them.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch.distributed as dist

from fivefold.files import write_atomic
from fivefold.train.health.rank_status import (
    Suspect,
    ask_ranks,
    await_answers,
    connect,
    find_suspect,
    key,
    process_of,
)
from fivefold.train.health.stack_sampler import RankStatus, StackSampler
from fivefold.train.ranks.rank_env import RankEnv
from fivefold.units import human_seconds, ranks_named, several

LOOKS = 10  # in the time that is set
SHOWN = 8  # groups of ranks in the message


class Watchdog:
    """Watches this rank while its block runs.

    Args:
        env: this rank; its activity says how long ago it began what it does.
        seconds: time without a new pipeline action after which ranks are asked; 0: never.
        name: rank -> its name with coordinates.
        ends: what ends the run if it goes on waiting: '--distributed-timeout-minutes 10'.
        folder: folder for the stacks of every rank.
    """

    def __init__(
        self, env: RankEnv, seconds: float, *, name: Callable[[int], str], ends: str, folder: Path
    ) -> None:
        self._env, self._activity = env, env.activity
        self._seconds, self._name, self._ends, self._folder = seconds, name, ends, folder
        self._sampler = StackSampler(env.activity)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        if self._seconds:
            self._activity.enter(None)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._seconds / LOOKS):
            if not self._is_stuck:
                continue
            try:
                self._alarm()
            except dist.DistError:
                if self._env.rank == 1:  # the store is the first rank's, or its machine's
                    self._say(
                        f"{self._headline}: the rendezvous store on {self._env.master_addr} does "
                        "not answer: its process is stopped, or its machine is gone"
                    )
                self._until_it_moves()

    @property
    def _is_stuck(self) -> bool:
        return self._activity.idle_seconds >= self._seconds

    @property
    def _headline(self) -> str:
        step = f"in step {self._activity.step}" if self._activity.step else "before the first step"
        return f"no progress for {human_seconds(self._activity.idle_seconds)} {step}"

    def _alarm(self) -> None:
        """Ask until this rank moves, if no other rank asks already; report once, and again if the
        rank that was late then hangs."""
        store = None
        if self._env.launcher != "single":
            store = connect(self._env)
            if store is None:
                raise dist.DistStoreError("the store is gone")
            own = str(self._env.rank)
            if store.compare_set(key("alarm"), "", own).decode() != own:
                self._until_it_moves()
                return
        began, reported, moves = time.monotonic() - self._activity.idle_seconds, False, True
        while self._is_stuck and not self._ended.is_set():
            if moves:
                reported, moves = self._ask(store, reported)
            self._until_it_moves(self._seconds)
        if reported and not self._ended.is_set():
            self._say(f"goes on after {human_seconds(time.monotonic() - began)}")
        if store is not None:
            store.compare_set(key("alarm"), str(self._env.rank), "")

    def _until_it_moves(self, seconds: float = float("inf")) -> None:
        """Return once this rank does something else, or after this many seconds."""
        deadline = time.monotonic() + seconds
        while self._is_stuck and time.monotonic() < deadline:
            if self._ended.wait(self._seconds / LOOKS):
                return

    def _ask(self, store: dist.Store | None, reported: bool) -> tuple[bool, bool]:
        """Ask every rank and report which one the others wait for, unless that one moves and has
        been reported.

        Returns:
            Whether it has been reported by now; whether it may have to be reported again.
        """
        headline, suspect = self._headline, None
        if store is None:
            given = {0: self._sampler.sample()}
            waits = not given[0].moves
        else:
            ranks = range(self._env.world_size)
            question = ask_ranks(store, self._env.world_size)
            processes = {rank: process_of(store, rank) for rank in ranks}
            given = await_answers(store, processes, question, self._ended.wait)
            waits = len(given) < len(ranks) or any(answer.waits for answer in given.values())
            suspect = find_suspect(processes, given)
        if not waits or not self._is_stuck or self._ended.is_set():
            return reported, True
        moves = suspect is not None and suspect.moves
        if not (reported and moves):
            self._say(self._message(headline, given, suspect))
        return True, moves

    def _message(
        self, headline: str, given: Mapping[int, RankStatus], suspect: Suspect | None
    ) -> str:
        if suspect is not None:
            cause = f"{self._name(suspect.rank)} {suspect.cause}"
        elif self._env.world_size > 1:
            cause = "every rank waits for others"
        else:
            cause = given[0].state
        places: dict[str, list[int]] = {}
        for rank, answer in sorted(given.items()):
            places.setdefault(f"{answer.state}: {answer.doing}", []).append(rank)
        lines = [f"{headline}: {cause}"]
        for place, ranks in [*places.items()][:SHOWN]:
            lines.append(f"{ranks_named(ranks)} {_plural(place, ranks)}")
        if len(places) > SHOWN:
            lines.append(f"and {several(len(places) - SHOWN, 'more group')} of ranks")
        if path := self._keep(lines, given):
            lines.append(f"stacks of every rank: {path}")
        return "\n  ".join([*lines, f"the run waits until {self._ends} ends it"])

    def _keep(self, lines: list[str], given: Mapping[int, RankStatus]) -> Path | None:
        """Write the stacks of ranks; None if that fails."""
        stacks = [
            f"{self._name(rank)}: {a.doing}, for {human_seconds(a.idle)}\n{a.stack}"
            for rank, a in sorted(given.items())
        ]
        path = self._folder / f"step-{self._activity.step}.txt"
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            write_atomic(path, "\n".join(["\n".join(lines), "", *stacks]))
            return path
        return None

    def _say(self, message: str) -> None:
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _plural(state: str, ranks: list[int]) -> str:
    """Put 'waits in ...' into the plural: 'wait in ...'."""
    if len(ranks) == 1:
        return state
    verb, rest = state.split(" ", 1)
    return f"{'are' if verb == 'is' else verb.removesuffix('s')} {rest}"
