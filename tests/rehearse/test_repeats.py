"""Microbatches that repeat others are told exactly as if they had run."""

from collections import Counter
from dataclasses import fields, replace
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.layout import Layout
from fivefold.model.mlp import MLP
from fivefold.pipeline.ir import COMPUTE, Act
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.rehearse.repeats import RECORDED, repeated_microbatches, sorts_of
from fivefold.rehearse.roles import rehearsed_layout, roles
from fivefold.rehearse.run import rehearse_rank
from fivefold.rehearse.script import Script
from tests.verify.any_settings import ALL, draw
from tests.verify.cases import chosen
from tests.verify.cases import config as small_config

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "two copies of weights in a V, experts, further tokens": (
        "debug-deepseek-v3",
        4,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "zb_v",
            "expert_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads",
            "pipeline_model_parallel_layout": "auto",
        },
    ),
    "interleaved, split tokens, a load that is summed over microbatches": (
        "debug-mixtral",
        4,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "interleaved_1f1b",
            "num_virtual_stages_per_pipeline_rank": 2,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (0.01,),
        },
    ),
    "slices, gathered weights": (
        "debug-llama",
        4,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_schedule": "sliced_1f1b",
            "num_sequence_slices": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    ),
    "recomputed stages, weights on the host": (
        "debug-llama",
        2,
        {
            "data_parallel_sharding_strategy": "optim_grads_params",
            "offload_optimizer_states": True,
            "param_cpu_offload": True,
            "recompute_granularity": "full",
        },
    ),
    "no pipeline, ring of contexts": (
        "debug-llama",
        2,
        {"context_parallel_size": 2, "num_layers": 1},
    ),
}


def _long(name: str) -> Layout:
    """A layout with more microbatches than a rehearsal would take."""
    model, world, settings = CASES[name]
    common = {"num_layers": 4, "seq_length": 16, "precision": "bf16", "micro_batch_size": 1}
    asked = check(Config(resolve_model(model)).with_values(**(common | settings)), world)
    layout = rehearsed_layout(asked)
    return check(layout.config.with_batch(10 * layout.grid.dp), world)


def _unlike(one: Script, other: Script) -> list[str]:
    """Names of what two scripts differ in, beside time and what was counted instead of run."""
    names = {each.name for each in fields(Script)} - {"seconds", "repeated"}
    return [name for name in sorted(names) if getattr(one, name) != getattr(other, name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(CASES, *list(CASES)[:2]))
def test_what_is_counted_is_what_runs(name: str) -> None:
    """To the byte, but for loads of experts that a later microbatch would have replaced."""
    layout = _long(name)
    rank = layout.grid.world_size - 1
    here, whole = (rehearse_rank(layout, rank, every=every) for every in (False, True))
    assert 0 == whole.repeated < here.repeated > here.acts // 3
    if "load" in name:
        assert 0 <= here.peak - whole.peak < 1000
        here = replace(here, peak=whole.peak, held=whole.held, peak_at=whole.peak_at)
    assert _unlike(here, whole) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", chosen(range(100, 140)))
def test_what_is_counted_is_what_runs_with_any_settings(seed: int) -> None:
    random = Random(seed)
    name, world = random.choice(sorted(ALL)), random.choice((1, 2, 4, 8))
    settings = draw(random, lambda drawn: check(small_config(ALL[name], **drawn), world))
    layout = rehearsed_layout(check(small_config(ALL[name], **settings), world))
    each = layout.config.training.micro_batch_size * layout.grid.dp
    least = max(layout.num_microbatches, 10)
    layout = check(layout.config.with_batch(-(-least // 4) * 4 * each), world)
    rank = random.choice(roles(layout))
    here, whole = (rehearse_rank(layout, rank, every=every) for every in (False, True))
    assert abs(here.peak - whole.peak) < 1e-3 * whole.peak
    here = replace(here, peak=whole.peak, held=whole.held, peak_at=whole.peak_at)
    assert _unlike(here, whole) == [], f"{name} on {world}, rank {rank}: {settings}"


def test_microbatches_that_differ_all_run() -> None:
    """Planted: an MLP that keeps more of each further microbatch."""
    layout = _long("no pipeline, ring of contexts")
    forward = MLP.forward

    def careless(self: Any, x_TH: Tensor, *others: Any) -> Tensor:
        self.kept = [*getattr(self, "kept", ()), x_TH.new_empty(len(getattr(self, "kept", ())))]
        return forward(self, x_TH, *others)

    with patch.object(MLP, "forward", careless):
        scripts = [rehearse_rank(layout, 0, every=every) for every in (False, True)]
    assert scripts[0].repeated == 0 < rehearse_rank(layout, 0).repeated
    assert _unlike(*scripts) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_repeats_has_run_before(name: str) -> None:
    config = Config(resolve_model("debug-llama")).with_values(
        num_layers=8,
        pipeline_schedule=name,
        pipeline_model_parallel_size=2,
        num_sequence_slices=2 if SCHEDULES[name].slices else 1,
    )
    for acts in check(config.with_batch(16), 2).program().ranks:
        _repeats_after(acts)


def _repeats_after(acts: tuple[Act, ...]) -> None:
    computes = [act for act in acts if act.kind in COMPUTE]
    last = {act.stage: act.mb for act in computes if not act.kids}
    sorts = sorts_of(computes)
    repeated = repeated_microbatches(sorts, set(last.items()))
    ran: Counter[Any] = Counter()
    for act in computes:
        if (act.stage, act.mb) not in repeated:
            ran[sorts[act]] += 1
            continue
        assert act.mb != last[act.stage]
        assert ran[sorts[act]] >= RECORDED
    assert repeated or any(act.kids for act in computes)
