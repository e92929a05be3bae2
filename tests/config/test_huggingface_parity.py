"""What is read of a config.json against the model that transformers builds from it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.generic import WITHOUT_EFFECT
from fivefold.config.model import ModelConfig
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.model.context import Context
from fivefold.model.moe.layer import MoE
from fivefold.model.transformer import Stage
from tests.config.oracle import (
    LENGTH,
    both_gradients,
    config_of,
    oracle,
    oracle_logits,
    oracle_windows,
    our_logits,
)
from tests.config.published import PUBLISHED
from tests.model.models import batch_of
from tests.verify.cases import chosen

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
_EXPERTS = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
_GROUPS = {
    **_SIZES,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_LATENTS = _GROUPS | {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "attention_multiplier": 0.3,
}
_HUNYUAN = {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale": 1.0},
}
_MINISTRAL = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 5,
    "max_position_embeddings": 20,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_LINEAR = {
    "full_attention_interval": 2,
    "head_dim": 16,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 20,
}
_MAMBA = {
    "head_dim": 12,
    "num_key_value_heads": 2,
    "ssm_state_size": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
}
_FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2, 4.0, 6.5]}
TINY: Mapping[str, dict[str, Any]] = {
    "llama": _SIZES,
    "mistral": _SIZES | {"num_key_value_heads": 2},
    "ministral3": _SIZES | {"num_key_value_heads": 2, "rope_parameters": _MINISTRAL},
    "qwen2": _SIZES | {"num_key_value_heads": 2},
    "qwen3": _SIZES | {"num_key_value_heads": 2},
    "smollm3": _SIZES | {"num_hidden_layers": 5, "pad_token_id": None},
    "granite": _SIZES | {"num_key_value_heads": 2, **_GRANITE},
    "granitemoe": _SIZES | _EXPERTS | _GRANITE | {"num_local_experts": 4},
    "granitemoeshared": _SIZES
    | _EXPERTS
    | _GRANITE
    | {"num_local_experts": 4, "shared_intermediate_size": 20},
    "granitemoehybrid": _SIZES
    | _GRANITE
    | {"num_key_value_heads": 2, "num_local_experts": 0, "shared_intermediate_size": 40}
    | {"position_embedding_type": "rope", "layer_types": ["attention"] * 2, "mamba_n_heads": 4},
    "seed_oss": _SIZES
    | {"num_key_value_heads": 2, "head_dim": 12, "residual_dropout": 0.0, "pad_token_id": None},
    "stablelm": _SIZES | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "arcee": _SIZES | {"num_key_value_heads": 2},
    "nemotron": _SIZES | {"num_key_value_heads": 2},
    "ernie4_5": _SIZES | {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None},
    "ernie4_5_moe": _SIZES
    | {"num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}
    | {"moe_num_shared_experts": 1, "pad_token_id": None},
    "phi3": _SIZES
    | {
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "max_position_embeddings": 64,
        "original_max_position_embeddings": 30,
        "rope_scaling": {"type": "longrope", **_FACTORS},
    },
    "falcon": {n: v for n, v in _SIZES.items() if n != "intermediate_size"},
    "cohere": _SIZES | {"num_key_value_heads": 2, "logit_scale": 0.5, "pad_token_id": None},
    "cohere2": _SIZES | {"num_hidden_layers": 5, "num_key_value_heads": 2, "pad_token_id": None},
    "olmo2": _SIZES | {"num_key_value_heads": 2, "pad_token_id": None},
    "olmoe": _SIZES | _EXPERTS | {"num_experts": 4, "pad_token_id": None},
    "olmo3": _SIZES | {"num_hidden_layers": 5, "pad_token_id": None},
    "gemma3_text": _SIZES
    | {
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "pad_token_id": None,
    },
    "gemma2": _SIZES
    | {
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 8,
        "sliding_window": 5,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
        "pad_token_id": None,
    },
    "gemma": _SIZES | {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100},
    "starcoder2": _SIZES | {"num_key_value_heads": 2},
    "gpt_neox": _SIZES | {"rotary_pct": 0.5},
    "mixtral": _SIZES | _EXPERTS | {"num_local_experts": 4},
    "qwen2_moe": _SIZES
    | _EXPERTS
    | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20},
    "qwen3_moe": _SIZES | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24},
    "qwen3_next": _SIZES | _EXPERTS | _LINEAR | {"num_experts": 4, "moe_intermediate_size": 24},
    "qwen3_5_text": _SIZES
    | {n: v for n, v in _LINEAR.items() if "expert" not in n}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_moe_text": {n: v for n, v in _SIZES.items() if n != "intermediate_size"}
    | _EXPERTS
    | _LINEAR
    | {"num_experts": 4, "moe_intermediate_size": 24},
    "nemotron_h": {n: v for n, v in _SIZES.items() if n != "num_hidden_layers"}
    | _MAMBA
    | {"hybrid_override_pattern": "M-EM*"},
    "gpt_oss": _SIZES | _EXPERTS | {"num_local_experts": 4, "head_dim": 8},
    "glm": _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    "glm4": _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    "exaone4": _SIZES | {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 8},
    "glm4_moe": _GROUPS | {"num_key_value_heads": 2},
    "solar_open": {n: v for n, v in _GROUPS.items() if n != "intermediate_size"}
    | {"num_key_value_heads": 2, "head_dim": 12, "first_k_dense_replace": 0},
    "hunyuan_v1_dense": _SIZES | _HUNYUAN,
    "hunyuan_v1_moe": _SIZES | _HUNYUAN | {"num_experts": 4, "moe_topk": 2},
    "exaone_moe": {n: v for n, v in _GROUPS.items() if not n.endswith("ed_experts")}
    | {"num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 4},
    "dots1": _GROUPS | {"norm_topk_prob": True},
    "minimax_m2": _SIZES
    | _EXPERTS
    | {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "rotary_dim": 6},
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "glm4_moe_lite": _LATENTS,
    "llama4_text": _SIZES
    | {
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size_mlp": 40,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": 7,
        "floor_scale": 5,
        "pad_token_id": None,
    },
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
_ROPES = [
    None,
    {},
    {"rope_type": "default"},
    {"type": "default", "rope_theta": 100.0},
    {"rope_theta": 50},
    {"rope_theta": 100.0, "partial_rotary_factor": 1.0},
    {"partial_rotary_factor": 0.5},
    _LLAMA3,
    _LLAMA3 | {"rope_theta": 100.0},
    {"type": "llama3", **{k: v for k, v in _LLAMA3.items() if k != "rope_type"}},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
    {"type": "yarn", "factor": 2.0, "mscale": 0.7},
    {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7},
    {"type": "yarn", "factor": 2.0, "mscale_all_dim": 0.7, "mscale": 0.3},
    {"type": "yarn", "factor": 0.5, "attention_factor": 2.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.2079441541679836},
    _MINISTRAL,
    {n: v for n, v in _MINISTRAL.items() if n != "llama_4_scaling_beta"},
    {n: v for n, v in _MINISTRAL.items() if n != "original_max_position_embeddings"},
    _MINISTRAL | {"llama_4_scaling_beta": 0, "type": "yarn"},
    {"type": "yarn", "factor": 4.0, "beta_fast": 2.0, "truncate": False},
    {"factor": 2.0},
    {"full_attention": {"rope_theta": 100.0}},
    {"full_attention": _LLAMA3, "sliding_attention": {"rope_theta": 70.0}},
    {"sliding_attention": {"rope_type": "linear", "factor": 2.0}},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    {"rope_type": "linear"},
    {"type": "linear", "factor": 0.5, "rope_theta": 70.0},
    {"type": "dynamic", "alpha": 1000.0, "factor": 2.0, "rope_theta": 70.0},
    {"rope_type": "dynamic", "factor": 2.0, "alpha": 0.0},
    {"type": "longrope", **_FACTORS},
    {"type": "su", **_FACTORS, "factor": 3.0, "original_max_position_embeddings": 4096},
    {"rope_type": "longrope", **_FACTORS, "original_max_position_embeddings": 8},
    {"rope_type": "longrope", **_FACTORS, "attention_factor": 1.3, "factor": 0.5},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0, 0.0, 1.0, 1.0]},
    {"rope_type": "longrope", "short_factor": None, "long_factor": ["1"] * 4},
]
_SWITCH = [True, False]
_BIASED = ["full_attention", "sliding_attention"]
# Whatever some family has is tried in all.
VARIATIONS: Mapping[str, list[Any]] = {
    "sliding_window": [None, 1, 2, 5, 16, 64],
    "use_sliding_window": _SWITCH,
    "max_window_layers": [0, 1, 2],
    "sliding_window_pattern": [None, 0, 1, 2, "LLLG"],
    "layer_types": [
        *(None, _BIASED[:1] * 2, _BIASED[1:] * 2, _BIASED, _BIASED[:1]),
        *(["linear_attention", "full_attention"], ["linear_attention"] * 2),
    ],
    "rope_theta": [50, 100.0],
    "rotary_emb_base": [50, 100.0],
    "rotary_pct": [0.25, 1.0],
    "partial_rotary_factor": [0.5, 1.0],
    "rope_scaling": _ROPES,
    "rope_parameters": _ROPES,
    "attention_bias": _SWITCH,
    "mlp_bias": _SWITCH,
    "attention_out_bias": _SWITCH,
    "head_dim": [None, 4, 6, 8, 12, 16],
    "num_key_value_heads": [None, 1, 2, 4],
    "tie_word_embeddings": _SWITCH,
    "is_causal": _SWITCH,
    "embedding_multiplier": [0.5, 12, None],
    "residual_multiplier": [0.5, 1, 0.0],
    "logits_scaling": [0.5, 8, -1.0],
    "attention_multiplier": [0.015625, 1, None],
    "logit_scale": [1, 0.3, 0.0],
    "new_decoder_architecture": _SWITCH,
    "num_ln_in_parallel_attn": [None, 1, 2],
    "multi_query": _SWITCH,
    "parallel_attn": _SWITCH,
    "num_kv_heads": [None, 1, 2],
    "bias": _SWITCH,
    "alibi": _SWITCH,
    "ffn_hidden_size": [None, 24],
    "activation": ["gelu", "relu2", "relu"],
    "clip_qkv": [None, 8.0],
    "query_pre_attn_scalar": [8, 12, 0],
    "rope_local_base_freq": [50, 100.0],
    "final_logit_softcapping": [None, 3.0, -1.0],
    "attn_logit_softcapping": [None, 5.0, 0.0],
    "cache_implementation": ["hybrid"],
    "use_bidirectional_attention": [None, False, True],
    "hidden_activation": [None, "gelu_pytorch_tanh"],
    "add_cross_attention": _SWITCH,
    "is_decoder": _SWITCH,
    "hidden_act": ["silu", "swish", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2"],
    "activation_function": ["gelu", "gelu_python", "gelu_pytorch_tanh", "gelu_accurate", "silu"],
    "rms_norm_eps": [1e-6, 1e-1, 1],
    "layer_norm_eps": [1e-1],
    "layer_norm_epsilon": [1e-1],
    "n_embd": [24, 32],
    "hidden_size": [24, 32],
    "n_layer": [1, 2],
    "num_hidden_layers": [1, 2],
    "n_head": [2, 4],
    "num_attention_heads": [2, 4],
    "n_positions": [24, 32],
    "max_position_embeddings": [16, 32],
    "n_ctx": [8],
    "n_inner": [None, 24],
    "scale_attn_weights": _SWITCH,
    "scale_attn_by_inverse_layer_idx": _SWITCH,
    "reorder_and_upcast_attn": _SWITCH,
    "use_parallel_residual": _SWITCH,
    "no_rope_layers": [None, [1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0]],
    "no_rope_layer_interval": [1, 2, 3, 9],
    "use_bias": _SWITCH,
    "use_qk_norm": _SWITCH,
    "norm_epsilon": [1e-1],
    "norm_eps": [1e-1],
    "original_max_position_embeddings": [8, 24],
    "embedding_dropout": [0.1],
    "residual_dropout": [0.0, 0.1],
    "embd_pdrop": [0.0, 0.1],
    "rope_interleaved": _SWITCH,
    "pretraining_tp": [2],
    "pruned_heads": [{}, {"0": [1]}],
    "attention_dropout": [0.1],
    "resid_pdrop": [0.1, 0.2],
    "initializer_range": [0.1],
    "pad_token_id": [3],
    "torch_dtype": ["bfloat16"],
    "quantization_config": [None, {"quant_method": "fp8"}],
    "num_local_experts": [2, 4],
    "num_experts": [2, 4],
    "num_experts_per_tok": [1],
    "rotary_dim": [None, 4, 8],
    "use_routing_bias": _SWITCH,
    "qk_norm_type": ["per_layer", "per_head"],
    "attn_type_list": [[1, 1], [0, 1]],
    "mlp_only_layers": [None, [], [1]],
    "decoder_sparse_step": [1, 2],
    "n_shared_experts": [1, 2],
    "n_routed_experts": [4],
    "n_group": [None, 1, 2],
    "topk_group": [None, 1, 2],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc"],
    "scoring_func": ["softmax", "sigmoid"],
    "norm_topk_prob": _SWITCH,
    "routed_scaling_factor": [1.0, 3.0],
    "rope_interleave": _SWITCH,
    "swiglu_limit": [0.2, 7.0],
    "swiglu_alpha": [1.0, 1.702],
    "shared_expert_intermediate_size": [8, 24],
    "shared_intermediate_size": [0, 24],
    "moe_num_experts": [2, 4],
    "moe_k": [1, 3],
    "moe_topk": [1, [2, 2], [1, 2]],
    "position_embedding_type": [None, "rope", "nope"],
    "layers_block_type": [["attention"] * 2, ["mamba", "attention"]],
    "full_attention_interval": [1, 2, 3],
    "linear_conv_kernel_dim": [1, 2],
    "linear_key_head_dim": [4],
    "linear_value_head_dim": [4],
    "linear_num_key_heads": [1, 4, 3],
    "linear_num_value_heads": [2, 8, 3],
    "attn_output_gate": _SWITCH,
    "output_gate_type": ["swish", "sigmoid"],
    "mtp_num_hidden_layers": [0, 1],
    "mlp_layer_types": [None, ["dense", "sparse"], ["sparse"] * 2, ["dense"] * 2, ["dense"]],
    "num_shared_experts": [0, 2],
    "is_moe_layer": [[False, True], [False, True, True, True]],
    "moe_num_shared_experts": [0, 2],
    "moe_layer_start_index": [0, 1, 2],
    "moe_layer_end_index": [-1, 0, 1, 5],
    "moe_layer_interval": [1, 2, 3],
    "moe_norm_min": [1e-12, 0.5],
    "intermediate_size_mlp": [24, 56],
    "moe_layers": [None, [], [0], [1, 0], [1, 7]],
    "interleave_moe_layer_step": [1, 3, 9],
    "attention_chunk_size": [None, 0, 1, 5, 8, 64],
    "attn_temperature_tuning": [True, False, 4, 0],
    "floor_scale": [1, 3, 64],
    "attn_scale": [0.0, 0.5, -0.1],
    "router_jitter_noise": [0.0, 0.5],
    "qkv_bias": _SWITCH,
    "use_qkv_bias": _SWITCH,
    "qk_layernorm": _SWITCH,
    "hidden_dropout": [0.1],
    "first_k_dense_replace": [0, 1],
    "q_lora_rank": [None, 24],
    "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1],
    "num_mtp_layers": [0, 1],
}


@st.composite
def configs(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(VARIATIONS)), max_size=4, unique=True))
    changes = {name: draw(st.sampled_from(VARIATIONS[name])) for name in names}
    return {"model_type": kind} | TINY[kind] | changes


def agrees(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json is read, and then, that it is read as transformers reads it."""
    try:
        ours = from_hf_config(fields)
    except ConfigError as error:
        tables = [value for value in fields.values() if isinstance(value, dict)]
        assert any(name in str(error) for names in (fields, *tables) for name in names), error
        return False
    ours = replace(ours, mtp_num_layers=0)  # which transformers leaves out
    trained = not ours.unmodelled
    try:
        theirs = oracle(fields, meta=not trained)
    except StrictDataclassFieldValidationError:  # version 5 takes no null, no int, of version 4
        return False
    except TypeError:  # nor YaRN of Mixtral where the size of heads follows from others
        assert fields["model_type"] == "mixtral" and ours.rope_type == "yarn"
        return False
    counted = count_parameters(ours, padded=False).total
    assert counted == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    if trained:
        windows = [ours.window_of(layer) for layer in range(ours.num_layers)]
        assert windows == oracle_windows(theirs)  # however much longer than the text
        tokens, logits = our_logits(ours, theirs)
        expected = oracle_logits(theirs, tokens)
        assert (logits - expected).abs().max() <= 1e-10 * expected.abs().max()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
def test_the_smallest_of_each_family_is_read_as_transformers_reads_it(kind: str) -> None:
    assert agrees({"model_type": kind} | TINY[kind])


_LONG = {"rope_theta": 100.0, "original_max_position_embeddings": 8, "factor": 4.0}
_YARN = {"rope_scaling": {"rope_type": "yarn", **_LONG}}
# Each family with what it can have, beside the smallest of `TINY`.
MORE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama, llama3": ("llama", {"rope_scaling": {**_LLAMA3, "rope_theta": 100.0}}),
    "llama, yarn": ("llama", _YARN),
    "ministral3, windows, scaled features": (
        "ministral3",
        {
            "rope_parameters": {n: v for n, v in _MINISTRAL.items() if "mscale" not in n},
            "sliding_window": 5,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "llama, yarn that scales nothing": (
        "llama",
        {"rope_scaling": {**_YARN["rope_scaling"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "qwen3, some windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "neox, in turn": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.25}),
    "dense v2": ("deepseek_v2", {"first_k_dense_replace": 2}),
    "dense v3": ("deepseek_v3", {"first_k_dense_replace": 2, "q_lora_rank": None}),
    "dense v3, yarn": (
        "deepseek_v3",
        {
            "first_k_dense_replace": 2,
            "rope_scaling": {"type": "yarn", **_LONG, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "glm4_moe_lite, listed layers, stretched": (
        "glm4_moe_lite",
        {
            "mlp_layer_types": ["sparse", "dense"],
            "rms_norm_eps": 0.1,
            "q_lora_rank": None,
            "rope_scaling": {"type": "yarn", **_LONG, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
    ),
    "v3, halves": ("deepseek_v3", {"rope_interleave": False}),
    "v3, one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "v2, greedy": ("deepseek_v2", {"topk_method": "greedy", "routed_scaling_factor": 16.0}),
    "v2, groups": ("deepseek_v2", {"topk_method": "group_limited_greedy"}),
    "kimi": ("deepseek_v3", {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, **_YARN}),
    "qwen3_moe, normalised": ("qwen3_moe", {"norm_topk_prob": True, "decoder_sparse_step": 2}),
    "smollm3, windows without positions": (
        "smollm3",
        {
            "no_rope_layers": [0, 1, 0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        },
    ),
    "olmo2, one head of keys": ("olmo2", {"num_key_value_heads": 1, **_YARN}),
    "olmoe, normalised": ("olmoe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
    "olmo3, scaled beside windows": (
        "olmo3",
        {"num_key_value_heads": 2, "sliding_window": 5, "rope_scaling": _YARN["rope_scaling"]},
    ),
    "gemma3, narrow windows": (
        "gemma3_text",
        {
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8,
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
        },
    ),
    "gemma3, tables by layer": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_LONG},
                "sliding_attention": {"rope_theta": 30.0},
            },
        },
    ),
    "gemma3, stretched beside windows": (
        "gemma3_text",
        {
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma2, listed layers, no caps": (
        "gemma2",
        {
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50.0},
        },
    ),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "gemma, untied": ("gemma", {"tie_word_embeddings": False, "hidden_act": "gelu"}),
    "granite, biases": (
        "granite",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **_YARN},
    ),
    "granitemoe, wide heads": ("granitemoe", {"head_dim": 16, "num_experts_per_tok": 3}),
    "granitemoeshared, without shared experts": (
        "granitemoeshared",
        {"shared_intermediate_size": 0, "num_experts_per_tok": 3},
    ),
    "llama, squared": ("llama", {"hidden_act": "relu2"}),
    "seed_oss, all biases": (
        "seed_oss",
        {"attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **_YARN},
    ),
    "stablelm, whole heads": (
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 1.0, "tie_word_embeddings": True, **_YARN},
    ),
    "arcee, biases": (
        "arcee",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 16, **_YARN},
    ),
    "nemotron, biases, whole heads": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 1.0,
            "head_dim": 12,
            "norm_eps": 0.1,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5, biases": (
        "ernie4_5",
        {"use_bias": True, "tie_word_embeddings": False, "head_dim": None, **_YARN},
    ),
    "ernie4_5_moe, some layers, no shared experts": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
            "head_dim": 12,
        },
    ),
    "phi3, shares and windows": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "rope_scaling": None,
        },
    ),
    "phi3, long factors": (
        "phi3",
        {
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
    ),
    "phi3, short factors of a part of each head": (
        "phi3",
        {
            "rope_scaling": {"type": "su", "original_max_position_embeddings": LENGTH}
            | {name: of[:3] for name, of in _FACTORS.items()},
            "original_max_position_embeddings": LENGTH,
            "max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
        },
    ),
    "llama, long factors": (
        "llama",
        {
            "rope_scaling": {"rope_type": "longrope", **_FACTORS, "factor": 4.0}
            | {"original_max_position_embeddings": LENGTH - 1, "rope_theta": 100.0}
        },
    ),
    "falcon, several key heads, two norms": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    ),
    "falcon, several key heads, one norm": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
    ),
    "falcon, one after the other": (
        "falcon",
        {"parallel_attn": False, "multi_query": False, "bias": True, **_YARN},
    ),
    "cohere, untied": ("cohere", {"tie_word_embeddings": False, "logit_scale": 0.3, **_YARN}),
    "cohere2, narrow windows": (
        "cohere2",
        {"sliding_window": 5, "sliding_window_pattern": 2, "num_key_value_heads": 4},
    ),
    "starcoder2, windows": ("starcoder2", {"sliding_window": 5, "tie_word_embeddings": False}),
    "starcoder2, without biases": ("starcoder2", {"use_bias": False, "head_dim": 16}),
    "glm, whole heads": ("glm", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "glm4, a quarter of wider heads": ("glm4", {"partial_rotary_factor": 0.25, "head_dim": 16}),
    "exaone4, narrow windows": (
        "exaone4",
        {"sliding_window": 5, "sliding_window_pattern": 2, "tie_word_embeddings": True},
    ),
    "exaone4, positions in all": (
        "exaone4",
        {"sliding_window": None, "layer_types": _BIASED[:1] * 5, **_YARN},
    ),
    "glm4_moe, normalised heads": (
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "head_dim": 16, "n_shared_experts": 2},
    ),
    "glm4_moe, one group": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0, **_YARN},
    ),
    "solar_open, biases, one group": (
        "solar_open",
        {
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 3.0,
            **_YARN,
        },
    ),
    "exaone_moe, narrow windows, listed experts": (
        "exaone_moe",
        {
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "num_shared_experts": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "hunyuan_v1_dense, yarn": ("hunyuan_v1_dense", {"tie_word_embeddings": True, **_YARN}),
    "hunyuan_v1_moe, lists": (
        "hunyuan_v1_moe",
        {"moe_topk": [3, 3], "num_key_value_heads": 1, "rope_scaling": None},
    ),
    "qwen3_next, some layers dense, wide taps, YaRN": (
        "qwen3_next",
        {
            "num_hidden_layers": 4,
            "full_attention_interval": 3,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "partial_rotary_factor": 0.5,
            **_YARN,
        },
    ),
    "qwen3_next, no linear attention": ("qwen3_next", {"layer_types": _BIASED[:1] * 2}),
    "nemotron_h, by names, groups of experts": (
        "nemotron_h",
        {
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            "n_group": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "nemotron_h, latents of experts": ("nemotron_h", {"moe_latent_size": 12}),
    "nemotron_h, no experts": ("nemotron_h", {"hybrid_override_pattern": "MM*-", "n_groups": 1}),
    "qwen3_5_text, tied, one key head": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "minimax_m2, whole heads": (
        "minimax_m2",
        {"rotary_dim": None, "num_experts_per_tok": 3, "tie_word_embeddings": True, **_YARN},
    ),
    "dots1, some windows": ("dots1", {"sliding_window": 5, "max_window_layers": 1}),
    "llama4, experts in all layers, stretched": (
        "llama4_text",
        {
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 0, 0, 1, 1],
            "rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0},
            "tie_word_embeddings": True,
        },
    ),
    "llama4, listed layers, no norms": (
        "llama4_text",
        {
            "moe_layers": [0, 4],
            "use_qk_norm": False,
            "attention_chunk_size": None,
            "attn_scale": 0.7,
            "attn_temperature_tuning": True,
        },
    ),
    "llama4, YaRN before norms, one chunk": (
        "llama4_text",
        {"attention_chunk_size": 24, "attn_temperature_tuning": False, **_YARN},
    ),
    "llama4, no experts": ("llama4_text", {"moe_layers": [], "attention_chunk_size": 2}),
    "gpt_oss, small numbers": ("gpt_oss", {"swiglu_limit": 0.3, "sliding_window": 4}),
}


@pytest.mark.parametrize("case", [*TINY, *MORE])
def test_logits_and_gradients_are_those_of_transformers(case: str) -> None:
    kind, changes = MORE.get(case, (case, {}))
    fields = {"model_type": kind} | TINY[kind] | changes
    ours = replace(from_hf_config(fields), mtp_num_layers=0)
    assert ours.unmodelled == ()
    theirs = oracle(fields)
    tokens, logits = our_logits(ours, theirs)
    expected = oracle_logits(theirs, tokens)
    assert (logits - expected).abs().max() <= 1e-12 * expected.abs().max()
    found, true = both_gradients(ours, theirs)
    assert set(found) <= set(true)
    for name, grad in found.items():
        # Where positions are learned a key's bias changes no score: its gradient is rounding.
        vanishes = kind == "gpt2" and name.endswith("k_proj.bias")
        scale = true[name.replace("k_proj", "q_proj") if vanishes else name].abs().max()
        assert (grad - true[name]).abs().max() <= 1e-12 * scale, name
    assert all(not grad.any() for name, grad in true.items() if name not in found)


def test_tokens_are_multiplied_by_their_weights_as_in_transformers_to_the_bit() -> None:
    """In bf16, in which the weight is rounded before the product, not after it."""
    fields = {"model_type": "llama4_text"} | TINY["llama4_text"]
    theirs, ours = oracle(fields).bfloat16(), from_hf_config(fields)
    mixture = Stage(ours).bfloat16().eval().layers["1"].mlp
    assert isinstance(mixture, MoE)
    router = theirs.model.layers[1].feed_forward.router
    with torch.no_grad():
        mixture.router.weight.copy_(router.weight)
        x_TH = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
        scores_TE, _ = router(x_TH)
        read: list[torch.Tensor] = []

        def told(x_TH: torch.Tensor, *_: Any) -> torch.Tensor:
            read.append(x_TH)
            return x_TH

        mixture.dispatch = told
        batch = batch_of(ours, [[64]])
        context = Context(1, {}, None, None, None, None, {}, None, batch.token_ids[:, 0], 0)
        mixture(x_TH, context)
    assert torch.equal(read[0], x_TH * scores_TE.max(1, keepdim=True).values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TINY)
@given(data=st.data())
@settings(max_examples=20)
def test_any_config_is_refused_by_name_or_read_as_transformers_reads_it(
    kind: str, data: st.DataObject
) -> None:
    agrees(data.draw(configs(kind)))


@pytest.mark.parametrize("kind", TINY)
def test_a_wrong_number_is_told_by_its_field_and_what_is_offered_mends_it(kind: str) -> None:
    """Flags of this project could not be typed: the file is read before any of them."""
    fields = {"model_type": kind} | TINY[kind]
    dropout = "attn_pdrop" if kind == "gpt2" else "attention_dropout"
    names = {*fields, dropout, "initializer_range"} - {"model_type", "vocab_size"}
    refused = 0
    for name in names:
        for value in (-1, 0, 1, 3, 7, 9, 0.5, 2.0):
            try:
                from_hf_config(fields | {name: value})
            except ConfigError as error:
                refused += 1
                assert name in str(error) and "--" not in str(error), error
                first = error.mistakes[0]
                for choice in first.works:
                    field, _, offered = choice.partition(" = ")
                    with suppress(ConfigError):  # of something else
                        from_hf_config(fields | {name: value} | {field: json.loads(offered)})
                        continue
                    with pytest.raises(ConfigError) as left:
                        from_hf_config(fields | {name: value} | {field: json.loads(offered)})
                    assert first.what not in str(left.value)
    assert refused > 20


@pytest.mark.parametrize("count", ["n_group", "topk_group"])
def test_groups_of_experts_without_their_count_are_refused(count: str) -> None:
    fields = {"model_type": "deepseek_v2"} | TINY["deepseek_v2"]
    fields |= {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1, count: None}
    with pytest.raises(ConfigError, match=f"{count} = null"):
        from_hf_config(fields)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "glm4_moe", "dots1", "nemotron_h"])
def test_more_groups_than_there_are_cannot_be_chosen(kind: str) -> None:
    method = {"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" else {}
    fields = {"model_type": kind} | TINY[kind] | method | {"n_group": 1, "topk_group": 2}
    with pytest.raises(ConfigError, match="works: topk_group = 1"):
        from_hf_config(fields)


_SPELLINGS = (
    ("n_embd", "hidden_size"),
    ("n_layer", "num_hidden_layers"),
    ("n_head", "num_attention_heads"),
    ("n_routed_experts", "num_local_experts"),
    ("num_experts", "num_local_experts"),
    ("layers_block_type", "layer_types"),
    ("num_nextn_predict_layers", "num_mtp_layers"),
)
"""Fields that say the same."""


@pytest.mark.parametrize("names", _SPELLINGS, ids=" ".join)
def test_what_is_said_twice_is_refused_or_said_alike(names: tuple[str, str]) -> None:
    one, other = names
    said = [
        {"model_type": kind} | TINY[kind] | {one: value, other: another}
        for kind in TINY
        for value, another in product(VARIATIONS[one], VARIATIONS[other])
        if value != another and None not in (value, another)
    ]
    known = [fields for fields in said if not unknown(fields)]
    assert known
    for fields in known:
        agrees(fields)


def unknown(fields: Mapping[str, Any]) -> bool:
    try:
        from_hf_config(fields)
    except ConfigError as error:
        return "unknown field" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("kind", chosen(TINY, *[*TINY][::12]))  # the test above draws of all
def test_each_field_is_refused_by_name_or_read_as_transformers_reads_it(kind: str) -> None:
    fields = {"model_type": kind} | TINY[kind]
    read = {
        name
        for name, values in VARIATIONS.items()
        for value in values
        if agrees(fields | {name: value})
    }
    assert len(read) >= 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", chosen(["llama", "mistral", "qwen3", "gpt2", "gpt_neox"], "llama", "gpt2", "gpt_neox")
)
def test_fields_without_effect_have_none_in_transformers(kind: str) -> None:
    fields = {"model_type": kind} | TINY[kind]
    tokens = torch.arange(LENGTH)[None]
    expected = oracle_logits(oracle(fields), tokens)
    tried = 0
    for name in WITHOUT_EFFECT:
        for value in (*_OTHER_VALUES.get(name, ()), True, 2, 0.5, "eager", ["a"], {"a": 1}):
            ours = from_hf_config(fields | {name: value})
            assert ours == from_hf_config(fields)
            try:
                theirs = oracle(fields | {name: value})
            except Exception:  # transformers takes no such value
                continue
            tried += 1
            assert torch.equal(oracle_logits(theirs, tokens), expected), (name, value)
            break
    assert tried >= 0.9 * len(WITHOUT_EFFECT)


_OTHER_VALUES = {
    "dtype": ["bfloat16"],
    "torch_dtype": ["bfloat16"],
    "id2label": [{"0": "a"}],
    "label2id": [{"a": 0}],
    "problem_type": ["regression"],
    "pad_token_id": [3],
    "attn_implementation": ["sdpa"],
    "_attn_implementation": ["sdpa"],
    "experts_implementation": ["eager"],
}


@pytest.mark.parametrize("kind", TINY)
def test_what_transformers_writes_is_read_back(kind: str, tmp_path: Path) -> None:
    fields = {"model_type": kind} | TINY[kind]
    config = oracle(fields, meta=True).config
    config.save_pretrained(tmp_path)
    expected = _written_out(from_hf_config(fields))
    assert _written_out(from_hf_config(config.to_dict())) == expected
    assert _written_out(from_hf_config(tmp_path)) == expected


def _written_out(model: ModelConfig) -> ModelConfig:
    return replace(model, num_query_groups=model.num_kv_heads, kv_channels=model.head_dim)


@pytest.mark.parametrize("name", PUBLISHED)
def test_absent_fields_are_what_transformers_takes_them_for(name: str) -> None:
    fields = PUBLISHED[name]
    if "qwen" in name.lower() and "linear_key_head_dim" not in fields:
        fields = fields | {"use_sliding_window": True}
    compared = 0
    for absent in set(fields) - {"model_type"}:
        left = {other: value for other, value in fields.items() if other != absent}
        try:
            ours = from_hf_config(left)
        except ConfigError:  # a size, which has to be there
            continue
        written = config_of(left).to_dict()
        assert _written_out(from_hf_config(written)) == _written_out(ours), absent
        compared += 1
    assert compared >= 7


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_in_transformers(name: str) -> None:
    model = replace(from_hf_config(PUBLISHED[name]), mtp_num_layers=0)  # which it leaves out
    theirs = oracle(PUBLISHED[name], meta=True)
    assert count_parameters(model, padded=False).total == sum(
        parameter.numel() for parameter in theirs.parameters() if parameter.requires_grad
    )
