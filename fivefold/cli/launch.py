"""`fivefold launch`: write the job file of a run, or submit it."""

import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import which
from types import MappingProxyType
from typing import Literal, NamedTuple

from fivefold.check import check
from fivefold.cli.helps import RECIPE_HELP
from fivefold.cli.style import note
from fivefold.cli.train import recipe_name
from fivefold.config.settings import Count, Whole, argument, changed, option
from fivefold.config.sources import load
from fivefold.errors import ConfigError, FivefoldError, Mistake, Mistakes
from fivefold.files import telling_unwritable, write_atomic
from fivefold.jobs.job import ClusterJob, job_name, read_limit
from fivefold.jobs.kubernetes import train_job
from fivefold.jobs.ray import ray_script
from fivefold.jobs.skypilot import sky_task
from fivefold.jobs.slurm import sbatch_file


class Target(NamedTuple):
    """A kind of cluster.

    Attributes:
        text: writes the job file.
        suffix: how its name ends.
        submit: the command that submits it, before the file's name.
        takes: options that its job file says something of.
        needs: options that it cannot do without.
    """

    text: Callable[[ClusterJob], str]
    suffix: str
    submit: tuple[str, ...]
    takes: tuple[str, ...]
    needs: tuple[str, ...] = ()


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "slurm": Target(sbatch_file, ".sbatch", ("sbatch",), ("time", "max_restarts")),
        "kubernetes": Target(
            train_job,
            ".yaml",
            ("kubectl", "apply", "-f"),
            ("time", "image", "volume"),
            ("image", "volume"),
        ),
        "skypilot": Target(
            sky_task,
            ".yaml",
            ("sky", "jobs", "launch", "--yes"),
            ("gpu", "max_restarts", "image", "volume"),
            ("image", "volume"),
        ),
        "ray": Target(
            ray_script,
            ".py",
            ("ray", "job", "submit", "--working-dir", ".", "--", "python"),
            ("gpu", "max_restarts"),
            ("save",),
        ),
    }
)
_EXAMPLES = MappingProxyType(
    {
        "image": "--image registry.example/fivefold:0.1",
        "volume": "--volume shared:/shared",
        "save": "--save /shared/runs/NAME",
    }
)
_WHY = MappingProxyType(
    {
        "image": "nodes run a container with Fivefold in it: examples/Containerfile builds one",
        "volume": "all nodes write one run folder, and their own disks are lost with them",
        "save": "workers run in folders of their own, and all write this one: give its full path",
    }
)
_IDLE = MappingProxyType(
    {
        "gpu": "it asks for a number of GPUs, not for a kind",
        "max_restarts": "Kubernetes starts its pods again, as often as their runtime says",
        "time": "it has no time limit; --exit-duration-in-mins ends a start in time",
        "image": "its machines have Fivefold themselves",
        "volume": "its machines see the folder of --save themselves",
    }
)
"""Why a job file says nothing of an option."""


@dataclass(frozen=True)
class Options:
    """Write the job file of a run for a cluster, and with --submit submit it.

    The file contains all settings of the recipe and the flags; the cluster needs only Fivefold and
    the data. A layout that does not fit the ranks is refused.
    """

    target: Literal["slurm", "kubernetes", "skypilot", "ray"] = argument("kind of cluster")
    recipe: str | None = argument(RECIPE_HELP, None)
    nodes: Count = option(1, "machines")
    ranks_per_node: Count = option(8, "ranks per machine, each with a GPU")
    gpu: str | None = option(
        "H100", "kind of GPU to request from SkyPilot and Ray; none: CPUs only"
    )
    time: str = option("24:00:00", "time limit: minutes, H:MM:SS or D-HH:MM:SS")
    image: str | None = option(None, "container image that contains Fivefold")
    max_restarts: Whole = option(3, "how often a job is restarted after a failure")
    volume: str | None = option(None, "shared volume and where to mount it, as CLAIM:/PATH")
    name: str | None = option(None, "name of the job (default: that of the recipe)")
    output: str | None = option(None, "file to write (default: print it)")
    submit: bool = option(False, "also submit it, with the cluster's own command")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options, config = load(argv, Options, note)
    mistakes = Mistakes()
    target = TARGETS[options.target]
    for setting in changed(options, _IDLE.keys() - target.takes):
        if getattr(options, setting.name) is not None:
            mistakes.add(
                f"{setting.flag} has no effect on a job for {options.target}: "
                f"{_IDLE[setting.name]}",
                works=[setting.typed(setting.default)],
            )
    limit = None
    with mistakes.collecting():
        limit = read_limit(options.time)
    volume = _volume(options.volume, mistakes)
    save = config.checkpoint.save
    rooted = save if save is not None and Path(save).is_absolute() else None
    given = {"image": options.image, "volume": options.volume, "save": rooted}
    for name in target.needs:
        if given[name] is None:
            what = f"a job for {options.target} needs --{name}"
            mistakes.add(what, _WHY[name], attempt=_EXAMPLES[name])
    mistakes.raise_if_any()
    assert limit is not None
    check(config, options.nodes * options.ranks_per_node)
    name = job_name(options.name or recipe_name(options.recipe))
    job = ClusterJob(
        name,
        config,
        options.nodes,
        options.ranks_per_node,
        options.gpu,
        limit,
        options.max_restarts,
        options.image,
        volume,
    )
    text = target.text(job)
    if options.output is None and not options.submit:
        print(text, end="")
        return 0
    path = Path(options.output or f"{name}{target.suffix}")
    with telling_unwritable(path):
        write_atomic(path, text)
    command = [*target.submit, str(path)]
    if not options.submit:
        print(f"{path} is written; submit it: {shlex.join(command)}")
        return 0
    return _submit(command)


def _volume(text: str | None, mistakes: Mistakes) -> tuple[str, str] | None:
    if text is None:
        return None
    claim, _, path = text.partition(":")
    if claim and path.startswith("/") and path.strip("/"):
        return claim, path.rstrip("/")
    mistakes.add(f"--volume must be CLAIM:/PATH, not {text!r}", attempt=_EXAMPLES["volume"])
    return None


def _submit(command: Sequence[str]) -> int:
    if which(command[0]) is None:
        raise ConfigError(
            Mistake(
                f"{command[0]} is not installed on this machine; {command[-1]} has been written",
                attempt=f"on one that has it: {shlex.join(command)}",
            )
        )
    print(shlex.join(command), flush=True)
    status = subprocess.run(command, check=False).returncode
    if status:
        raise FivefoldError(f"{command[0]} ended with status {status}; {command[-1]} is written")
    return 0
