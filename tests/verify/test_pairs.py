"""Forwards and backwards in turns compute what one device computes, and really alternate."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.expert.transfer import AsyncAllToAll
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.verify.report import VerifyReport
from tests.verify.cases import MIXTURE, compare_on_rank, config, named, verify_in_pool
from tests.verify.test_experts import BALANCED, PREDICTING
from tests.verify.test_matrix import measured

pytestmark = pytest.mark.slow

IN_V = {"pipeline_model_parallel_layout": "Et|t||tL", "pipeline_schedule": "dualpipe_v"}
NAME = "overlap_moe_expert_parallel_comm"
TURNS = {
    NAME: True,
    "pipeline_schedule": "combined_1f1b",
    "pp": 2,
    "ep": 2,
}
DELAYED = TURNS | {"delay_wgrad_compute": True}
LOOP = {"pipeline_model_parallel_layout": "E|t|t|tL", "global_batch_size": 8}
BIASED = {"moe_router_enable_expert_bias": True}
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (4, BIASED, TURNS | LOOP | BALANCED),
    (4, {}, DELAYED | IN_V | {"dispatcher": "flex", "strategy": "optim_grads"}),
    (
        2,
        {},
        DELAYED
        | {"pp": 1, "strategy": "optim_grads_params", "dispatcher": "flex"}
        | {"pipeline_max_unsharded_stages": 1},
    ),
    (
        4,
        BIASED,
        DELAYED
        | {"pipeline_schedule": "dualpipe", "strategy": "optim"}
        | {"pipeline_model_parallel_layout": "Et|ttL"},
    ),
    (
        4,
        {"qk_layernorm": True, "hidden_dropout": 0.1},
        DELAYED
        | {"pp": 1, "cp": 2, "tp": 2, "moe_expert_capacity_factor": 0.7}
        | {
            "recompute_granularity": "selective",
            "recompute_modules": (
                "a2a_overlap_attn",
                "a2a_overlap_post_attn",
                "a2a_overlap_mlp",
                "layernorm",
            ),
        },
    ),
    (8, {}, TURNS | IN_V | {"tp": 2, "etp": 2, "strategy": "optim_grads_params"}),
    (
        4,
        PREDICTING,
        DELAYED
        | {"pipeline_model_parallel_layout": "Etttm|L"}
        | {
            "pipeline_schedule": "combined_1f1b",
            "recompute_granularity": "selective",
            "recompute_modules": ("core_attn", "moe_act", "layernorm", "shared_experts"),
        },
    ),
]


# Each setting of these is in another case, too, here or in test_schedules.py.
AGAIN = (0, 3, 5)
CHOSEN = [
    pytest.param(*case, marks=pytest.mark.exhaustive) if place in AGAIN else case
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize(("ranks", "model", "values"), CHOSEN, ids=str)
def test_pairs(ranks: int, model: dict[str, Any], values: dict[str, Any]) -> None:
    found = config(replace(MIXTURE, **model), ranks, **named(**values))
    steps = 1 + bool(model.get("moe_router_enable_expert_bias"))  # which the second step uses
    report = verify_in_pool(ranks, found, on_rank=measured, steps=steps)
    assert report.passed, report.text()


def test_layers_that_are_freed_cannot_alternate() -> None:
    values = named(**TURNS | LOOP | {"strategy": "optim_grads_params"})
    with pytest.raises(ConfigError, match="gathers and frees layer by layer") as refused:
        check(config(MIXTURE, **values), 4)
    assert "--pipeline-max-unsharded-stages 1" in str(refused.value)
    check(config(MIXTURE, **values, pipeline_max_unsharded_stages=1), 4)


@pytest.mark.parametrize(
    ("modules", "more", "says"),
    [
        (("a2a_overlap_mlp",), {NAME: False}, "interleaves, and it is off"),
        (("a2a_overlap_attn", "core_attn"), {}, "core_attn would recompute the same twice"),
        (("a2a_overlap_post_attn", "moe"), {}, "moe would recompute the same twice"),
        (
            ("a2a_overlap_attn",),
            {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
            "core_attn cannot be both recomputed and offloaded",
        ),
    ],
)
def test_what_modules_of_halves_contradict(
    modules: tuple[str, ...], more: dict[str, Any], says: str
) -> None:
    again = {"recompute_granularity": "selective", "recompute_modules": modules}
    with pytest.raises(ConfigError, match=says):
        check(config(MIXTURE, **named(**TURNS | {"pp": 1} | again | more)), 2)


def _crossed(rank: int, world_size: int, *arguments: Any) -> VerifyReport | None:
    """Compare with one device; see that messages of both directions were under way at once, that
    few of them were not, and that weight gradients were computed meanwhile."""
    under_way: dict[str, int] = {"forward": 0, "backward": 0}
    direction: dict[int, str] = {}
    crossed, early = [], []
    begin, wait, run_early = AsyncAllToAll.begin, AsyncAllToAll.wait, DeferredWeights.run_early

    def begins(flight: AsyncAllToAll, x: torch.Tensor, *, backward: bool) -> torch.Tensor:
        direction[id(flight)] = "backward" if backward else "forward"
        under_way[direction[id(flight)]] += 1
        crossed.append(all(under_way.values()))
        return begin(flight, x, backward=backward)

    def waits(flight: AsyncAllToAll) -> torch.Tensor:
        out = wait(flight)
        under_way[direction[id(flight)]] -= 1
        return out

    def runs(deferred: DeferredWeights) -> None:
        early.append(bool(deferred._works))
        run_early(deferred)

    with (
        patch.object(AsyncAllToAll, "begin", begins),
        patch.object(AsyncAllToAll, "wait", waits),
        patch.object(DeferredWeights, "run_early", runs),
    ):
        report = compare_on_rank(rank, world_size, *arguments)
    parallel = arguments[0].config.parallel
    pairs = parallel.overlap_moe_expert_parallel_comm
    assert any(crossed) == pairs and not any(under_way.values())
    assert any(early) == parallel.delay_wgrad_compute
    return report


@pytest.mark.parametrize(
    "values",
    [DELAYED, pytest.param(TURNS, marks=pytest.mark.exhaustive), TURNS | {NAME: False}],
    ids=str,
)
def test_messages_of_both_halves_are_under_way_at_once(values: dict[str, Any]) -> None:
    found = config(MIXTURE, 2, **named(**values | {"pp": 1}))
    report = verify_in_pool(2, found, on_rank=_crossed)
    assert report.passed, report.text()
