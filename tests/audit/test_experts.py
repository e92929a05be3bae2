"""Steps of layers with experts, against theory that knows what their tokens chose: everything is
equal on every rank, to the byte and the FLOP."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.audit.record import expected_record
from fivefold.check import check
from tests.audit.test_audit import records_of
from tests.verify.cases import MIXTURE, chosen, config, named

pytestmark = pytest.mark.slow

SMALL = replace(MIXTURE, num_layers=2, moe_layer_freq="[0,1]")
ALONE = {"moe_shared_expert_intermediate_size": None}
GATED = {"moe_shared_expert_gate": True}
BRANCHED = {"moe_branch_norms": True, "norm_placement": "both"}
PLAIN = {"gated_linear_unit": False, "add_bias_linear": True, "activation_func": "gelu"}
SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "kv_channels": None,
    "qk_layernorm": False,
    "kv_lora_rank": 8,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 5,
}
WEIGHED = {
    "moe_apply_probs_on_input": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk": 1,
}
DROPS = {"moe_expert_capacity_factor": 0.7}
PADS = DROPS | {"moe_pad_expert_input_to_capacity": True}
BALANCED = {
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss"),
    "moe_aux_loss_coeff": (0.1, 0.2),
    "moe_z_loss_coeff": 0.1,
}
PAIR = {"pp": 2, "pipeline_model_parallel_layout": "Et|tL", "moe_layer_freq": "[1,1]"}
HALVES = {"overlap_moe_expert_parallel_comm": True, "pipeline_schedule": "combined_1f1b", "ep": 2}
STAGES = PAIR | {"recompute_in_flight_limit": 1}


OF_HALVES = "a2a_overlap_attn", "a2a_overlap_post_attn", "a2a_overlap_mlp"


def _again(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def _moved(*modules: str) -> dict[str, Any]:
    return {
        "fine_grained_activation_offloading": True,
        "offload_modules": modules,
        "min_offloaded_tensor_size": 1,
    }


# Ranks, model, settings.
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, ALONE, {}),
    "one rank, bf16, wide router": (1, {}, {"precision": "bf16", "moe_router_dtype": "fp32"}),
    "one rank, rows dropped": (1, GATED, DROPS),
    "one rank, rows padded": (1, ALONE, PADS),
    "one rank, balanced": (1, SIGMOID, BALANCED),
    "one rank, balanced, recomputed": (
        1,
        {"moe_router_pre_softmax": True},
        BALANCED | _again("moe", "layernorm"),
    ),
    "one rank, jitter": (1, ALONE, {"moe_input_jitter_eps": 0.1, "moe_router_dtype": "fp64"}),
    "one rank, biases": (1, PLAIN, {}),
    "one rank, inputs weighed": (1, PLAIN | WEIGHED, DROPS),
    "inputs weighed, wide router": (
        2,
        ALONE | WEIGHED,
        {"ep": 2, "precision": "bf16", "moe_router_dtype": "fp32"},
    ),
    "inputs weighed, parts": (4, WEIGHED, {"ep": 2, "etp": 2, "dispatcher": "flex"}),
    "inputs weighed, moe again": (
        2,
        WEIGHED,
        {"ep": 2, "dispatcher": "allgather", **_again("moe")},
    ),
    "inputs weighed, padded": (2, WEIGHED, {"ep": 2, **PADS, **_again("moe_act", "layernorm")}),
    "alltoall": (2, {}, {"ep": 2}),
    "alltoall of 4": (4, {}, {"ep": 4, "tp": 2}),
    "alltoall, parts": (4, GATED, {"ep": 2, "etp": 2}),
    "alltoall, dropped": (2, {}, {"ep": 2, **DROPS}),
    "alltoall, padded": (2, {}, {"ep": 2, **PADS}),
    "alltoall, ranks padded": (2, {}, {"ep": 2, "moe_expert_rank_capacity_factor": 0.7}),
    "alltoall, parts, padded": (4, {}, {"ep": 2, "etp": 2, **PADS}),
    "alltoall, overlapped": (2, GATED, {"ep": 2, "moe_shared_expert_overlap": True}),
    "flex": (2, {}, {"ep": 2, "dispatcher": "flex"}),
    "flex of 4": (4, {}, {"ep": 4, "tp": 2, "dispatcher": "flex", **DROPS}),
    "flex, parts": (4, PLAIN, {"ep": 2, "etp": 2, "dispatcher": "flex"}),
    "flex, parts alone": (2, {}, {"etp": 2, "dispatcher": "flex"}),
    "flex, overlapped, recomputed": (
        2,
        {},
        {"ep": 2, "dispatcher": "flex", "moe_shared_expert_overlap": True, **_again("moe")},
    ),
    "allgather": (2, {}, {"ep": 2, "dispatcher": "allgather"}),
    "allgather of 4": (4, {}, {"ep": 4, "dispatcher": "allgather", **DROPS}),
    "allgather, parts, padded": (4, {}, {"ep": 2, "etp": 2, "dispatcher": "allgather", **PADS}),
    "moe again": (2, GATED, {"ep": 2, "cp": 2, **_again("moe")}),
    "moe again, tp": (2, {}, {"ep": 2, "tp": 2, **_again("moe", "layernorm")}),
    "moe again, norms of branches": (2, BRANCHED, {"ep": 2, "tp": 2, **_again("moe")}),
    "norms of branches, before softmax": (
        1,
        BRANCHED | {"moe_router_pre_softmax": True, "mtp_num_layers": 1},
        {"precision": "bf16", "moe_router_dtype": "fp32"},
    ),
    "norms of branches, adapters": (
        2,
        BRANCHED | {"lora_rank": 2},
        {"ep": 2, "dispatcher": "flex", **_again("shared_experts", "moe_act")},
    ),
    "halves again, norms of branches": (4, BRANCHED, HALVES | {"tp": 2} | _again(*OF_HALVES)),
    "moe_act again": (2, {}, {"ep": 2, **_again("moe_act")}),
    "routed and shared experts again": (
        2,
        {},
        {"ep": 2, "dispatcher": "flex", **_again("routed_experts", "shared_experts", "layernorm")},
    ),
    "shared experts again, tp": (2, GATED, {"ep": 2, "tp": 2, **_again("shared_experts")}),
    "layers again": (2, {}, {"ep": 2, "recompute_granularity": "full"}),
    "layers again, balanced": (
        2,
        GATED,
        {"ep": 2, "dispatcher": "allgather", "recompute_granularity": "full", **BALANCED},
    ),
    "inputs moved": (
        2,
        {},
        {
            "ep": 2,
            **_moved("attn_norm", "mlp_norm", "expert_fc1", "moe_act"),
            **_again("layernorm", "moe_act"),
        },
    ),
    "activations moved": (1, {}, _moved("moe_act")),
    "tokens moved, experts again": (
        2,
        {},
        {
            "ep": 2,
            "dispatcher": "flex",
            **_moved(),
            "offload_tensors": ("dispatched_input",),
            **_again("routed_experts", "shared_experts"),
        },
    ),
    "inputs moved, parts": (2, {}, {"etp": 2, "dispatcher": "flex", **_moved("expert_fc1")}),
    "stages again": (4, {}, {"ep": 2, **STAGES}),
    "stages again, flex": (4, {}, {"ep": 2, "dispatcher": "flex", **STAGES, **BALANCED}),
    "stages again, flex, parts": (8, {}, {"ep": 2, "etp": 2, "dispatcher": "flex", **STAGES}),
    "stages again, allgather": (4, {}, {"ep": 2, "dispatcher": "allgather", **STAGES}),
    "stages again, parts, padded": (4, {}, {"etp": 2, **STAGES, **PADS}),
    "stages again, moe again": (4, {}, {"ep": 2, **STAGES, **_again("moe")}),
    "stages again, flex, routed and shared experts again": (
        4,
        {},
        {"ep": 2, "dispatcher": "flex", **STAGES, **_again("routed_experts", "shared_experts")},
    ),
    "stages again, moe_act again": (
        4,
        GATED,
        {"etp": 2, "pipeline_schedule": "zb_h1", **STAGES, **_again("moe_act")},
    ),
    "halves again": (2, {}, HALVES | _again(*OF_HALVES)),
    "halves again, gated, tp, layernorm": (
        4,
        GATED,
        HALVES | {"tp": 2} | _again(*OF_HALVES, "layernorm"),
    ),
    "halves again, latents, dW delayed": (
        2,
        ALONE | LATENT,
        HALVES | {"delay_wgrad_compute": True} | _again("a2a_overlap_attn", "moe_act"),
    ),
    "halves again, heads normalised, cp, losses": (
        4,
        {"qk_layernorm": True, **ALONE},
        HALVES | {"cp": 2} | BALANCED | _again("a2a_overlap_attn", "a2a_overlap_post_attn"),
    ),
    "halves again, jitter": (
        2,
        ALONE,
        HALVES
        | {"moe_input_jitter_eps": 0.1, "moe_router_dtype": "fp64"}
        | _again("a2a_overlap_post_attn"),
    ),
    "halves again, latents gathered": (
        4,
        LATENT,
        HALVES | {"cp": 2, "cp_comm_type": ("all_gather",)} | _again("a2a_overlap_attn"),
    ),
    "latents": (1, ALONE | PLAIN | {"moe_latent_size": 20}, _again("moe", "layernorm")),
    "latents, flex, layers again": (
        4,
        GATED | {"moe_latent_size": 20},
        {"ep": 2, "etp": 2, "dispatcher": "flex", "recompute_granularity": "full"},
    ),
    "latents, tp, moe again": (
        4,
        {"moe_latent_size": 20},
        {"ep": 2, "tp": 2, **_again("moe", "moe_act", "layernorm")},
    ),
    "latents, halves again": (
        2,
        {"moe_latent_size": 20},
        HALVES | {"delay_wgrad_compute": True} | _again(*OF_HALVES),
    ),
    "latents, stages again": (
        4,
        ALONE | {"moe_latent_size": 20},
        {"ep": 2, "dispatcher": "allgather", "pipeline_schedule": "zb_h1", **STAGES},
    ),
    "parameters sharded": (4, {}, {"ep": 2, "strategy": "optim_grads_params"}),
    "MTP": (2, LATENT | {"mtp_num_layers": 1}, {"ep": 2}),
}


@pytest.mark.parametrize(
    "name",
    chosen(
        CASES,
        "one rank, balanced, recomputed",
        "alltoall, parts",
        "flex, parts",
        "allgather of 4",
        "routed and shared experts again",
        "inputs moved",
        "stages again, flex",
        "MTP",
        "latents, tp, moe again",
        "halves again, gated, tp, layernorm",
        "halves again, latents gathered",
        "moe again, norms of branches",
    ),
)
def test_experts_do_what_theory_says_of_their_tokens(name: str, tmp_path: Path) -> None:
    world, model, values = CASES[name]
    settings = named(**{"precision": "fp32", **values})
    layout = check(config(replace(SMALL, **model), world, **settings), world)
    records = records_of(layout, 1, tmp_path)
    for record in records:
        assert expected_record(layout, record, records) == record
    assert any(record.chosen.every for record in records)
    repeats = settings.get("recompute_in_flight_limit") is not None
    assert any(record.chosen.again for record in records) == repeats


EIGHT_BIT: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one scale": (1, "tensorwise", {}),
    "of earlier steps, parts": (2, "delayed", {"ep": 2}),
    "of features, moe_act again": (2, "rowwise", {"etp": 2, **_again("moe_act")}),
    "of blocks, routed_experts again": (1, "blockwise", _again("routed_experts")),
    "exponents": (2, "mxfp8", {"ep": 2, "dispatcher": "flex"}),
    # Of these 16 experts, some get no row, and keep no scale unless it is that of earlier steps.
    "one scale, some without rows": (2, "tensorwise", {"ep": 2} | _again("layernorm")),
    "of earlier steps, some without rows": (1, "delayed", {}),
    "of blocks, some without rows": (2, "blockwise", {"etp": 2}),
}


@pytest.mark.parametrize(
    "name",
    chosen(EIGHT_BIT, "of earlier steps, parts", "exponents", "one scale, some without rows"),
)
def test_each_expert_keeps_the_scales_of_its_rows(name: str, tmp_path: Path) -> None:
    world, recipe, values = EIGHT_BIT[name]
    narrow = {"precision": "bf16", "fp8_format": "e4m3", "fp8_recipe": recipe}
    lacks = "without rows" in name
    many = {"num_experts": 16, **BRANCHED} if lacks else ALONE
    layout = check(config(replace(SMALL, **many), world, **named(**narrow, **values)), world)
    records = records_of(layout, 1, tmp_path)
    rows = [n for r in records for of in r.chosen.first.values() for n in of.experts]
    assert not lacks or min(rows) == 0
    for record in records:
        assert record.activations == expected_record(layout, record, records).activations
