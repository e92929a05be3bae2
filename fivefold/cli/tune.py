"""`fivefold tune`: finds the fastest layout on this machine by trials, and learns the machine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from math import inf
from pathlib import Path
from shlex import quote
from typing import Annotated

from fivefold.check import check
from fivefold.cli.auto_layout import ranks_for_gpus, with_layout
from fivefold.cli.helps import DEVICE_HELP, NPROC_HELP, RECIPE_HELP
from fivefold.cli.style import note
from fivefold.cli.train import ranks, recipe_name
from fivefold.config.settings import Allowed, Count, Positive, argument, option
from fivefold.config.sources import Loaded, load_with_origins, to_toml
from fivefold.errors import ConfigError, FivefoldError
from fivefold.files import telling_unwritable, write_atomic
from fivefold.layout import Layout
from fivefold.learn.posterior import half_width
from fivefold.learn.tell import constants_table
from fivefold.learn.tuning import Tried, Tuning
from fivefold.predict.cluster import Cluster
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.cluster_file import to_toml as machine_toml
from fivefold.process import die_with_parent
from fivefold.search.candidate import Candidate
from fivefold.search.enumeration import enumerate_space
from fivefold.search.request import ASSUMABLE, request
from fivefold.search.search import SearchResult, search
from fivefold.tell.describe import summary
from fivefold.tell.explain import percent
from fivefold.tell.infeasible import why_nothing
from fivefold.train.corpora import check_corpora, open_data
from fivefold.train.folder.fetched import with_fetched
from fivefold.train.folder.homes import with_home_folders
from fivefold.train.machine.devices import Asked, choose_device, visible_gpus
from fivefold.train.ranks.rank_env import RankEnv, read_rank_env
from fivefold.units import human_seconds, table

EACH = 8  # layouts that are considered for each machine
TrialSteps = Annotated[int, Allowed(lambda v: v >= 2, "at least 2")]


@dataclass(frozen=True)
class Options:
    """Find the fastest layout of a recipe on this machine, by training it for a few steps.

    The plan's best layouts are trained for a few steps each. Every measured time is fitted by the
    planner, which then chooses the next layout, until no further trial is worth its time. Layout
    settings given as flags stay. Writes the recipe with the layout found, the machine, and all
    trials.
    """

    recipe: str | None = argument(RECIPE_HELP, None)
    nproc: Count | None = option(None, f"{NPROC_HELP} (default: 1)")
    device: Asked = option("auto", f"where to train; {DEVICE_HELP}")
    cluster: str | None = option(
        None,
        "kind of GPU, or TOML file of a cluster, to begin with (default: measure this machine)",
    )
    trial_steps: TrialSteps = option(5, "steps of a layout's first trial; the first is not counted")
    run_steps: Positive = option(
        10_000.0, "expected steps of future runs; a trial must save more time in them than it costs"
    )
    max_trials: Count = option(24, "most layouts to try")
    out: str | None = option(
        None, "folder for recipe.toml, machine.toml and trials.json (default: tuned-RECIPE)"
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    loaded = load_with_origins(argv, Options, note)
    loaded = replace(loaded, config=with_home_folders(loaded.config))
    options, config = loaded.options, loaded.config
    if (launcher := read_rank_env().launcher) != "single":
        raise ConfigError(f"tune starts ranks itself, and {launcher} has started this one")
    world = ranks(options.nproc)
    config = with_fetched(config, note)
    loaded = replace(loaded, config=config)
    # What is missing is said before the machine is measured, which takes a minute.
    check_corpora(config)
    if options.device == "cuda":
        choose_device(options.device, RankEnv(), world, visible_gpus())
    _check_legal(loaded, world)
    out = Path(options.out or f"tuned-{recipe_name(options.recipe)}")
    with telling_unwritable(out):
        out.mkdir(parents=True, exist_ok=True)
    machine = _machine(options.cluster, world, options.device, out)
    planned = partial(candidates, loaded, world)
    planned(machine)  # report mistakes before anything is read or started
    from fivefold.train.trial import try_layout

    data = open_data(config, print)

    def attempt(layout: Layout, steps: int) -> tuple[list[float], str]:
        return try_layout(layout, data, options.device, steps)

    tuning = Tuning(
        machine, planned, attempt, options.trial_steps, options.run_steps, options.max_trials
    )
    for number, one in enumerate(tuning.explore(), 1):
        print(f"trial {number}: {_described_trial(one)}", flush=True)
    for one in tuning.halve():
        print(f"again: {_described_trial(one)}", flush=True)
    best = tuning.best
    if best is None:
        whys = dict.fromkeys(each.why for each in tuning.tried)
        raise ConfigError(f"no layout trained: {'; '.join(whys)}")
    _write(out, tuning, best)
    print("\n".join(_result(tuning, best, out, world)))
    return 0


def _machine(cluster: str | None, world: int, device: Asked, out: Path) -> Cluster:
    """The machine to begin with: the given one, or this one, measured once."""
    if cluster is not None:
        return load_cluster(cluster, world)
    file = out / "measured.toml"
    if not file.is_file():
        note(f"measures this machine with {world} ranks; {file} is read instead if it is there")
        measure(file, world, device)
    return load_cluster(file, world)


def _check_legal(loaded: Loaded[Options], world: int) -> None:
    """Refuse settings that no layout of so many ranks can have; that needs no measured machine.

    Raises:
        ConfigError: no layout is legal.
    """
    any_machine = load_cluster("B200", world)
    asked = request(loaded.config, any_machine, by_flag=loaded.by_flag, by_recipe=ASSUMABLE)
    if not len(enumerate_space(asked.config, world, asked.given, world, 1, asked.only)):
        raise why_nothing(SearchResult(asked)).spelled(ranks_for_gpus)


def measure(file: Path, world: int, device: Asked) -> None:
    """Measure this machine in a process of its own, since this process forks and must not start
    CUDA.

    Raises:
        FivefoldError: it failed, and has said why.
    """
    words = ["plan", "--calibrate", str(file), "--nproc", str(world), "--device", device]
    command = [sys.executable, "-m", "fivefold", *words]
    ends = partial(die_with_parent, os.getpid())
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False, preexec_fn=ends)
    if done.returncode:
        raise FivefoldError("the machine could not be measured: describe it with --cluster")


def candidates(loaded: Loaded[Options], world: int, machine: Cluster) -> list[Layout]:
    """Layouts that can be trained and may be the fastest on a machine.

    They are the plan's layouts, the best of each mesh first.

    Raises:
        ConfigError: the configuration is wrong, or no layout fits.
    """
    config, machine = loaded.config, replace(machine, num_gpus=world)
    asked = request(config, machine, by_flag=loaded.by_flag, by_recipe=ASSUMABLE)
    result = search(asked)
    if not result.found:
        raise why_nothing(result).spelled(ranks_for_gpus)
    # Of layouts that differ only in what they save, the fastest.
    plain: dict[object, Candidate] = {}
    for each in result.found:
        plain.setdefault((each.layout.config.parallel, each.layout.config.training), each)
    made = []
    for each in (*result.by_mesh()[:EACH], *islice(plain.values(), EACH)):
        with suppress(ConfigError):
            made.append(check(with_layout(config, each), world))
    return made


def _described_trial(one: Tried) -> str:
    if not one.times:
        return f"failed ({one.why}): {summary(one.layout)}"
    wide = half_width(one.doubt) - 1
    expected = f"predicted {human_seconds(one.predicted)} within {wide:.0%}"
    return f"{human_seconds(one.usual)} a step ({expected}): {summary(one.layout)}"


def _result(tuning: Tuning, best: Tried, out: Path, world: int) -> Iterator[str]:
    """The answer first, then the trials, what was learned, and the next command."""
    spent = sum(each.seconds for each in tuning.tried)
    yield ""
    yield (
        f"{human_seconds(best.usual)} a step: {summary(best.layout)}; {len(tuning.tried)} layouts "
        f"tried in {human_seconds(spent)}"
    )
    yield ""
    rows = [("step", "", "predicted", "layout")]
    for one in sorted(tuning.tried, key=lambda t: t.usual if t.times else inf):
        slower = percent(one.usual / best.usual - 1) if one.times else ""
        step = human_seconds(one.usual) if one.times else "failed"
        described = summary(one.layout) + (f" ({one.why})" if one.why else "")
        rows.append((step, slower, human_seconds(one.predicted), described))
    yield from table(rows, right=(0, 1, 2))
    yield ""
    yield from constants_table(tuning.known)
    yield ""
    yield f"try: fivefold train {quote(str(out / 'recipe.toml'))} --nproc {world}"


def _write(out: Path, tuning: Tuning, best: Tried) -> None:
    """Write the recipe with the best layout, the machine as learned, and the trials."""
    write_atomic(out / "recipe.toml", to_toml(best.layout.config))
    write_atomic(out / "machine.toml", machine_toml(tuning.known.cluster))
    trials = [
        {
            "layout": summary(one.layout),
            "predicted_seconds": one.predicted,
            "step_seconds": one.times,
            "failure": one.why,
            "trial_seconds": one.seconds,
        }
        for one in tuning.tried
    ]
    write_atomic(out / "trials.json", json.dumps(trials, indent=2) + "\n")
