"""The options of `fivefold plan`, and the request that they make to the planner."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold.cli.budget import BUDGET_HELP, budget_bytes
from fivefold.cli.helps import JSON_HELP
from fivefold.config.flags import SWITCHES
from fivefold.config.settings import Count, Positive, Share, argument, changed, flag_of, option
from fivefold.config.sources import Loaded, load_options, scan_all
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.hardware import GB
from fivefold.predict.cluster import Cluster
from fivefold.predict.cluster_file import check_together, load_cluster
from fivefold.train.machine.devices import Asked

if TYPE_CHECKING:
    from fivefold.learn.posterior import Posterior
    from fivefold.search.request import Request

USUAL_CLUSTER = "H100"


@dataclass(frozen=True)
class Options:
    """Find the fastest layout of a model that fits on a cluster, and explain why.

    From a recipe it takes the model and the batch. It ignores the layout, which it searches for.
    Layout settings that are given as flags stay as they are.
    """

    recipe: str | None = argument(
        "preset, recipe, hub name, or path of a config.json or .toml file", None
    )
    cluster: str | None = option(
        None,
        "kind of GPU, or path of a cluster's .toml file (default: H100, or with --from that of the "
        "runs)",
    )
    gpus: Count | None = option(
        None, "number of GPUs (default: that of the cluster's file, one node, or the runs')"
    )
    from_runs: tuple[str, ...] = option(
        (), "run folders to fit the machine's constants to before planning"
    )
    learned: str | None = option(
        None, "with --from: also write the fitted machine to this .toml file"
    )
    host_memory: Positive | None = option(
        None, "GB of host memory per node (default: the cluster's)"
    )
    memory_budget: str | None = option(
        None, f"{BUDGET_HELP} (default: the GPU's, less what is reserved and left free)"
    )
    memory_margin: Share | None = option(
        None, "share of a GPU's memory to leave free (default: the cluster's, usually 0.05)"
    )
    verbose: bool = option(
        False, "also show time, kernels, memory, messages, trade-offs and a whole run in detail"
    )
    top: Count = option(5, "number of layouts to show, the best of each mesh")
    why: str | None = option(
        None, "settings such as 'tp=4 pp=8': show only how much slower the best layout with them is"
    )
    rules: bool = option(
        False, "show what the usual rules of thumb would choose, and how much slower that is"
    )
    proven: bool = option(
        False, "choose only schedules and techniques that published runs have used"
    )
    guide: bool = option(
        False, "show what decision tables of public guides recommend, and how much slower that is"
    )
    train_tokens: str | None = option(
        None, "tokens of a whole run, such as 15T: show GPU hours, days and checkpoints"
    )
    emit: Literal["fivefold", "megatron", "torchtitan", "deepspeed"] | None = option(
        None, "print only settings, for this trainer, of the best layout that it can run"
    )
    html: str | None = option(
        None, "also write a page with timeline, memory and parts of the step time to this file"
    )
    json: bool = option(False, JSON_HELP)
    calibrate: str | None = option(
        None, "measure this machine and write a cluster's .toml file, instead of planning"
    )
    score: str | None = option(
        None, "predict the published runs of a .csv file and print the errors, instead of planning"
    )
    nproc: Count | None = option(None, "number of processes that --calibrate starts")
    device: Asked = option("auto", "what --calibrate measures; auto: GPUs if there are enough")


def alone(argv: Sequence[str], *used: str) -> Options:
    """The options of a command line that asks for something other than a plan.

    Raises:
        ConfigError: it has more than those `used`, which nothing would read.
    """
    given = scan_all(argv, Options, Mistakes())
    words = ["the recipe"] if given.words else []
    implied = (name for switch in given.switches for name in SWITCHES[switch])
    words += map(flag_of, sorted({*given.values, *given.switches}.difference(used, implied)))
    if words:
        what = f"{flag_of(used[0])} runs instead of planning, and ignores "
        attempt = f"leave out {' '.join(words)}"
        raise ConfigError(Mistake(what + ", ".join(words), attempt=attempt))
    return load_options(argv, Options)


def planned_request(
    loaded: Loaded[Options], tokens: float | None
) -> tuple["Request", "Posterior | None"]:
    """The request of a command line, and what the given runs show of its machine.

    Raises all mistakes at once, before the search.
    """
    from fivefold.config.rules.model import check_model
    from fivefold.config.rules.values import check_values
    from fivefold.search.proven import PROVEN
    from fivefold.search.request import request

    options = loaded.options
    mistakes = Mistakes()
    check_values(loaded.config, mistakes)
    check_model(loaded.config.model, mistakes)
    _check_numbers(options, tokens, mistakes)
    _check_output(options, mistakes)
    if options.html is not None:
        _check_page(Path(options.html), mistakes)
    cluster = known = None
    with mistakes.collecting():
        cluster, known = _machine(options)
        if options.memory_budget is not None:
            cluster = cluster.within(budget_bytes(options.memory_budget))
        elif options.memory_margin is not None:
            cluster = replace(cluster, memory_margin=options.memory_margin)
            check_together(cluster, mistakes)
    mistakes.raise_if_any()
    assert cluster is not None
    if options.host_memory is not None:
        cluster = replace(cluster, host_memory_bytes=options.host_memory * GB)
    origins = {"by_flag": loaded.by_flag, "by_recipe": loaded.by_recipe}
    asked = request(loaded.config, cluster, **origins)
    return asked.among(PROVEN) if options.proven else asked, known


def _check_numbers(options: Options, tokens: float | None, mistakes: Mistakes) -> None:
    """Add impossible numbers, and those that do not belong to a plan."""
    if options.nproc is not None:
        what = f"--nproc {options.nproc} is for --calibrate; a plan takes --gpus"
        mistakes.add(what, works=(f"--gpus {options.nproc}",))
    if options.device != "auto":
        what = f"--device {options.device} is for --calibrate; a plan takes --cluster"
        mistakes.add(what, works=("--device auto",))
    margin, budget = options.memory_margin, options.memory_budget
    if margin is not None and budget is not None:
        mistakes.add(
            f"--memory-budget {budget} is exact, and --memory-margin {margin} keeps a part free",
            works=("--memory-budget none", "--memory-margin none"),
        )
    if tokens is not None and not 1 <= tokens < inf:
        mistakes.add(
            f"--train-tokens must be a number of tokens, not {options.train_tokens!r}",
            works=("15T", "100B", "3.5e11"),
        )


def _check_output(options: Options, mistakes: Mistakes) -> None:
    """Add output options that would have no effect, or cannot be written."""
    if options.learned is not None and not options.from_runs:
        mistakes.add(
            f"--learned {options.learned} chooses what is learned from runs, and --from names none",
            works=("--learned none",),
        )
    if options.json and options.emit is not None:
        mistakes.add("--json and --emit both say what to print", works=("--no-json", "--emit none"))
    if options.emit is not None and options.why is not None:
        mistakes.add(
            "--emit prints settings only, and --why asks for an explanation",
            works=("--emit none", "--why none"),
        )
    alone = "emit" if options.emit is not None else "why"
    if alone == "emit" or (options.why and not options.json):
        for setting in changed(options, ("train_tokens", "top")):
            mistakes.add(
                f"--{alone} prints nothing of {setting.flag}",
                works=(f"--{alone} none", setting.typed(setting.default)),
            )
    for name in (setting.name for setting in changed(options, ("rules", "guide", "verbose"))):
        if options.emit is not None:
            what = f"--emit prints settings only, nothing of --{name}"
            mistakes.add(what, works=("--emit none", f"--no-{name}"))
        elif name == "verbose" and options.why is not None:
            what = "--why prints nothing but its answer, which --verbose does not change"
            mistakes.add(what, works=("--why none", "--no-verbose"))
        elif name == "verbose" and options.json:
            what = "--json prints all that --verbose would"
            mistakes.add(what, works=("--no-json", "--no-verbose"))


def none_proven(asked: "Request") -> ConfigError | None:
    """The error to raise if only layouts without published precedent fit."""
    from fivefold.search.search import search
    from fivefold.tell.describe import summary

    if not asked.only:
        return None
    free = search(replace(asked, only={}))
    if not free.found:
        return None
    return ConfigError(
        Mistake(
            "no layout with only schedules and techniques of published runs fits",
            (f"the best of all others: {summary(free.best.layout)}",),
            ("--no-proven",),
        )
    )


def _machine(options: Options) -> tuple[Cluster, "Posterior | None"]:
    """The machine to plan for, and what the given runs show of it."""
    if not options.from_runs:
        return load_cluster(options.cluster or USUAL_CLUSTER, options.gpus), None
    from fivefold.cli.from_runs import machine

    known = machine(options.from_runs, options.cluster, options.learned)
    cluster, ranks = known.cluster, known.observations[-1].layout.grid.world_size
    return replace(cluster, num_gpus=options.gpus or ranks), known


def _check_page(path: Path, mistakes: Mistakes) -> None:
    """Check that a page can probably be written to this path."""
    if path.is_dir():
        mistakes.add(f"--html {path} is a folder", works=(f"--html {path / 'plan.html'}",))
    elif not path.parent.is_dir():
        mistakes.add(f"--html {path}: there is no folder {path.parent}")
    elif not os.access(path.parent, os.W_OK):
        mistakes.add(f"--html {path}: files in {path.parent} cannot be written")
