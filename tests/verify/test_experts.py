"""Mixtures of experts in every layout compute what one device computes, and send what the formulas
say."""

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.cases import MIXTURE, config, verify_in_pool
from tests.verify.test_matrix import measured


def _settings(**values: Any) -> dict[str, Any]:
    named = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
        "strategy": "data_parallel_sharding_strategy",
        "dispatcher": "moe_token_dispatcher_type",
        "replicas": "num_distributed_optimizer_instances",
    }
    found = {named.get(key, key): value for key, value in values.items()}
    return found | ({"sequence_parallel": True} if values.get("tp", 1) > 1 else {})


BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2),
}
# Ranks, model, settings: each dispatcher with every degree, strategy and kind of balance somewhere.
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (1, {}, {"moe_z_loss_coeff": 0.1}),
    (2, {}, {"ep": 2, **BALANCED}),
    (2, {}, {"ep": 2, "dispatcher": "flex", "moe_expert_capacity_factor": 1e9}),
    (2, {}, {"ep": 2, "dispatcher": "allgather", "precision": "bf16"}),
    (2, {}, {"etp": 2, "precision": "fp32"}),
    (2, {}, {"tp": 2, "ep": 2, **BALANCED}),
    (
        2,
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
        {"cp": 2, "ep": 2, **BALANCED},
    ),
    (
        4,
        {"add_bias_linear": True, "activation_func": "gelu"},
        {"ep": 2, "etp": 2, "dispatcher": "flex", "strategy": "optim_grads"},
    ),
    (
        4,
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
        {"ep": 2, "etp": 2, "cp": 2, "strategy": "optim"},
    ),
    (4, {"moe_shared_expert_gate": True}, {"ep": 2, "strategy": "optim_grads_params"}),
    (
        4,
        {"moe_router_pre_softmax": True},
        {"ep": 4, "tp": 2, "dispatcher": "flex", "moe_router_load_balancing_type": ("sinkhorn",)},
    ),
    (
        4,
        {"moe_router_topk": 1},
        {
            "ep": 2,
            "pp": 2,
            "pipeline_schedule": "zb_h1",
            "pipeline_model_parallel_layout": "Ett|tttL",
            "moe_router_force_load_balancing": True,
        },
    ),
    (
        4,
        {"moe_router_enable_expert_bias": True},
        {
            "ep": 2,
            "pp": 2,
            "pipeline_schedule": "dualpipe_v",
            "pipeline_model_parallel_layout": "Ett|t||ttL",
            "strategy": "optim_grads_params",
            **BALANCED,
        },
    ),
    (
        4,
        {"moe_router_enable_expert_bias": True},
        {
            "ep": 2,
            "pp": 2,
            "pipeline_schedule": "dualpipe",
            "pipeline_model_parallel_layout": "Ett|tttL",
        },
    ),
    (
        4,
        {"moe_router_topk_scaling_factor": 2.5},
        {"ep": 2, "strategy": "optim", "replicas": 2, "moe_input_jitter_eps": 0.1},
    ),
    (
        4,
        {},
        {
            "ep": 2,
            "etp": 2,
            "dispatcher": "allgather",
            "recompute_granularity": "full",
            "strategy": "optim_grads_params",
            **BALANCED,
        },
    ),
    (
        2,
        {"moe_router_enable_expert_bias": True},
        {
            "ep": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe", "layernorm"),
            **BALANCED,
        },
    ),
    (
        4,
        {},
        {"ep": 2, "recompute_granularity": "full", "strategy": "optim_grads_params"},
    ),
    (
        4,
        {"moe_shared_expert_intermediate_size": None},
        {
            "ep": 2,
            "etp": 2,
            "tp": 2,
            "cp": 2,
            "recompute_granularity": "full",
            "recompute_num_layers": 2,
            "dispatcher": "flex",
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (0.1,),
        },
    ),
    (4, {}, {"ep": 2, "etp": 2, "tp": 2, "recompute_granularity": "full"}),
    (4, {}, {"ep": 1, "strategy": "optim_grads_params"}),
    (4, {"num_experts": 2, "moe_router_topk": 1}, {"ep": 1, "strategy": "optim_grads_params"}),
]


@pytest.mark.parametrize(("ranks", "model", "values"), CASES, ids=str)
def test_experts(ranks: int, model: dict[str, Any], values: dict[str, Any]) -> None:
    report = verify_in_pool(
        ranks, config(replace(MIXTURE, **model), **_settings(**values)), on_rank=measured
    )
    assert report.passed, report.text()
