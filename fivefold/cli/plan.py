"""`fivefold plan`: find the fastest layout of a model that fits on a cluster."""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fivefold.cli.budget import BUDGET_HELP, budget_bytes
from fivefold.cli.style import paint
from fivefold.config.parallel import option
from fivefold.config.settings import argument
from fivefold.config.sources import Loaded, load_with_origins
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.files import write_atomic
from fivefold.hardware import GB
from fivefold.predict.cluster import Cluster, check_together, load_cluster

if TYPE_CHECKING:
    from fivefold.learn.posterior import Posterior
    from fivefold.search.request import Request
    from fivefold.search.search import SearchResult

USUAL_CLUSTER = "H100"
SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


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
    gpus: int | None = option(
        None, "number of GPUs (default: that of the cluster's file, one node, or the runs')"
    )
    from_runs: tuple[str, ...] = option(
        (), "run folders from which to learn the machine's constants before planning"
    )
    learned: str | None = option(
        None, "with --from, also write the machine as the runs show it to this .toml file"
    )
    host_memory: float | None = option(
        None, "GB of memory of a node's hosts (default: those of the cluster)"
    )
    memory_budget: str | None = option(
        None, f"{BUDGET_HELP} (default: the GPU's, less what is reserved and left free)"
    )
    memory_margin: float | None = option(
        None, "share of a GPU's memory to leave free (default: the cluster's, 0.05 as a rule)"
    )
    top: int = option(10, "number of layouts to show, the best of each mesh")
    why: str | None = option(
        None, "settings such as 'tp=4 pp=8': show how much slower the best layout with them is"
    )
    rules: bool = option(
        False, "show what the usual rules of thumb would choose, and how much slower that is"
    )
    proven: bool = option(
        False, "choose only schedules and techniques that published runs have used"
    )
    guide: bool = option(
        False, "show what the decision tables of public guides say, and what that would cost"
    )
    train_tokens: str | None = option(
        None, "tokens of a whole run, such as 15T: show GPU hours, days and checkpoints"
    )
    emit: Literal["fivefold", "megatron", "torchtitan", "deepspeed"] | None = option(
        None, "print only the settings for this trainer of the best layout that it can run"
    )
    html: str | None = option(
        None, "also write a page with timeline, memory and parts of the step time to this file"
    )
    json: bool = option(False, "print the result as JSON")
    calibrate: str | None = option(
        None, "measure this machine and write a cluster's .toml file, instead of planning"
    )
    score: str | None = option(
        None, "predict the published runs of a .csv file and print the errors, instead of planning"
    )
    nproc: int | None = option(None, "number of processes that --calibrate starts")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    if any(word.partition("=")[0] == "--calibrate" for word in argv):
        return _calibrate(argv)
    if any(word.partition("=")[0] == "--score" for word in argv):
        return _score(argv)
    loaded = load_with_origins(_with_model(argv), Options, models=True)
    options, tokens = loaded.options, _tokens(loaded.options.train_tokens)
    asked, known = _request(loaded, tokens)
    from fivefold.search.search import search
    from fivefold.tell.explain import changed
    from fivefold.tell.infeasible import why_nothing

    other = None if options.why is None else changed(asked, options.why)
    result = search(asked)
    if not result.found:
        raise _none_proven(asked) or why_nothing(result)
    notes: tuple[str, ...] = ()
    if options.emit is not None:
        from fivefold.tell.within import within

        result, notes = within(result, options.emit)
    if options.html is not None:
        from fivefold.tell.page import page

        text = page(result, tokens)
        try:
            write_atomic(options.html, text)
        except OSError as error:
            raise ConfigError(f"cannot write {options.html}: {error.strerror}") from None
    if options.emit is not None:
        _emit(result, options.emit, notes)
    elif options.json:
        from fivefold.tell.record import as_json

        told = as_json(result, tokens, options.top)
        if known is not None:
            from fivefold.learn.tell import record

            told["learned"] = record(known)
        if options.guide:
            from fivefold.tell.guide import as_json as advised

            told["guide"] = advised(result)
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(_report(result, options, tokens, other)))
        if known is not None:
            from fivefold.cli.from_runs import taught

            print("\n".join(_section("what the runs say", taught(known, result))))
    return 0


def _with_model(argv: Sequence[str]) -> Sequence[str]:
    """The command line, with a run of --from for a recipe where it names none."""
    if not any(word.partition("=")[0] in ("--from", "--from-runs") for word in argv):
        return argv
    from fivefold.cli.from_runs import with_model

    return with_model(argv)


def _score(argv: Sequence[str]) -> int:
    """Print the errors of the planner on published runs, instead of planning."""
    from fivefold.config.sources import load_options
    from fivefold.published.score import report

    options = load_options(argv, Options)

    assert options.score is not None
    found = report(Path(options.score))
    print(found.as_json() if options.json else found.table())
    return 0


def _calibrate(argv: Sequence[str]) -> int:
    """Measure this machine, instead of planning; only this part of the command loads torch."""
    from fivefold.config.sources import load_options

    options = load_options(argv, Options)
    from fivefold.calibrate.run import calibrate

    assert options.calibrate is not None
    return calibrate(Path(options.calibrate), options.nproc)


def _tokens(text: str | None) -> float | None:
    """The number that a text such as '15T' means; nan if it means none."""
    if text is None:
        return None
    scale = SUFFIXES.get(text[-1:].upper(), 1.0)
    try:
        return float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        return nan


def _request(loaded: Loaded[Options], tokens: float | None) -> tuple["Request", "Posterior | None"]:
    """The request of the command line, and what runs say of its machine, if any are given.

    Raises all mistakes at once, before the search.
    """
    from fivefold.config.model_rules import check_model
    from fivefold.config.values import check_values
    from fivefold.search.proven import PROVEN
    from fivefold.search.request import request

    options = loaded.options
    mistakes = Mistakes()
    check_values(loaded.config, mistakes)
    check_model(loaded.config.model, mistakes)
    for name, value in (("--gpus", options.gpus), ("--top", options.top)):
        if value is not None and value < 1:
            mistakes.add(f"{name} must be at least 1, not {value}")
    margin, budget = options.memory_margin, options.memory_budget
    if margin is not None and not 0 <= margin < 1:
        mistakes.add(
            f"--memory-margin must be a share from 0 to 1, not {margin}",
            works=("--memory-margin 0.05",),
        )
    if margin is not None and budget is not None:
        mistakes.add(
            f"--memory-budget {budget} leaves no room for --memory-margin {margin}: it is exact",
            works=("--memory-budget none", "--memory-margin none"),
        )
    room = options.host_memory
    if room is not None and not 0 < room < inf:
        mistakes.add(f"--host-memory must be a positive number of GB, not {room}")
    if tokens is not None and not 1 <= tokens < inf:
        mistakes.add(
            f"--train-tokens must be a number of tokens, not {options.train_tokens!r}",
            works=("15T", "100B", "3.5e11"),
        )
    if options.json and options.emit is not None:
        mistakes.add("--json and --emit both say what to print", works=("--no-json", "--emit none"))
    if options.html is not None:
        _check_page(Path(options.html), mistakes)
    if options.learned is not None and not options.from_runs:
        mistakes.add(f"--learned {options.learned} needs runs", works=("--learned none",))
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
    if room is not None:
        cluster = replace(cluster, host_memory_bytes=room * GB)
    origins = {"by_flag": loaded.by_flag, "by_recipe": loaded.by_recipe}
    asked = request(loaded.config, cluster, **origins)
    return asked.among(PROVEN) if options.proven else asked, known


def _none_proven(asked: "Request") -> ConfigError | None:
    """The error to raise where nothing fits but what no published run has used."""
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
    """The machine to plan for, and what the given runs say of it."""
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


def _emit(result: "SearchResult", target: str, notes: Sequence[str]) -> None:
    """Print the settings on standard output, and notes on missing ones on standard error."""
    from fivefold.tell.export.targets import export

    found = export(result.best.layout, target)
    sys.stdout.write(found.text)
    for note in (*notes, *found.missing):
        print(f"{paint('note:', 'yellow', sys.stderr)} {note}", file=sys.stderr)


def _report(
    result: "SearchResult", options: Options, tokens: float | None, other: "Request | None"
) -> Iterator[str]:
    from fivefold.counts.derived import moved_and_kept
    from fivefold.tell import report
    from fivefold.tell.columns import listed, prose
    from fivefold.tell.efficiency import opened

    assert result.best.prediction is not None
    yield from report.question(result)
    yield from _section("layouts, the best of each mesh", report.ranked(result, options.top))
    yield from prose([report.counts(result)])
    yield from _section("the best", prose(report.best(result)))
    yield from _section("where the time goes", report.waterfall(result.best.prediction))
    yield from _section("kernel efficiency, opened", opened(result.best.prediction))
    yield from _section("memory by pipeline rank", report.memory_table(result.best))
    moved = moved_and_kept(result.best.layout)
    yield from _section("bytes sent in a step, and kept of a microbatch", listed(moved, right=(1,)))
    yield from _section("why", report.explained(result))
    yield from _section("time for memory", report.pareto(result))
    yield from _section("a whole run", prose(report.cost_lines(result, tokens)))
    if options.rules:
        from fivefold.tell.rules import rule_of_thumb

        rule = rule_of_thumb(result.request)
        yield from _section("the rule of thumb", prose(report.rules(result, rule)))
    if options.guide:
        from fivefold.tell.guide import guide

        yield from _section("what guides say", guide(result))
    if other is not None:
        from fivefold.search.search import search

        text = str(options.why)
        found = report.why(result, search(other), text)
        yield from _section(f"why not {text}?", prose(found))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield ""
    yield paint(title, "bold", sys.stdout)
    yield from lines
