"""Upcycling: a model with experts that starts from the weights of a dense one.

Each expert begins as a copy of the MLP, or with a granularity of G as one of the G parts into which
its inner features are cut (He et al., 2024, arXiv:2410.07524, as in Megatron-LM).
"""

from dataclasses import fields, replace
from typing import Any

from fivefold.config.model import ModelConfig


def dense_model(model: ModelConfig, granularity: int) -> ModelConfig:
    """The dense model from whose weights a model with experts starts, without adapters."""
    defaults: dict[str, Any] = {
        field.name: field.default
        for field in fields(ModelConfig)
        if field.name.startswith("moe_") or field.name == "num_experts"
    }
    patterns: dict[str, Any] = {
        name: None if (pattern := getattr(model, name)) is None else pattern.replace("E", "-")
        for name in ("hybrid_override_pattern", "mtp_hybrid_override_pattern")
    }
    size = granularity * model.expert_ffn_size
    return replace(model.base, **defaults, **patterns, ffn_hidden_size=size)


def share_of_chosen(model: ModelConfig) -> float:
    """The sum of the shares of a token's chosen experts, while the router has no preference."""
    topk, experts = model.moe_router_topk, model.num_experts or 1
    share = 1.0
    if model.moe_router_score_function == "sigmoid":
        share = 0.5 if topk == 1 else 1.0
    elif model.moe_router_pre_softmax:
        share = topk / experts
    return share * (model.moe_router_topk_scaling_factor or 1.0)


def weight_scale(model: ModelConfig, granularity: int) -> float:
    """The factor by which projections of the MLP are multiplied when they become those of experts.

    The chosen experts then add up to the MLP's result: unscaled, they give `share_of_chosen` / G
    times its output. The factor is spread over two matrices, or over three if inner features are
    products of two projections.
    """
    three = model.gated_linear_unit or model.activation_func == "squared_relu"
    factor = granularity / share_of_chosen(model)
    return float(factor ** (1 / 3 if three else 1 / 2))
