"""`fivefold rehearse`: run ranks of any layout on this machine, on tensors without values."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.check import check
from fivefold.cli.helps import JSON_HELP, RECIPE_HELP
from fivefold.cli.style import note
from fivefold.cli.verdict import tell
from fivefold.config.settings import Count, argument, option
from fivefold.config.sources import load
from fivefold.predict.cluster_file import load_cluster
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.tell.describe import parallelism


@dataclass(frozen=True)
class Options:
    """Run a step of one rank of each role of a layout of any size, without its memory or network.

    The ranks run the code of training, on tensors that have shapes but no values. The output shows
    memory, operations, waits of the host and bytes sent, and compares them with the planner and
    theory. The exit status is 0 only if every collective and every message of the rehearsed ranks
    has its counterpart on the other ranks, and all bytes equal theory.
    """

    recipe: str | None = argument(RECIPE_HELP, None)
    nproc: Count = option(1, "ranks of the job; only a few of them are run")
    ranks: Literal["roles", "every"] = option(
        "roles", "which ranks to run: one of each role, or every one"
    )
    microbatches: Literal["distinct", "every"] = option(
        "distinct", "which microbatches to run: those that differ from earlier ones, or every one"
    )
    device: Literal["gpu", "cpu"] = option("gpu", "device of the job, for which the code differs")
    jobs: Count | None = option(None, "processes that run ranks (default: one per core)")
    cluster: str = option(
        "H100", "kind of GPU, or TOML file of a cluster, whose prediction is compared"
    )
    json: bool = option(False, JSON_HELP)


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options, config = load(argv, Options, note)
    whole = check(config, options.nproc)
    layout = rehearsed_layout(whole)
    cluster = load_cluster(options.cluster, options.nproc)
    from fivefold.rehearse.run import rehearse_ranks

    scripts = rehearse_ranks(
        layout,
        roles(layout, every=options.ranks == "every"),
        gpus=options.device == "gpu",
        every=options.microbatches == "every",
        processes=options.jobs or os.cpu_count() or 1,
    )
    title = f"{len(scripts)} of {parallelism(layout)}"
    if layout.num_microbatches < whole.num_microbatches:
        title += (
            f" of {whole.num_microbatches}: as many as a rank holds at once, "
            "with gradients of all its stages"
        )
    return tell(make_report(layout, title, scripts, cluster), as_json=options.json)
