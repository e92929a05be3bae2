"""Llama-like mixtures of experts: Mixtral, Granite's, MiniMax-M2, OLMoE, Qwen2-MoE, Qwen3-MoE,
gpt-oss, GLM-4.5, Solar Open, K-EXAONE, dots.llm1."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.grouped_experts import grouped_experts, predictions
from fivefold.config.huggingface.layered import exaone4
from fivefold.config.huggingface.llama import (
    layer_types,
    llama_like,
    refuse_head_dim,
    window_settings,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig


def mixtral(reader: Reader, kind: str) -> ModelConfig:
    """Experts in every layer, with normalised router weights."""
    model = llama_like(reader, kind)
    read_balancing(reader)
    if reader.number("router_jitter_noise", 0.0):
        reader.left_out.append("noise on the router's input")
    return replace(
        model,
        num_experts=reader.size("num_local_experts", "num_experts"),
        moe_router_topk=reader.size("num_experts_per_tok"),
    )


def minimax_m2(reader: Reader, kind: str) -> ModelConfig:
    """Mixtral's experts, chosen by DeepSeek-V3's router without groups."""
    model = mixtral(reader, kind)
    reader.fixed("scoring_func", "sigmoid")
    reader.fixed("use_routing_bias", True)
    reader.fixed("use_qk_norm", True)
    reader.fixed("qk_norm_type", "per_layer")
    reader.fixed("shared_intermediate_size", 0)
    reader.fixed("attn_type_list", [1] * model.num_layers)
    # Of MiniMax-01, and of further predictions, whose weights are not published.
    reader.without_effect("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    reader.without_effect("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    reader.without_effect("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    if model.moe_router_topk == 1:
        why = "its weight would be normalised to 1"
        reader.unsupported("num_experts_per_tok", 1, [2], why)
    return replace(model, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)


def granite_moe(reader: Reader, kind: str) -> ModelConfig:
    """Mixtral's experts, with the factors of Granite; or also with an expert of all tokens."""
    model = llama_like(reader, kind)
    read_balancing(reader)
    shared = 0
    if kind == "granitemoeshared":
        shared = reader.size("shared_intermediate_size", default=0, least=0)
    return replace(
        model,
        moe_shared_expert_intermediate_size=shared or None,
        num_experts=reader.size("num_local_experts", "num_experts", default=8),
        moe_router_topk=reader.size("num_experts_per_tok", default=2),
    )


def olmoe(reader: Reader, kind: str) -> ModelConfig:
    """OLMoE: experts in every layer, whose weights are those of a softmax over all of them."""
    model = llama_like(reader, kind)
    read_balancing(reader)
    refuse_head_dim(reader, model, "norms there have hidden_size features of queries")
    return replace(
        model,
        num_experts=reader.size("num_experts", "num_local_experts", default=64),
        moe_router_topk=reader.size("num_experts_per_tok", default=8),
        moe_router_pre_softmax=not reader.flag("norm_topk_prob", False),
    )


def qwen_moe(reader: Reader, kind: str) -> ModelConfig:
    """Experts in some layers, smaller than the other layers' MLPs.

    Qwen2 and Qwen3-Next also have a gated shared expert.
    """
    model = llama_like(reader, kind)
    read_balancing(reader)
    dense, step = (
        set(reader.sizes("mlp_only_layers")),
        reader.size("decoder_sparse_step", default=1),
    )
    normalised = reader.flag("norm_topk_prob", kind == "qwen3_next")
    experts: dict[str, Any] = {
        "num_experts": reader.size("num_experts", "num_local_experts"),
        "moe_router_topk": reader.size("num_experts_per_tok"),
        "moe_ffn_hidden_size": reader.size("moe_intermediate_size"),
        "moe_router_pre_softmax": not normalised,
    }
    if kind in ("qwen2_moe", "qwen3_next"):
        usual = 5632 if kind == "qwen2_moe" else 512
        shared = reader.size("shared_expert_intermediate_size", default=usual)
        experts |= {"moe_shared_expert_intermediate_size": shared, "moe_shared_expert_gate": True}
    else:  # Qwen3-Coder says what it has not
        reader.fixed("shared_expert_intermediate_size", 0)
        reader.fixed("qkv_bias", False)
        reader.fixed("use_qk_norm", True)
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(model.num_layers)]
    if not any(sparse):
        return model
    return replace(model, **experts, moe_layer_freq=layer_frequency(sparse))


def gpt_oss(reader: Reader, kind: str) -> ModelConfig:
    """OpenAI's gpt-oss: learned sinks in attention, a window in every other layer."""
    model = llama_like(reader, kind)
    layers = model.num_layers
    read_balancing(reader)
    reader.without_effect("initial_context_length")
    reader.fixed("swiglu_alpha", 1.702)
    reader.fixed("hidden_act", "silu")
    window = reader.optional_size("sliding_window", default=128, least=2)
    windows = layer_types(reader, layers) or [i % 2 == 0 for i in range(layers)]
    if any(windows) and window is None:
        reader.unsupported("sliding_window", None, [128], "layer_types has layers with a window")
    return replace(
        model,
        **window_settings(window, windows),
        activation_func="quick_gelu",
        glu_linear_offset=1.0,
        activation_func_clamp_value=reader.number("swiglu_limit", 7.0),
        softmax_type="learnable",
        num_experts=reader.size("num_local_experts", "num_experts"),
        moe_router_topk=reader.size("num_experts_per_tok", "experts_per_token"),
    )


def glm4_moe(reader: Reader, kind: str) -> ModelConfig:
    """GLM-4.5 to 4.7: DeepSeek-V3's experts and predictions, RoPE in a half of each head."""
    model = llama_like(reader, kind)
    experts = grouped_experts(reader, kind, model.num_layers)
    return replace(model, mtp_num_layers=predictions(reader), **experts)


def solar_open(reader: Reader, kind: str) -> ModelConfig:
    """Solar Open: GLM-4.5's experts in every layer, after Llama's attention."""
    model = llama_like(reader, kind)
    reader.without_effect("intermediate_size")  # of dense layers, which there are none of
    why = "transformers has experts in every layer, whatever stands here"
    reader.fixed("first_k_dense_replace", 0, why=why)
    reader.fixed("use_qk_norm", False)
    reader.fixed("num_nextn_predict_layers", 0)
    return replace(model, **grouped_experts(reader, kind, model.num_layers))


def exaone_moe(reader: Reader, kind: str) -> ModelConfig:
    """K-EXAONE: EXAONE 4's windows and positions, norms before, and DeepSeek-V3's experts."""
    model = exaone4(reader, kind)
    model = replace(model, **grouped_experts(reader, kind, model.num_layers))
    # Of files that are older than transformers' class, which has no use for these.
    sparse = [model.is_moe(layer) for layer in range(model.num_layers)]
    reader.fixed("is_moe_layer", sparse)
    reader.fixed("first_last_k_dense_replace", sparse.count(False))
    reader.without_effect("num_nextn_predict_layers")  # further predictions are left out
    return model


def dots1(reader: Reader, kind: str) -> ModelConfig:
    """dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""
    model = llama_like(reader, kind)
    return replace(model, **grouped_experts(reader, kind, model.num_layers))
