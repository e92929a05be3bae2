"""`fivefold train`: check the settings, then show what would run, or run it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from fivefold.check import check
from fivefold.cli.budget import BUDGET_HELP, within_budget
from fivefold.cli.helps import DEVICE_HELP, NPROC_HELP, RECIPE_HELP
from fivefold.cli.plan_options import USUAL_CLUSTER
from fivefold.cli.style import note
from fivefold.config.config import Config
from fivefold.config.settings import Count, Whole, argument, option
from fivefold.config.sources import load_with_origins
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.train.folder.homes import with_home_folders
from fivefold.train.machine.devices import Asked
from fivefold.train.ranks.rank_env import check_restarts, read_rank_env


@dataclass(frozen=True)
class Options:
    """Train the model of a recipe; flags override the recipe.

    Under torchrun or srun every rank runs this same command. Otherwise --nproc starts the ranks
    on this machine, by default one.
    """

    recipe: str | None = argument(RECIPE_HELP, None)
    nproc: Count | None = option(None, NPROC_HELP)
    device: Asked = option("auto", f"where to train; {DEVICE_HELP}")
    layout: Literal["given", "auto"] = option(
        "given",
        "auto: replace the recipe's layout by the planner's fastest for these ranks; layout "
        "flags stay",
    )
    memory_budget: str | None = option(
        None,
        f"{BUDGET_HELP}; auto: those of the cluster's GPU: choose what is recomputed and "
        "offloaded, the fastest that fits",
    )
    cluster: str | None = option(
        None,
        "kind of GPU, or TOML file of a cluster, that --layout auto and --memory-budget assume "
        "(default: H100)",
    )
    max_restarts: Whole = option(
        0, "how often to restart the ranks of --nproc after a failure, from the last checkpoint"
    )
    min_nproc: int | None = option(
        None,
        "fewest ranks to continue with: of --nproc if restarts do not help, of torchrun "
        "--nnodes MIN:MAX as hosts come and go; in the given layout if it fits them, else in "
        "the planner's (default: all)",
    )
    dry_run: bool = option(
        False, "show settings, mesh, stages and derived numbers, without starting anything"
    )


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    loaded = load_with_origins(argv, Options, note)
    options, config = loaded.options, with_home_folders(loaded.config)
    world = ranks(options.nproc, dry_run=options.dry_run)
    check_restarts(options.max_restarts, read_rank_env().launcher, config.checkpoint.save)
    plans, budget = options.layout == "auto", options.memory_budget
    if options.min_nproc is not None:
        _check_least(options.min_nproc, options.nproc, world, config.checkpoint.save)
        plans |= options.nproc is None and not _fits(config, world)
    elif not plans and budget is None and options.cluster is not None:
        what = f"--cluster {options.cluster} has no effect: its times are for a plan"
        works = ("--layout auto", "--memory-budget auto", "--cluster none")
        raise ConfigError(Mistake(what, works=works))
    try:
        cluster = options.cluster or USUAL_CLUSTER
        if plans:
            from fivefold.cli.auto_layout import planned

            fixed = loaded.by_flag if options.layout == "auto" else frozenset[str]()
            config = planned(config, world, cluster, fixed, budget)
        elif budget is not None:
            config = within_budget(config, world, budget, cluster, loaded.by_flag)
        layout = check(config, world)
    except ConfigError as error:
        raise error if options.nproc is not None else _by_launcher(error) from error
    # Imported late: numpy here, and torch only when all settings have been checked.
    from fivefold.train.corpora import check_corpora, check_data_settings
    from fivefold.train.folder.fetched import with_fetched
    from fivefold.train.folder.preflight import check_start

    if options.dry_run:
        from fivefold.cli.preview import preview

        check_data_settings(config)  # the files may be on another machine
        print("\n".join(preview(layout)))
        return 0
    check_start(config)
    config = with_fetched(config, note)
    layout = check(config, world)
    check_corpora(config)
    from fivefold.train.run import train

    name, again = recipe_name(options.recipe), options.max_restarts
    start = partial(train, name=name, asked=options.device, max_restarts=again)
    if options.min_nproc is None or options.nproc is None:
        return start(layout, nproc=options.nproc).status
    from fivefold.cli.fewer_ranks import FewerRanks  # with the planner

    by_flag = loaded.by_flag if plans else None
    fewer = FewerRanks(config, by_flag, cluster, budget, options.min_nproc, start)
    return fewer.run(layout).status


def _fits(config: Config, world: int) -> bool:
    try:
        check(config, world)
    except ConfigError:
        return False
    return True


def _check_least(least: int, nproc: int | None, world: int, save: str | None) -> None:
    """Check that the run can continue on fewer ranks than --nproc, or than torchrun might start.

    Raises:
        ConfigError: all that is wrong with --min-nproc.
    """
    mistakes = Mistakes()
    launcher = read_rank_env().launcher
    if launcher == "torchrun":
        if not 1 <= least <= world:
            what = f"torchrun has started {world} ranks, and --min-nproc asks for {least} or more"
            mistakes.add(what, works=(f"--min-nproc {world}", "--min-nproc none"))
    elif nproc is None:
        what = f"--min-nproc {least} is for the ranks of --nproc or of torchrun --nnodes MIN:MAX"
        why = "srun starts as many ranks as the job has" if launcher == "slurm" else ""
        mistakes.add(what, *filter(None, [why]), works=("--min-nproc none",))
    elif not 1 <= least < nproc:
        what = f"--min-nproc must be at least 1 and less than --nproc {nproc}, not {least}"
        mistakes.add(what, works=("--min-nproc none",))
    if save is None:
        what = f"--min-nproc {least} needs --save: fewer ranks would begin another run"
        mistakes.add(what, attempt="--save runs/NAME")
    mistakes.raise_if_any()


def _by_launcher(error: ConfigError) -> ConfigError:
    """The error, with advice for torchrun or srun, which start the ranks, instead of --nproc."""
    launcher = read_rank_env().launcher
    if launcher == "single":
        return error
    mistakes = []
    for mistake in error.mistakes:
        flag, _, count = (mistake.attempt or "").partition(" ")
        if flag == "--nproc":
            why = (*mistake.why, f"{launcher} would have to start {count} ranks")
            mistake = replace(mistake, why=why, attempt=None)
        mistakes.append(mistake)
    return ConfigError(*mistakes)


def recipe_name(recipe: str | None) -> str:
    """The name of a run of this recipe."""
    return Path(recipe).stem if recipe else "run"


def ranks(nproc: int | None, *, dry_run: bool = False) -> int:
    """The number of ranks: that of --nproc, or the number that a launcher has started.

    Raises:
        ConfigError: both are given, or --nproc is less than one.
    """
    env = read_rank_env()
    if nproc is None:
        return env.world_size
    if env.launcher != "single" and not dry_run:
        what = f"--nproc {nproc} starts ranks, and {env.launcher} has started {env.world_size}"
        raise ConfigError(Mistake(what, works=("--nproc none",)))
    return nproc
