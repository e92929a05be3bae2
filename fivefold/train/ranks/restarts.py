"""Starts the ranks of a run again after a failure, from its last complete checkpoint.

The process that watches the ranks has imported everything and has opened the data, so that new
ranks are forked from it within a second. Where states are kept in memory, only ranks that died are
new ones. Under torchrun and srun the launcher starts all of them again.
"""

import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import NamedTuple, get_args

from fivefold.config.config import Config
from fivefold.errors import FivefoldError
from fivefold.train.folder.origin import Origin, is_finished
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.ranks.launch import End
from fivefold.train.ranks.rejoin import Orders

KILLED = 128 + signal.SIGKILL
KILLS = 10  # kills after the same step that end the run


@dataclass
class Restarts:
    """Decides whether ranks that failed are started again.

    A failure that recurs after the same step, on whichever rank notices it first, comes from the
    run itself, for example its data or settings, and would recur each time. A cause that kills
    ranks from outside may do so several times; it counts as the run's own only if it does not stop.

    Attributes:
        most: number of restarts of one command.
        kept: tells of which step this host's memory has the states, if of any.
        used: number of restarts so far.
    """

    most: int
    kept: Callable[[], int | None] = field(default=lambda: None)
    used: int = 0
    _seen: Counter[tuple[str, int]] = field(default_factory=Counter)

    def refusal(self, end: End, step: int) -> str | None:
        """Why the ranks are not started again; None: they are, and the restart is counted.

        Args:
            end: how the ranks ended.
            step: last step that was done.
        """
        if end.stopped:
            return "they were asked to stop"
        if end.of_settings:
            return "its settings cannot run"
        if self._seen[end.why, step] == (KILLS if end.status == KILLED else 1):
            return f"it failed in the same way before, after the same step, {step}"
        if self.used == self.most:
            return f"--max-restarts {self.most} is used up"
        self.used += 1
        self._seen[end.why, step] += 1
        return None

    def message(self, origin: Origin | None, done: int) -> str:
        """A line about the state from which restarted ranks begin.

        Args:
            origin: where they begin, unless memory has a later state.
            done: last step that was done.
        """
        step = 0 if origin is None or origin.weights_only else origin.step
        start = f"the checkpoint of step {step}" if step else "the beginning, as no step was saved"
        if (kept := self.kept() or 0) > step:
            step, start = kept, f"the state of step {kept} in memory"
        lost = f"; {done - step} {'step runs' if done - step == 1 else 'steps run'} again"
        return f"restart {self.used} of {self.most} from {start}{lost if done > step else ''}"


class Restart(NamedTuple):
    """Another start.

    Attributes:
        origin: where the ranks begin; None: at the beginning.
        after: the failure after which they do.
    """

    origin: Origin | None
    after: str

    @classmethod
    def of(cls, orders: Orders) -> "Restart":
        """Parse `orders`."""
        origin = orders["origin"]
        if origin is not None:
            named = [name for name in _PATHS if origin[name] is not None]
            origin = Origin(**origin | {name: Path(origin[name]) for name in named})
        return cls(origin, orders["after"])

    @property
    def orders(self) -> Orders:
        """This start as text for the ranks."""
        origin = None if self.origin is None else asdict(self.origin)
        if origin is not None:
            origin |= {name: str(origin[name]) for name in _PATHS if origin[name] is not None}
        return {"origin": origin, "after": self.after}


_PATHS = tuple(f.name for f in fields(Origin) if Path in (f.type, *get_args(f.type)))
"""Of an origin: JSON has no paths."""


@dataclass
class NextStart:
    """Finds whether ranks start again after a failure, and from where.

    Attributes:
        restarts: decides whether they do.
        find_origin: finds where they do.
        folder: the run folder.
        config: settings of the run.
        finished: whether nothing was left to do after the last failure.
    """

    restarts: Restarts
    find_origin: Callable[[], Origin | None]
    folder: RunFolder
    config: Config
    finished: bool = False

    def __call__(self, end: End) -> tuple[Restart | None, str]:
        """The next start (None if there is none), and a line about it."""
        if not self.restarts.most:
            return None, ""
        done = self.folder.last_step()
        if (refusal := self.restarts.refusal(end, done)) is not None:
            return None, f"the ranks are not started again: {refusal}"
        try:
            origin = self.find_origin()
        except FivefoldError as error:  # the run folder is gone, or no checkpoint is intact
            why = end.why if str(error).startswith(end.why) else str(error)
            return None, f"the ranks are not started again: {why}"
        if is_finished(origin, self.config):
            self.finished = True
            return None, "every step is done and saved"
        return Restart(origin, f"{end.place}: {end.why}"), self.restarts.message(origin, done)


def restarting(
    ranks: Callable[[Origin | None, str], End], origin: Origin | None, following: NextStart
) -> End:
    """Train, and start the ranks again after failures; return how the last ones ended.

    Args:
        ranks: starts ranks from an origin, after a failure, and waits for their end.
        origin: where the first ones start.
        following: finds where the next ones do.
    """
    end = ranks(origin, "")
    while end.why:
        again, message = following(end)
        if message:
            print(message, file=sys.stderr, flush=True)
        if again is None:
            break
        end = ranks(*again)
    return End(0) if following.finished else end
