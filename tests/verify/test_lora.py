"""Adapters beside frozen weights: every layout trains what one device trains."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError
from tests.verify.cases import (
    LATENT,
    MIXTURE,
    MODELS,
    STAGES,
    chosen,
    config,
    named,
    verify_in_pool,
)

PAIR = {"pp": 2, "pipeline_model_parallel_layout": STAGES[2, 1]}
TWO = ("v_proj", "gate_proj")
MLP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")}
LINEAR_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}

# (ranks, model, settings, adapted layers)
CASES: dict[str, tuple[int, ModelConfig, dict[str, Any], tuple[str, ...]]] = {
    "one rank": (1, MODELS["llama"], {}, TWO),
    "few key/value heads": (4, MODELS["llama"], {"tp": 4}, TWO),
    "whole tokens": (2, MODELS["llama"], {"tp": 2, "sequence_parallel": False}, TWO),
    "tokens in parts": (2, MODELS["gpt"], {"tp": 2, "tp_comm_overlap": True}, ()),
    "ZeRO-3, recomputed, tied": (
        2,
        MODELS["llama tied"],
        {"strategy": "optim_grads_params", "recompute_granularity": "full"},
        (),
    ),
    "ZeRO-2 in bf16": (2, MODELS["gpt"], {"strategy": "optim_grads", "precision": "bf16"}, ()),
    "HSDP, rings": (4, MODELS["llama"], {"cp": 2, "strategy": "optim", "replicas": 2}, ("o_proj",)),
    "deferred": (
        4,
        MODELS["gpt"],
        {"tp": 2, "pipeline_schedule": "zb_h1", **PAIR},
        ("q_proj", "down_proj"),
    ),
    "two copies, tied": (
        2,
        MODELS["llama tied"],
        {"pipeline_schedule": "dualpipe", **PAIR},
        (),
    ),
    "embedding alone in its stage": (
        4,
        MODELS["llama"],
        PAIR | {"pipeline_model_parallel_layout": "E|tttL", "strategy": "optim"},
        (),
    ),
    "fused loss, tiles": (
        2,
        MODELS["llama"],
        {"tp": 2, "tiled_mlp_num_shards": 3, **MLP_AGAIN, **LINEAR_LOSS},
        ("gate_proj", "down_proj"),
    ),
    "activations on the host": (
        2,
        MODELS["llama"],
        {
            "tp": 2,
            "fine_grained_activation_offloading": True,
            "offload_modules": ("qkv_linear", "core_attn", "attn_proj", "mlp_norm"),
            "min_offloaded_tensor_size": 1,
        },
        (),
    ),
    "latents": (4, LATENT, {"tp": 2, "strategy": "optim_grads_params"}, ()),
    "latents, MTP": (2, replace(LATENT, mtp_num_layers=1), {"tp": 2}, ("kv_b_proj",)),
    "chosen tokens": (
        4,
        MODELS["sparse, not taught"],
        {"tp": 2, "strategy": "optim_grads_params"},
        (),
    ),
    "chosen tokens, whole tokens": (
        2,
        MODELS["sparse, not taught"],
        {"tp": 2, "sequence_parallel": False},
        (),
    ),
    "experts": (4, MIXTURE, {"tp": 2, "ep": 2, "strategy": "optim_grads_params"}, ()),
    "one expert a token": (2, replace(MIXTURE, moe_router_topk=1), {"ep": 2}, ()),
    "experts in pairs": (
        4,
        replace(MIXTURE, num_layers=4, moe_layer_freq="1"),
        {
            "ep": 2,
            "pp": 2,
            "pipeline_model_parallel_layout": "Ett|ttL",
            "pipeline_schedule": "combined_1f1b",
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
        },
        ("o_proj", "up_proj"),
    ),
    # Inductor of torch 2.13 loses `alpha` of a sum of two products.
    "compiled": (1, replace(MODELS["llama"], num_layers=2), {"compile": True}, ()),
    "slices": (
        2,
        MODELS["llama"],
        {"pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2, **PAIR},
        (),
    ),
}


DROPS, MAGNITUDES = {"lora_dropout": 0.3}, {"use_dora": True}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "magnitudes": MAGNITUDES,
    "dropped": DROPS,
    "both": DROPS | MAGNITUDES,
}
EVERY = {f"{case}, {kind}": (case, kind) for case, kind in product(CASES, KINDS)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    chosen(
        EVERY,
        "deferred, both",
        "embedding alone in its stage, plain",
    ),
)
def test_adapters_are_trained_as_on_one_device(name: str) -> None:
    case, kind = EVERY[name]
    ranks, model, settings, targets = CASES[case]
    adapted = replace(model, lora_rank=3, lora_target_modules=targets or ("all-linear",))
    adapted = replace(adapted, **KINDS[kind])
    report = verify_in_pool(ranks, config(adapted, ranks, **named(**settings)))
    assert report.passed, report.text()


def test_only_a_router_that_is_trained_needs_a_choice_of_two() -> None:
    model = CASES["one expert a token"][1]
    with pytest.raises(ConfigError, match="is always 1"):
        check(config(model), 2)
    check(config(replace(model, lora_rank=3)), 2)
