"""Where the layouts of published runs come out in the planner's ranking, and how long it searches.

    python -m benchmarks.planner_search

For each run: the best layout of the published degrees, its place among the meshes that were looked
at and the share of all legal layouts whose lower bound is below its time; what the planner would
change, and why; CPU seconds of the search on one core, and by how much its bounds leave a layout
that was not looked at to be faster. Then the bounds of a million layouts, and how close they are
to the predictions of random ones.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.step import predict
from fivefold.search.bound_tables import Ranks
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import memory_bound
from fivefold.search.request import Request, request
from fivefold.search.search import legal_space, search
from fivefold.search.time_bound import time_bound
from fivefold.tell.describe import summary
from fivefold.tell.explain import shortfall, slower
from fivefold.units import human_seconds


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        name: and source.
        model: preset.
        gpu: kind.
        gpus: how many.
        published: its degrees of parallelism, by field name; none for a run that nobody published.
        settings: batch, length and types.
    """

    name: str
    model: str
    gpu: str
    gpus: int
    published: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)


SAMPLE = 250  # random layouts that are predicted
LONGEST = 2_000  # forwards of their programs
DEEPSEEK = {
    "seq_length": 4096,
    "global_batch_size": 15_360,
    "fp8_format": "e4m3",
    "moe_token_dispatcher_type": "flex",
}
RUNS = (
    Run(
        "Llama 3.1 405B (Llama 3 Herd of Models, table 4)",
        "llama3-405b",
        "H100",
        16_384,
        {
            "tensor_model_parallel_size": 8,
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 16,
        },
        {"seq_length": 8192, "global_batch_size": 2048},
    ),
    Run(
        "DeepSeek-V3 (technical report, section 3.2)",
        "deepseek-v3",
        "H800",
        2048,
        {
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 16,
            "expert_model_parallel_size": 64,
        },
        DEEPSEEK,
    ),
    Run(
        "GPT 1T (Narayanan et al. 2021, table 1)",
        "gpt-1t",
        "A100",
        3072,
        {
            "tensor_model_parallel_size": 8,
            "context_parallel_size": 1,
            "pipeline_model_parallel_size": 64,
        },
        {"seq_length": 2048, "global_batch_size": 3072},
    ),
    Run("DeepSeek-V3 on a larger cluster", "deepseek-v3", "H100", 16_384, {}, DEEPSEEK),
)


def question(run: Run) -> Request:
    """What the planner is asked: the model and the batch, no layout."""
    config = Config(PRESETS[run.model]).with_values(**run.settings)
    return request(config, load_cluster(run.gpu, run.gpus), by_flag=run.settings)


def restricted(asked: Request, published: dict[str, Any]) -> Request:
    """The same with the published degrees."""
    config = asked.config.with_values(**published)
    return replace(asked, config=config, given=asked.given | set(published))


def faster_share(asked: Request, seconds: float) -> float:
    """Of all legal layouts, those that may fit and be faster, by their bounds."""
    space = legal_space(asked)
    ranks = Ranks.of(asked.config.model, space.partitions)
    fits = np.flatnonzero(memory_bound(space, ranks) <= asked.cluster.room)
    bounds = time_bound(space.take(fits), ranks, asked.cluster).seconds
    return float((bounds < seconds).sum() / len(space))


def report(run: Run) -> Iterator[str]:
    """Lines on one run."""
    asked = question(run)
    began = time.process_time()
    result = search(asked)
    cpu = time.process_time() - began
    yield f"## {run.name}"
    yield (
        f"{run.gpus:,} x {run.gpu}; searched {result.legal:,} legal layouts in {cpu:.1f} CPU s; "
        f"by their bounds none that was not looked at is more than {result.gap:.1%} faster"
    )
    best = result.best
    yield (
        f"planner:   {summary(best.layout)}: {human_seconds(best.seconds)}, "
        f"MFU {best.predicted.mfu:.1%}"
    )
    if not run.published:
        return
    found = search(restricted(asked, run.published))
    if not found.found:
        nearest = min(found.rejected, key=lambda c: c.memory.device_total)
        yield f"published: {summary(nearest.layout)} {shortfall(nearest.memory)}"
        return
    published = found.best
    place = 1 + sum(c.seconds < published.seconds for c in result.by_mesh())
    yield (
        f"published: {summary(published.layout)}: {human_seconds(published.seconds)}, "
        f"MFU {published.predicted.mfu:.1%}"
    )
    yield (
        f"place {place} of {len(result.by_mesh())} meshes looked at; at most "
        f"{faster_share(asked, published.seconds):.2%} of the legal layouts are faster"
    )
    yield f"against the planner's: {slower(best.predicted, published.predicted)}"


def speed() -> Iterator[str]:
    """How long it takes to bound a million layouts."""
    asked = question(RUNS[1])
    began = time.process_time()
    space = enumerate_space(asked.config, asked.world)
    ranks = Ranks.of(asked.config.model, space.partitions)
    enumerated = time.process_time()
    few = space.take(np.arange(min(len(space), 1_000_000)))
    memory_bound(few, ranks)
    memory = time.process_time()
    time_bound(few, ranks, asked.cluster)
    end = time.process_time()
    yield "## Bounds"
    yield (
        f"{len(space):,} layouts enumerated in {enumerated - began:.1f} CPU s; {len(few):,} of "
        f"them bounded in memory in {memory - enumerated:.1f} s and in time in {end - memory:.1f} s"
    )


def tightness(run: Run) -> Iterator[str]:
    """What bounds on time are of predictions, by schedule, over random layouts."""
    asked = question(run)
    space = legal_space(asked)
    stages = np.array([len(partition.split.stages) for partition in space.partitions])[
        space.columns["partition"]
    ]
    acts = stages * np.minimum(space.columns["microbatches"], 4 * space.columns["pp"])
    few = np.random.default_rng(0).choice(np.flatnonzero(acts < LONGEST), SAMPLE)
    sample = space.take(few)
    ranks = Ranks.of(asked.config.model, sample.partitions)
    bounds = time_bound(sample, ranks, asked.cluster).seconds
    shares: dict[str, list[float]] = {}
    for row, bound in enumerate(bounds.tolist()):
        step = predict(check(sample.config_of(row), asked.world, planned=True), asked.cluster)
        schedule = sample.partitions[int(sample.columns["partition"][row])].schedule
        shares.setdefault(schedule, []).append(bound / step.step_time)
    found = ", ".join(f"{name} {fmean(each):.3f}" for name, each in sorted(shares.items()))
    most = max(max(each) for each in shares.values())
    yield f"bounds over predictions of {SAMPLE} layouts of {run.model}: {found}; at most {most:.3f}"


def main() -> int:
    for run in RUNS:
        print("\n".join(report(run)), flush=True)
    print("\n".join(speed()), flush=True)
    for run in RUNS[:2]:
        print("\n".join(tightness(run)), flush=True)
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    sys.exit(main())
