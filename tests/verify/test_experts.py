"""Mixtures of experts in every layout compute what one device computes, and send what the formulas
say."""

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.cases import MIXTURE, chosen, config, named, verify_in_pool
from tests.verify.test_matrix import measured

pytestmark = pytest.mark.slow

BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2),
}
DEEPSEEK = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "kv_channels": None,
    "qk_layernorm": False,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_topk_scaling_factor": 2.5,
    "moe_layer_freq": "[0]+[1]*2",
}
MOVED = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
PREDICTING = DEEPSEEK | {"mtp_num_layers": 1}
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
        2,
        {"moe_router_pre_softmax": True},
        {"ep": 2, "tp": 2, "dispatcher": "flex", "moe_router_load_balancing_type": ("sinkhorn",)},
    ),
    (
        4,
        {"moe_router_topk": 1, "moe_router_pre_softmax": True},
        {
            "ep": 2,
            "pp": 2,
            "pipeline_schedule": "zb_h1",
            "pipeline_model_parallel_layout": "Et|ttL",
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
            "pipeline_model_parallel_layout": "Et|t||tL",
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
            "pipeline_model_parallel_layout": "Et|ttL",
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
            "recompute_num_layers": (2,),
            "dispatcher": "flex",
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (0.1,),
        },
    ),
    (4, {}, {"ep": 2, "etp": 2, "tp": 2, "recompute_granularity": "full"}),
    (4, {}, {"ep": 1, "strategy": "optim_grads_params"}),
    (
        4,
        {"num_experts": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {"ep": 1, "strategy": "optim_grads_params"},
    ),
    (4, {}, {"tp": 2, "cp": 2, "ep": 4, "dispatcher": "flex", "moe_expert_capacity_factor": 0.8}),
    (
        4,
        {},
        {
            "tp": 2,
            "ep": 2,
            "moe_expert_capacity_factor": 0.7,
            "moe_token_drop_policy": "position",
            "recompute_granularity": "full",
        },
    ),
    (
        2,
        {},
        {
            "ep": 2,
            "dispatcher": "allgather",
            "moe_expert_capacity_factor": 0.5,
            "moe_router_pre_softmax": True,
        },
    ),
    (
        4,
        {},
        {
            "ep": 2,
            "cp": 2,
            "moe_router_load_balancing_type": ("global_aux_loss",),
            "moe_aux_loss_coeff": (0.3,),
            "recompute_granularity": "full",
        },
    ),
    (
        2,
        {},
        {
            "ep": 2,
            "micro_batch_size": 1,
            "moe_router_load_balancing_type": ("global_aux_loss", "aux_loss"),
            "moe_aux_loss_coeff": (0.3, 0.1),
        },
    ),
    (
        2,
        {},
        {
            "ep": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe_act", "shared_experts", "routed_experts", "layernorm"),
            **BALANCED,
        },
    ),
    (
        2,
        {"normalization": "LayerNorm", "gated_linear_unit": False, "add_bias_linear": True},
        {
            "etp": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe_act", "core_attn"),
        },
    ),
    (
        2,
        {},
        {
            "ep": 2,
            **MOVED,
            "offload_modules": ("attn_norm", "mlp_norm", "expert_fc1", "moe_act"),
            "recompute_granularity": "selective",
            "recompute_modules": ("layernorm", "moe_act"),
        },
    ),
    (
        4,
        {},
        {
            "ep": 2,
            "pp": 2,
            "pipeline_schedule": "zb_v",
            "pipeline_model_parallel_layout": "Et|t||tL",
            "recompute_granularity": "selective",
            "recompute_modules": ("moe_act",),
            "compile": True,
            "compile_backend": "aot_eager",
        },
    ),
    (4, DEEPSEEK, {"tp": 2, "ep": 4, "dispatcher": "flex", "strategy": "optim", **BALANCED}),
    (
        4,
        DEEPSEEK,
        {
            "pp": 2,
            "ep": 2,
            "pipeline_schedule": "dualpipe_v",
            "pipeline_model_parallel_layout": "Et|t||tL",
            "recompute_granularity": "selective",
            "recompute_modules": ("mla_up_proj", "moe_act"),
        },
    ),
    (
        4,
        {},
        {
            "ep": 2,
            "etp": 2,
            "moe_expert_capacity_factor": 0.8,
            "moe_pad_expert_input_to_capacity": True,
            "strategy": "optim",
        },
    ),
    (
        2,
        {"add_bias_linear": True},
        {
            "ep": 2,
            "dispatcher": "allgather",
            "moe_expert_capacity_factor": 1.2,
            "moe_pad_expert_input_to_capacity": True,
        },
    ),
    (1, {}, {"moe_expert_capacity_factor": 0.6, "moe_pad_expert_input_to_capacity": True}),
    (
        4,
        {},
        {"ep": 2, "tp": 2, "moe_shared_expert_overlap": True, "strategy": "optim_grads_params"},
    ),
    (
        4,
        {"moe_shared_expert_gate": True},
        {
            "ep": 2,
            "pp": 2,
            "dispatcher": "flex",
            "moe_shared_expert_overlap": True,
            "pipeline_schedule": "zb_h1",
            "pipeline_model_parallel_layout": "Et|ttL",
            "recompute_granularity": "selective",
            "recompute_modules": ("moe",),
        },
    ),
    (
        4,
        PREDICTING,
        {"ep": 2, "pp": 2, "pipeline_model_parallel_layout": "Et|ttmL", **BALANCED},
    ),
    (
        4,
        PREDICTING | {"mtp_num_layers": 2, "num_layers": 3, "moe_layer_freq": "[0,1,1]"},
        {"ep": 2, "recompute_granularity": "full", "strategy": "optim_grads_params", **BALANCED},
    ),
    (
        4,
        PREDICTING,
        {
            "tp": 2,
            "cp": 2,
            "ep": 4,
            "moe_expert_capacity_factor": 0.8,
            "recompute_granularity": "selective",
            "recompute_modules": ("mla_up_proj", "layernorm", "moe_act"),
        },
    ),
    (
        2,
        PREDICTING,
        {
            "cp": 2,
            "cp_comm_type": ("all_gather",),
            **MOVED,
            "offload_modules": ("expert_fc1", "core_attn"),
            "compile": True,
            "compile_backend": "aot_eager",
        },
    ),
    (
        4,
        {"add_bias_linear": True, "activation_func": "gelu", "moe_router_topk": 5},
        {
            "ep": 2,
            "etp": 2,
            "moe_expert_rank_capacity_factor": 0.8,
            "recompute_granularity": "full",
        },
    ),
    (
        4,
        {},
        {
            "ep": 4,
            "tp": 2,
            "dispatcher": "flex",
            "moe_expert_rank_capacity_factor": 0.7,
            "moe_shared_expert_overlap": True,
            "moe_token_drop_policy": "position",
        },
    ),
    (
        4,
        {"moe_router_pre_softmax": True, "moe_router_topk": 5},
        {"ep": 2, "etp": 2, "dispatcher": "flex", "moe_expert_rank_capacity_factor": 0.9},
    ),
    (1, {}, {"moe_expert_rank_capacity_factor": 0.6}),
    (
        4,
        {},
        {
            "ep": 2,
            "etp": 2,
            "tp": 2,
            "dispatcher": "flex",
            **MOVED,
            "offload_tensors": ("dispatched_input", "pre_mlp_layernorm_output"),
            "recompute_granularity": "selective",
            "recompute_modules": ("routed_experts",),
        },
    ),
    (
        4,
        {"moe_latent_size": 10, "add_bias_linear": True, "activation_func": "gelu"},
        {
            "tp": 2,
            "ep": 2,
            "pp": 2,
            "dispatcher": "flex",
            "pipeline_schedule": "zb_h1",
            "pipeline_model_parallel_layout": "Et|t*2L",
            "recompute_granularity": "selective",
            "recompute_modules": ("moe", "layernorm"),
        },
    ),
]


# As in Gemma 4: experts and MLP side by side, each between norms.
BRANCHED = {"moe_branch_norms": True, "norm_placement": "both"}
NORMS_OF_BRANCHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "moe again, tp": (
        2,
        {},
        {
            "ep": 2,
            "tp": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ("moe", "layernorm"),
            **BALANCED,
        },
    ),
    **{
        f"{place} {case}": case
        for place, case in enumerate(CASES)
        if {"moe_latent_size", "moe_shared_expert_gate"}.isdisjoint(case[1])
        and case[1].get("moe_shared_expert_intermediate_size", 8)
        and "mlp_norm" not in case[2].get("offload_modules", ())
        and "pre_mlp_layernorm_output" not in case[2].get("offload_tensors", ())
    },
}
# Each setting of these is in another case, too, here or in test_pairs.py.
AGAIN = {*range(4, 10), 1, 2, *range(11, 26), 28, *range(30, 33), 34, 36, *range(38, 42), 44, 47}
CHOSEN = [
    pytest.param(*case, marks=pytest.mark.exhaustive) if place in AGAIN else case
    for place, case in enumerate(CASES)
]


@pytest.mark.parametrize(("ranks", "model", "values"), CHOSEN, ids=str)
def test_experts(ranks: int, model: dict[str, Any], values: dict[str, Any]) -> None:
    """In two steps where the choice of experts keeps a bias for the second."""
    found = config(replace(MIXTURE, **model), ranks, **named(**values))
    steps = 1 + bool(model.get("moe_router_enable_expert_bias"))
    report = verify_in_pool(ranks, found, on_rank=measured, steps=steps)
    assert report.passed, report.text()


@pytest.mark.parametrize("name", chosen(NORMS_OF_BRANCHES, "moe again, tp"))
def test_experts_beside_an_mlp_between_norms(name: str) -> None:
    ranks, model, values = NORMS_OF_BRANCHES[name]
    found = config(replace(MIXTURE, **model | BRANCHED), ranks, **named(**values))
    report = verify_in_pool(ranks, found, on_rank=measured, steps=1)
    assert report.passed, report.text()


def test_predictions_of_stages_that_run_again() -> None:
    values = named(
        ep=2,
        pp=2,
        pipeline_schedule="zb_h1",
        pipeline_model_parallel_layout="Etttm|L",
        recompute_in_flight_limit=1,
        strategy="optim_grads_params",
        moe_router_load_balancing_type=("global_aux_loss",),
        moe_aux_loss_coeff=(0.3,),
        global_batch_size=4,
    )
    model = replace(MIXTURE, **PREDICTING | {"num_layers": 3, "moe_layer_freq": "[0,1,1]"})
    report = verify_in_pool(4, config(model, 4, **values), steps=1)
    assert report.passed, report.text()
