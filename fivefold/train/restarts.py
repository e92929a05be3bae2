"""Starts the ranks of a run again after a failure, from its last complete checkpoint.

The process that watches the ranks has imported everything and has opened the data, so that new
ranks are forked from it within a second. Under torchrun and srun the launcher starts them again.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from fivefold.config.config import Config
from fivefold.errors import ConfigError, Mistake
from fivefold.train.failures import CONFIG_ERROR
from fivefold.train.launch import End
from fivefold.train.origin import Origin, is_finished
from fivefold.train.run_folder import RunFolder


@dataclass
class Restarts:
    """Decides whether ranks that failed are started again.

    A failure that comes back after the same step, on whichever rank is the first to notice, is of
    the run itself, such as of its data or settings: it would come back each time.

    Attributes:
        most: number of restarts of one command.
        kept: tells of which step this host's memory has the states, if of any.
        used: number of restarts so far.
    """

    most: int
    kept: Callable[[], int | None] = field(default=lambda: None)
    used: int = 0
    _seen: set[tuple[str, int]] = field(default_factory=set)

    def refusal(self, end: End, step: int) -> str | None:
        """Why the ranks are not started again; None: they are, and it counts.

        Args:
            end: how the ranks ended.
            step: last step that was done.
        """
        if end.stopped:
            return "they were asked to stop"
        if end.status == CONFIG_ERROR:
            return "its settings cannot run"
        if (end.why, step) in self._seen:
            return f"it failed in the same way before, after the same step, {step}"
        if self.used == self.most:
            return f"--max-restarts {self.most} is used up"
        self.used += 1
        self._seen.add((end.why, step))
        return None

    def told(self, origin: Origin | None, done: int) -> str:
        """A line on what the ranks that are started again begin with.

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


def restarting(
    ranks: Callable[[Origin | None, str], End],
    origin: Origin | None,
    find_origin: Callable[[], Origin | None],
    folder: RunFolder,
    config: Config,
    restarts: Restarts,
) -> int:
    """Train on ranks that are started again after a failure; return the exit status.

    Args:
        ranks: starts ranks from an origin, after a failure, and waits for their end.
        origin: where the first ones start.
        find_origin: finds where the next ones do.
        folder: the run folder.
        config: settings of the run.
        restarts: decides whether there is another start.
    """
    end = ranks(origin, "")
    while end.why and restarts.most:
        done = folder.last_step()
        if (refusal := restarts.refusal(end, done)) is not None:
            print(f"the ranks are not started again: {refusal}", file=sys.stderr, flush=True)
            break
        origin = find_origin()
        if is_finished(origin, config):
            print("every step is done and saved", file=sys.stderr, flush=True)
            return 0
        print(restarts.told(origin, done), file=sys.stderr, flush=True)
        end = ranks(origin, f"{end.place}: {end.why}")
    return end.status


def check_restarts(most: int, launcher: str, save: str | None) -> None:
    """Check that something can start the ranks again, and that they will find their run.

    Args:
        most: restarts that the command asks for.
        launcher: program that started this process.
        save: the run folder of --save.

    Raises:
        ConfigError: the number is negative, ranks of torchrun or srun ask for restarts, or ranks
            that torchrun would start again would begin a run of their own.
    """
    if most < 0:
        raise ConfigError(Mistake(f"--max-restarts must be at least 0, not {most}"))
    if launcher in ("torchrun", "slurm") and most:
        again = {
            "torchrun": f"torchrun --max-restarts {most} starts them again",
            "slurm": "the job, submitted again, goes on from its last checkpoint",
        }[launcher]
        what = f"--max-restarts {most} is for the ranks of --nproc; {launcher} started these"
        raise ConfigError(Mistake(what, (again,), works=("--max-restarts 0",)))
    torchrun_restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if launcher == "torchrun" and torchrun_restarts != "0" and save is None:
        what = f"torchrun --max-restarts {torchrun_restarts} needs --save: ranks that it starts"
        what += " again would begin another run"
        raise ConfigError(Mistake(what, attempt="--save runs/NAME"))
