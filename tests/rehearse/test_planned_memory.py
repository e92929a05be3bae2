"""The planner's peak of layers of real width against rehearsed ranks, with settings at random."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.config.sharding import SHARDING
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.predict.cluster import load_cluster
from fivefold.rehearse.report import make_report
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_ranks
from tests.verify.cases import chosen

LESS, MORE = 0.06, 0.07
"""A rank may need so much more than predicted, and so much less, of a model of few layers, in which
what one block needs for a moment weighs much."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "gpipe", "dualpipe_v")
RECOMPUTED = ("core_attn", "mlp", "layernorm")


def drawn(seed: int) -> Layout:
    """A legal layout of up to 64 ranks, with eight layers of a model."""
    draw = random.Random(seed)
    while True:
        model = replace(resolve_model(draw.choice(("llama3-8b", "qwen3-8b"))), num_layers=8)
        settings = dict(_settings(draw))
        ranks = settings.pop("ranks")
        try:
            config = Config(replace(model, vocab_size=32768)).with_values(**settings)
            return rehearsed_layout(check(config, ranks))
        except ConfigError:
            continue


def _settings(draw: random.Random) -> Iterator[tuple[str, Any]]:
    tp, pp, dp = draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2, 4)), draw.choice((1, 2, 4))
    rows, micro = draw.choice((1, 2, 4, 8)), draw.choice((1, 1, 2))
    yield "ranks", tp * pp * dp
    yield "precision", "bf16"
    yield "tensor_model_parallel_size", tp
    yield "sequence_parallel", tp > 1 and draw.random() < 0.7
    yield "pipeline_model_parallel_size", pp
    yield "data_parallel_sharding_strategy", draw.choice([*SHARDING])
    yield "seq_length", draw.choice((1024, 2048, 4096))
    yield "micro_batch_size", micro
    yield "global_batch_size", micro * dp * (rows if pp == 1 else 2 * pp)
    if pp > 1:
        schedule = draw.choice(SCHEDULES)
        yield "pipeline_schedule", schedule
        yield "num_virtual_stages_per_pipeline_rank", 1 + (schedule == "interleaved_1f1b")
        yield "pipeline_dx_first", draw.random() < 0.8
    granularity = draw.choice((None, None, "selective", "full"))
    yield "recompute_granularity", granularity
    if granularity == "selective":
        yield "recompute_modules", tuple(draw.sample(RECOMPUTED, draw.choice((1, 2))))
    yield "optimizer_cpu_offload", draw.random() < 0.15
    yield "cross_entropy_loss_fusion", draw.random() < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(100), 0, 1))
def test_a_rank_needs_what_is_planned(seed: int) -> None:
    layout = drawn(seed)
    one_of_each = {layout.grid.coordinates(rank)["pp"]: rank for rank in reversed(roles(layout))}
    scripts = rehearse_ranks(layout, sorted(one_of_each.values()))
    report = make_report(layout, "", scripts, load_cluster("H100", 8))
    assert report.passed, report.text()
    told = f"{layout.config.parallel}\n{layout.config.training}\n{report.as_json()['ranks']}"
    for script, planned in zip(scripts, report.planned, strict=True):
        assert -MORE < script.peak / planned.peak - 1 < LESS, told
