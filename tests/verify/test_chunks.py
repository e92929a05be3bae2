"""Llama 4's layers in every layout: attention in chunks, weights on experts' inputs, and more."""

from dataclasses import replace
from typing import Any

import pytest

from tests.verify.cases import CHUNKED, chosen, config, named, verify_in_pool
from tests.verify.test_matrix import measured

pytestmark = pytest.mark.slow

DOCUMENTS = {"reset_attention_mask": True, "document_length": 6}
MOVED = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
AGAIN = {"recompute_granularity": "selective"}
# Ranks, model, settings: no chunk of 5 tokens ends where a context-parallel rank's part does.
CASES: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"tp": 2, **DOCUMENTS}),
    (2, {}, {"cp": 2}),
    (4, {"attention_chunk_size": 3}, {"cp": 4, "cp_comm_type": ("all_gather",)}),
    (4, {}, {"cp": 4, **DOCUMENTS}),
    (2, {}, {"cp": 2, "cp_comm_type": ("a2a",), **DOCUMENTS}),
    (
        4,
        {
            "no_rope_freq": None,
            "attn_temperature_tuning": False,
            "attn_scale": 0.1,
            "floor_scale": 8192,
        },
        {
            "cp": 4,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (2, 2),
            "ep": 2,
        },
    ),
    (
        2,
        {},
        {
            "pp": 2,
            "pipeline_model_parallel_layout": "Et|ttL",
            "pipeline_schedule": "sliced_1f1b",
            "num_sequence_slices": 2,
        },
    ),
    (
        4,
        {},
        {"ep": 2, "tp": 2, "etp": 2, "dispatcher": "flex", "strategy": "optim_grads_params"},
    ),
    (4, {}, {"ep": 2, "etp": 2, "dispatcher": "allgather", "recompute_granularity": "full"}),
    (2, {}, {"ep": 2, "moe_expert_capacity_factor": 0.7, "moe_shared_expert_overlap": True}),
    (2, {}, {"ep": 2, "overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True}),
    (2, {}, {"ep": 2, **AGAIN, "recompute_modules": ("moe", "core_attn")}),
    (2, {}, {"ep": 2, **AGAIN, "recompute_modules": ("moe_act", "layernorm", "shared_experts")}),
    (2, {}, {"tp": 2, **MOVED, "offload_modules": ("core_attn", "moe_act", "expert_fc1")}),
    (2, {"lora_rank": 2, "lora_dropout": 0.1}, {"tp": 2, "cp": 1}),
    (1, {"add_bias_linear": True}, {"compile": True, "compile_backend": "aot_eager"}),
    (2, {"attention_dropout": 0.1}, {"cp": 2, "cp_comm_type": ("a2a",)}),
    (2, {}, {"ep": 2, "precision": "bf16"}),
    (1, {}, {"fp8_format": "hybrid", "precision": "bf16"}),
    (
        2,
        {},
        {"tp": 2, **DOCUMENTS, **MOVED, "offload_modules": ("core_attn", "moe_act", "expert_fc1")},
    ),
]


# Each setting of these is in other cases of this folder, too, with these layers, with experts or
# with others: `make exhaustive` runs them.
IN_OTHERS = (0, 1, 2, 5, 7, 8, 9, 12, 13, 14, 15, 16, 17, 18)
CHOSEN = [place for place in range(len(CASES)) if place not in IN_OTHERS]


@pytest.mark.parametrize("case", chosen(range(len(CASES)), *CHOSEN))
def test_every_layout_computes_what_one_device_does_and_sends_what_theory_says(case: int) -> None:
    ranks, model, values = CASES[case]
    settings = config(replace(CHUNKED, **model), ranks, **named(**values))
    report = verify_in_pool(ranks, settings, on_rank=measured, steps=1)
    assert report.passed, report
