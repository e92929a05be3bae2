"""Faster hardware makes no layout slower, whatever limits it: kernels, messages, copies, the host.

Layouts are drawn from what is legal for small models, whose kernels wait for the host, and large
ones, whose messages and weights count, on every kind of cluster.
"""

import random
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest

from fivefold.check import check
from fivefold.cli.plan_options import Options, planned_request
from fivefold.config.sources import load_with_origins
from fivefold.hardware import GPUS, Rates
from fivefold.layout import Layout
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.predict.cluster import Cluster, Link, preset
from fivefold.predict.prediction import Prediction
from fivefold.predict.program.makespan import Clock
from fivefold.predict.step import predict
from fivefold.search.bound_tables import Ranks
from fivefold.search.branch_and_bound import layout_of
from fivefold.search.search import legal_space
from fivefold.search.space import Space
from fivefold.search.time_bound import quick_time_bound, time_bound
from tests.predict.layouts import planned

MODELS = ("debug-llama", "debug-gpt", "debug-mixtral", "gpt2", "deepseek-v2-lite", "mixtral-8x7b")
SETTINGS = (
    *("", "", "--no-pipeline-dx-first", "--data-parallel-sharding-strategy optim_grads"),
    *("--data-parallel-sharding-strategy optim_grads_params", "--recompute-granularity full"),
)
PARTS, QUESTIONS, ROWS = 2, 20, 4
ROUNDED = 1 + 1e-9


def questions(part: int) -> Iterator[tuple[Space, Cluster]]:
    """Some rows of the layouts of each of the random questions that has any."""
    for seed in range(part, PARTS * QUESTIONS, PARTS):
        rng = random.Random(seed)
        words = [rng.choice(MODELS), "--cluster", shlex.quote(rng.choice(list(GPUS)))]
        words += ["--gpus", str(rng.choice((2, 4, 8, 16, 64))), "--gbs", rng.choice(("16", "64"))]
        words += ["--seq-length", rng.choice(("256", "1024")), "--precision bf16"]
        line = " ".join([*words, rng.choice(SETTINGS)])
        asked, _ = planned_request(load_with_origins(shlex.split(line), Options, models=True), None)
        space = legal_space(asked)
        pipelines = np.flatnonzero(space.columns["pp"] > 1).tolist()  # where most can go wrong
        if pipelines:
            few = rng.sample(pipelines, min(ROWS - 1, len(pipelines)))
            yield space.take(np.array([rng.randrange(len(space)), *few])), asked.cluster


def layouts(part: int) -> Iterator[tuple[Layout, Cluster]]:
    """Layouts whose whole programs are timed: those of many microbatches are extrapolated."""
    for space, cluster in questions(part):
        for row in range(len(space)):
            layout = layout_of(space, row)
            if layout.schedule == SYNTHESISED:  # takes a second to find
                continue
            if len(Clock.of(layout, eager=layout.sends_dx_first).tables) == 1:
                yield layout, cluster


def faster(cluster: Cluster, times: float) -> Iterator[tuple[str, Cluster]]:
    """The cluster with one of its parts faster."""
    gpu = cluster.gpu

    def rates(slow: Rates) -> Rates:
        each = ((field.name, getattr(slow, field.name)) for field in fields(slow))
        return Rates(**{name: rate and rate * times for name, rate in each})

    def links(link: Link) -> tuple[Link, Link]:
        return (
            replace(link, bandwidth=link.bandwidth * times),
            replace(link, latency=link.latency / times),
        )

    for change in (
        {"peak": rates(gpu.peak)},
        {"matmul": rates(gpu.matmul)},
        {"memory_bandwidth": gpu.memory_bandwidth * times},
        {"launch": gpu.launch / times},
        {"overlap_slowdown": gpu.overlap_slowdown / times},
    ):
        yield "gpu." + ", ".join(change), replace(cluster, gpu=replace(gpu, **change))
    for node, network in zip(links(cluster.node_link), links(cluster.network_link), strict=True):
        yield "node_link", replace(cluster, node_link=node)
        yield "network_link", replace(cluster, network_link=network)
    yield "host_bandwidth", replace(cluster, host_bandwidth=cluster.host_bandwidth * times)
    yield "host_operation", replace(cluster, host_operation=cluster.host_operation / times)
    yield "jitter", replace(cluster, jitter=cluster.jitter / times)


def check_figures(made: Prediction) -> None:
    parts = {part.name: part.seconds for part in made.parts}
    assert sum(parts.values()) == pytest.approx(made.step_time, rel=1e-12)
    assert min(parts.values()) > -1e-9 * made.step_time, parts
    assert made.low < made.step_time < made.high
    assert 0 < made.mfu <= 1


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_that_is_faster_makes_a_step_longer(part: int) -> None:
    count = 0
    for layout, cluster in layouts(part):
        count += 1
        made = predict(layout, cluster)
        check_figures(made)
        limit = made.step_time * ROUNDED
        for change, better in faster(cluster, (1.05, 1.5, 4.0)[count % 3]):
            found = predict(layout, better)
            assert found.step_time <= limit, (change, cluster.name, layout)
    assert count > 30


@pytest.mark.slow
def test_a_larger_batch_takes_longer() -> None:
    count = 0
    for layout, cluster in layouts(0):
        batch = layout.config.training.global_batch_size
        times = [
            predict(check(config, layout.grid.world_size, planned=True), cluster).step_time
            for config in (layout.config.with_values(global_batch_size=n * batch) for n in (1, 2))
        ]
        assert times[0] < times[1]
        count += 1
    assert count > 30


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_bounds_hold_where_kernels_wait_for_the_host(part: int) -> None:
    count = 0
    for space, cluster in questions(part):
        ranks = Ranks.of(space.config.model, space.partitions)
        closer = time_bound(space, ranks, cluster).seconds
        quick = quick_time_bound(space, ranks, cluster)
        for row, *bounds in zip(range(len(space)), closer, quick, strict=True):
            layout = layout_of(space, row)
            if layout.schedule != SYNTHESISED:
                assert max(bounds) <= predict(layout, cluster).step_time * ROUNDED, layout
                count += 1
    assert count > 30


@pytest.mark.parametrize("length", [1, 900, 131_072])
def test_model_flops_are_those_of_documents(length: int) -> None:
    """Where documents are short, the attention of whole rows would be more than the peak."""
    layout = planned("llama3-8b", 8, cp=8, gbs=8, seq=131_072, document_length=length)
    check_figures(predict(layout, preset("H100", 8)))
