"""`plan --from RUN...`: the machine as measured by runs on it, and what these runs could gain."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fivefold.errors import ConfigError
from fivefold.files import telling_unwritable, write_atomic
from fivefold.learn.posterior import Posterior, learned
from fivefold.learn.runs import machine_of, observed
from fivefold.learn.tell import advice, constants_table, runs_table
from fivefold.predict.cluster_file import load_cluster, to_toml
from fivefold.report.settings import run_settings
from fivefold.search.request import ASSUMABLE, request
from fivefold.search.search import SearchResult, search
from fivefold.tell.columns import prose


def with_model(argv: Sequence[str]) -> list[str]:
    """The command line, with the settings of the last run of --from if it names no recipe.

    Raises:
        DataError: it is not a run folder.
    """
    words = [word.partition("=") for word in argv]
    flags = [i for i, word in enumerate(words) if word[0] in ("--from", "--from-runs")]
    if not flags or not argv[0].startswith("--"):
        return list(argv)
    at = flags[-1]
    runs = [words[at][2]] if words[at][1] else []
    for word in argv[at + 1 :]:
        if runs[:1] == [words[at][2]] or word.startswith("--"):
            break
        runs.append(word)
    if not runs or not runs[-1]:
        return list(argv)
    settings = run_settings(Path(runs[-1]))
    return [str(settings), *argv]


def machine(runs: Sequence[str], cluster: str | None, file: str | None) -> Posterior:
    """The machine that runs show.

    Args:
        runs: run folders.
        cluster: what is known beforehand: kind of GPU, or TOML file; None: that of the runs.
        file: TOML file to write the machine to; None: none.

    Raises:
        DataError: a folder is none of a run, or has no times.
        ConfigError: the machine is not known, or the file cannot be written.
    """
    found = [observed(Path(run)) for run in runs]
    name = cluster or machine_of([history for _, history in found])
    most = max(run.layout.grid.world_size for run, _ in found)
    known = learned(load_cluster(name, most), [run for run, _ in found])
    if file is not None:
        learned_one = replace(known.cluster, name=f"{known.prior.name} by {len(found)} runs")
        with telling_unwritable(file, ConfigError):
            write_atomic(file, to_toml(learned_one))
    return known


def could_gain(folder: Path, cluster: str | None) -> list[str]:
    """What a run could gain by the planner's layout, as a sentence; empty if none fits.

    Args:
        folder: run folder.
        cluster: what is known of its machine, as for `machine`.

    Raises:
        DataError: it is not a run folder, or has no times.
        ConfigError: the machine is not known, or the settings cannot be planned for.
    """
    known = machine([str(folder)], cluster, None)
    (run,) = known.observations
    ranks, config = run.layout.grid.world_size, run.layout.config
    found = search(request(config, replace(known.cluster, num_gpus=ranks), by_recipe=ASSUMABLE))
    return [advice(known, run, found.best.layout)] if found.found else []


def taught(known: Posterior, result: SearchResult) -> Iterator[str]:
    """What the runs show: the planner's errors, the fitted constants, and what a run could gain."""
    yield from runs_table(known)
    yield ""
    yield from constants_table(known)
    same = result.request.config.model, result.request.world
    training = result.request.config.training
    sizes = training.seq_length, training.global_batch_size
    for run in known.observations:
        theirs = run.layout.config.training
        is_asked = (run.layout.config.model, run.layout.grid.world_size) == same
        if is_asked and (theirs.seq_length, theirs.global_batch_size) == sizes:
            yield from prose([advice(known, run, result.best.layout)])
