"""A run as a cluster job: the information from which each kind of job file is written."""

import re
from dataclasses import dataclass, replace
from datetime import timedelta

from fivefold.config.config import Config
from fivefold.config.sources import to_toml
from fivefold.errors import ConfigError, Mistake

STOP_SECONDS = 600
"""Seconds from a job's warning to its end; a step, an evaluation and a checkpoint must fit."""
END_SECONDS = 15
"""Part of `STOP_SECONDS` in which the process that started the ranks ends."""


@dataclass(frozen=True)
class ClusterJob:
    """What to run, and on what.

    Attributes:
        name: name of the job: letters, digits and dashes.
        config: all settings of the run.
        nodes: machines.
        ranks: ranks a machine, each with a GPU unless `gpu` is None.
        gpu: kind of GPU; None: processors only.
        limit: time limit.
        max_restarts: number of times that the job is started again after a failure.
        image: container image with Fivefold; None: what the machines have.
        volume: name of a shared volume, and where it is mounted.
    """

    name: str
    config: Config
    nodes: int
    ranks: int
    gpu: str | None
    limit: timedelta
    max_restarts: int
    image: str | None = None
    volume: tuple[str, str] | None = None

    @property
    def recipe(self) -> str:
        """All settings that are not defaults, as the text of a recipe."""
        return to_toml(self.config, changes_only=True).rstrip()

    @property
    def device(self) -> str:
        """Where ranks train, as `--device` takes it."""
        return "cpu" if self.gpu is None else "cuda"

    def saved_in(self, folder: str) -> "ClusterJob":
        """The job with a run folder added, unless its settings name one."""
        if self.config.checkpoint.save is not None:
            return self
        return replace(self, config=self.config.with_values(save=folder))


def started_by(command: str, recipe: str, job: ClusterJob) -> str:
    """Lines of shell that write the recipe to a file and train with it.

    torchrun kills ranks half a minute after it has passed on a signal, unless it is told otherwise.

    Args:
        command: torchrun, with its flags.
        recipe: the file.
        job: the job.
    """
    return (
        f"cat > {recipe} <<'RECIPE'\n{job.recipe}\nRECIPE\n"
        f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={STOP_SECONDS - END_SECONDS}\n"
        f"exec {command} -m fivefold train {recipe} --device {job.device}\n"
    )


def read_limit(text: str) -> timedelta:
    """A time limit as Slurm writes it: minutes, `H:MM:SS` or `D-HH:MM:SS`.

    Raises:
        ConfigError: it is none.

    >>> str(read_limit("1-06:30:00")), str(read_limit("90"))
    ('1 day, 6:30:00', '1:30:00')
    """
    if match := re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-9]{2}):([0-9]{2})", text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        limit = timedelta(days, seconds, minutes=minutes, hours=hours)
    elif re.fullmatch("[0-9]{1,6}", text):
        limit = timedelta(minutes=int(text))
    else:
        what = f"--time is {text!r}, and must be minutes, H:MM:SS or D-HH:MM:SS"
        raise ConfigError(Mistake(what, works=("--time 24:00:00",)))
    if limit.total_seconds() <= STOP_SECONDS:
        what = (
            f"--time {text} leaves no time to train: {STOP_SECONDS // 60} minutes before the end "
            "a job is asked to save"
        )
        raise ConfigError(Mistake(what, works=(f"--time {2 * STOP_SECONDS // 60}",)))
    return limit


def job_name(text: str) -> str:
    """A name that every scheduler takes, which must begin with a letter.

    >>> job_name("Llama 3.1 8B"), job_name("405b")
    ('llama-3-1-8b', 'run-405b')
    """
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:50].rstrip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")
