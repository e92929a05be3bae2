"""Small models of every family by their config.json, and values of fields that some family has."""

from collections.abc import Mapping
from typing import Any

LENGTH = 24
"""Tokens of a text that is tried."""
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
_DEEPSEEK_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group")
_DENSE_LATENTS = {n: v for n, v in _LATENTS.items() if n not in _GROUPS or n in _SIZES} | {
    "num_key_value_heads": 4
}
_INDEXER = {"index_n_heads": 24, "index_head_dim": 10, "index_topk": 6}
"""So many heads that no two scores are 0, of which either might be chosen."""
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
    "internlm3": _SIZES | {"num_key_value_heads": 2, "head_dim": 12},
    "iquestcoder": _SIZES | {"num_key_value_heads": 2, "head_dim": 12},
    "helium": _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    "jais2": _SIZES | {"num_key_value_heads": 2, "pad_token_id": None},
    "mistral": _SIZES | {"num_key_value_heads": 2},
    "ministral": _SIZES | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5},
    "ministral3": _SIZES | {"num_key_value_heads": 2, "rope_parameters": _MINISTRAL},
    "qwen2": _SIZES | {"num_key_value_heads": 2},
    "qwen3": _SIZES | {"num_key_value_heads": 2},
    "smollm3": _SIZES | {"num_hidden_layers": 5, "pad_token_id": None},
    "granite": _SIZES | {"num_key_value_heads": 2, **_GRANITE},
    "hyperclovax": _SIZES | {"num_key_value_heads": 2, **_GRANITE},
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
    "apertus": _SIZES | {"num_key_value_heads": 2, "pad_token_id": None},
    "nemotron": _SIZES | {"num_key_value_heads": 2},
    "cwm": _SIZES | {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 5},
    "granite_swa": _SIZES
    | _GRANITE
    | {"num_hidden_layers": 5, "num_key_value_heads": 2, "sliding_window": 5},
    "granitemoe_swa": _SIZES
    | _EXPERTS
    | _GRANITE
    | {"num_local_experts": 4, "shared_intermediate_size": 20, "sliding_window": 5},
    "afmoe": _SIZES
    | _EXPERTS
    | {"num_hidden_layers": 5, "head_dim": 12, "num_experts": 4, "moe_intermediate_size": 24}
    | {"sliding_window": 5, "mup_enabled": True, "route_scale": 2.5},
    "mellum": _SIZES
    | _EXPERTS
    | {"head_dim": 12, "num_experts": 4, "moe_intermediate_size": 24, "sliding_window": 5}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    "mimo_v2_flash": {
        n: v for n, v in _GROUPS.items() if not n.startswith(("n_sh", "first", "n_gr"))
    }
    | {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 12, "v_head_dim": 10}
    | {"sliding_window": 5},
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
    "cohere2_moe": _SIZES
    | _EXPERTS
    | {"num_hidden_layers": 5, "head_dim": 12, "num_experts": 4, "pad_token_id": None}
    | {"sliding_window": 5, "first_k_dense_replace": 1},
    "olmo": _SIZES | {"num_key_value_heads": 2, "clip_qkv": 0.05, "pad_token_id": None},
    "nanochat": _SIZES | {"num_key_value_heads": 2, "pad_token_id": None},
    "phi": _SIZES | {"num_key_value_heads": 2},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100}
    | {"rotary_dim": 6},
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100}
    | {"rotary_dim": 4},
    "opt": {n: v for n, v in _SIZES.items() if n != "intermediate_size"}
    | {"ffn_dim": 48, "max_position_embeddings": 32, "pad_token_id": None},
    "gpt_neo": {"hidden_size": 32, "num_heads": 4, "num_layers": 3, "vocab_size": 100}
    | {"max_position_embeddings": 32, "window_size": 5}
    | {"attention_types": [[["global", "local"], 1], [["local"], 1]]},
    "olmo2": _SIZES | {"num_key_value_heads": 2, "pad_token_id": None},
    "olmoe": _SIZES | _EXPERTS | {"num_experts": 4, "pad_token_id": None},
    "flex_olmo": _SIZES | _EXPERTS | {"num_experts": 4, "pad_token_id": None},
    "olmo3": _SIZES | {"num_hidden_layers": 5, "pad_token_id": None},
    "gemma3_text": _SIZES
    | {
        "num_hidden_layers": 7,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "query_pre_attn_scalar": 12,
        "pad_token_id": None,
    },
    "gemma4_text": _SIZES
    | {"num_hidden_layers": 7, "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": None}
    | {"global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    | {"sliding_window": 5, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 1.5}
    | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 12},
    "gemma4_unified_text": _SIZES
    | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None}
    | {
        "global_head_dim": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
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
    "vaultgemma": _SIZES
    | {"num_key_value_heads": 2, "head_dim": 12, "sliding_window": 5, "pad_token_id": None},
    "gemma": _SIZES | {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": None},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100},
    "gpt_bigcode": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100},
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
    "kimi_linear": {n: v for n, v in _LATENTS.items() if n not in _DEEPSEEK_EXPERTS}
    | {
        "num_hidden_layers": 3,
        "pad_token_id": None,
        "q_lora_rank": None,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_renormalize": True,
        "linear_attn_config": {
            "full_attn_layers": [2],
            "kda_layers": [3, 1],
            "head_dim": 10,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
    },
    "nemotron_h": {n: v for n, v in _SIZES.items() if n != "num_hidden_layers"}
    | _MAMBA
    | {"hybrid_override_pattern": "M-EM*"},
    "gpt_oss": _SIZES | _EXPERTS | {"num_local_experts": 4, "head_dim": 8},
    "glm": _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    "glm4": _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None},
    "exaone": _SIZES | {"num_key_value_heads": 2},
    "exaone4": _SIZES | {"num_hidden_layers": 5, "num_key_value_heads": 2, "head_dim": 8},
    "glm4_moe": _GROUPS | {"num_key_value_heads": 2},
    "sarvam_moe": _GROUPS
    | {"num_key_value_heads": 2, "head_dim": 12, "n_group": 1, "topk_group": 1},
    "solar_open": {n: v for n, v in _GROUPS.items() if n != "intermediate_size"}
    | {"num_key_value_heads": 2, "head_dim": 12, "first_k_dense_replace": 0},
    "hunyuan_v1_dense": _SIZES | _HUNYUAN,
    "hunyuan_v1_moe": _SIZES | _HUNYUAN | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _SIZES
    | {"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 4}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "exaone_moe": {n: v for n, v in _GROUPS.items() if not n.endswith("ed_experts")}
    | {"num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 4},
    "dots1": _GROUPS | {"norm_topk_prob": True},
    "minimax_m2": _SIZES
    | _EXPERTS
    | {"num_key_value_heads": 2, "head_dim": 12, "num_local_experts": 4, "rotary_dim": 6},
    "deepseek_v32": _LATENTS | _INDEXER,
    "glm_moe_dsa": _LATENTS | _INDEXER | {"index_n_heads": 21, "rope_theta": 50.0},
    "deepseek_v2": _LATENTS,
    "deepseek_v3": _LATENTS,
    "glm4_moe_lite": _LATENTS,
    "youtu": _DENSE_LATENTS,
    "minicpm3": _DENSE_LATENTS | {"scale_emb": 3, "dim_model_base": 20},
    "mistral4": _LATENTS | {"n_group": 1, "topk_group": 1, "rope_parameters": _MINISTRAL},
    "sarvam_mla": _LATENTS | {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
    "flint": _SIZES
    | _EXPERTS
    | {"num_hidden_layers": 5, "head_dim": 12, "num_experts": 4, "moe_intermediate_size": 24}
    | {"shared_expert_intermediate_size": 20, "sliding_window": 5},
    "lfm2": _SIZES
    | {"num_hidden_layers": 3, "num_key_value_heads": 2, "full_attn_idxs": [1]}
    | {"block_multiple_of": 16},
    "lfm2_moe": _SIZES
    | _EXPERTS
    | {"num_hidden_layers": 3, "num_experts": 4, "moe_intermediate_size": 24}
    | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
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
    {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 70.0},
    {"type": "dynamic"},
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
    "num_dense_layers": [0, 1, 2, 9],
    "route_scale": [None, 1.0, 3.0],
    "mup_enabled": [*_SWITCH, None],
    "global_attn_every_n_layers": [1, 2, None],
    "layer_rope_theta": [None, [50, 50.0], [0, 50], [None, 1e4], [0, 0], [50]],
    "v_head_dim": [6, 12],
    "attention_value_scale": [None, 0.3, 0.0, -1.0],
    "sliding_window_size": [None, 0, 4],
    "logit_scale": [1, 0.3, 0.0],
    "new_decoder_architecture": _SWITCH,
    "num_ln_in_parallel_attn": [None, 1, 2],
    "multi_query": _SWITCH,
    "use_post_norm": _SWITCH,
    "parallel_attn": _SWITCH,
    "num_kv_heads": [None, 1, 2],
    "bias": _SWITCH,
    "alibi": _SWITCH,
    "ffn_hidden_size": [None, 24],
    "activation": ["gelu", "relu2", "relu"],
    "clip_qkv": [None, 0.02, 8.0, 0.0],
    "query_pre_attn_scalar": [8, 12, 0],
    "rope_local_base_freq": [50, 100.0],
    "final_logit_softcapping": [None, 3.0, -1.0],
    "attn_logit_softcapping": [None, 5.0, 0.0],
    "cache_implementation": ["hybrid"],
    "use_bidirectional_attention": [None, False, True],
    "hidden_activation": [None, "gelu_pytorch_tanh"],
    "add_cross_attention": _SWITCH,
    "is_decoder": _SWITCH,
    "hidden_act": [
        "silu",
        "swish",
        "gelu",
        "gelu_new",
        "gelu_fast",
        "quick_gelu",
        "relu",
        "relu2",
        "xielu",
    ],
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
    "no_rope_layers": [None, [], [1, 1], [1, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 0, 0, 1, 1, 0]],
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
    "shared_expert_combination_strategy": ["sum", "average", "max"],
    "expert_selection_fn": ["softmax", "sigmoid", "relu"],
    "prefix_dense_sliding_window_pattern": [1, 2],
    "prefix_dense_intermediate_size": [None, 16],
    "full_attn_idxs": [None, [], [0], [0, 2], [5]],
    "conv_L_cache": [1, 2, 4],
    "conv_bias": _SWITCH,
    "block_multiple_of": [1, 8],
    "block_ffn_dim_multiplier": [0.0, 0.5, 2],
    "block_auto_adjust_ff_dim": _SWITCH,
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
    "router_scaling_factor": [1.0, 3.0],
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
    "scale_emb": [1, 2.5],
    "scale_depth": [None, 1, 2.0],
    "dim_model_base": [None, 1, 32],
    "embedding_initializer_range": [0.1],
    "moe_layer_freq": [1, 2],
    "num_nextn_predict_layers": [0, 1],
    "num_mtp_layers": [0, 1],
    "mtp_layers_block_type": [None, ["attention", "moe"], ["mlp"], []],
    "mtp_hybrid_override_pattern": ["*E", "M-", ""],
}

_LONG = {"rope_theta": 100.0, "original_max_position_embeddings": 8, "factor": 4.0}
_YARN = {"rope_scaling": {"rope_type": "yarn", **_LONG}}
MORE: Mapping[str, Mapping[str, dict[str, Any]]] = {
    "llama": {
        "llama3": {"rope_scaling": {**_LLAMA3, "rope_theta": 100.0}},
        "yarn": _YARN,
        "yarn that scales nothing": {
            "rope_scaling": {**_YARN["rope_scaling"], "mscale": 0.7, "mscale_all_dim": 0.7}
        },
        "linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        "squared": {"hidden_act": "relu2", "attention_bias": True},
        "biases of MLPs": {"mlp_bias": True},
        "long factors": {
            "rope_scaling": {"rope_type": "longrope", **_FACTORS, "factor": 4.0}
            | {"original_max_position_embeddings": LENGTH - 1, "rope_theta": 100.0}
        },
    },
    "internlm3": {"biases": {"qkv_bias": True, "bias": True}},
    "ministral": {
        "some windows": {"layer_types": ["full_attention", "sliding_attention"], "head_dim": 8}
    },
    "hyperclovax": {
        "plain": {"use_post_norm": False, "logits_scaling": 0.3, "attention_bias": True}
        | {"mlp_bias": True, "tie_word_embeddings": True}
    },
    "hy_v3": {
        "all sparse": {"mlp_layer_types": ["sparse"] * 3, "num_shared_experts": 2}
        | {"router_scaling_factor": 1.0}
    },
    "gpt_bigcode": {"heads of their own": {"multi_query": False, "n_inner": 40}},
    "exaone": {"GPT-2's names": {"layer_norm_epsilon": 0.1, "activation_function": "gelu"}},
    "ministral3": {
        "windows, scaled features": {
            "rope_parameters": {n: v for n, v in _MINISTRAL.items() if "mscale" not in n},
            "sliding_window": 5,
            "head_dim": 12,
            "tie_word_embeddings": True,
        }
    },
    "qwen3": {
        "some windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    },
    "smollm3": {
        "windows without positions": {
            "no_rope_layers": [0, 1, 0, 1, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": False,
        }
    },
    "granite": {
        "biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **_YARN}
    },
    "cwm": {"plain": {"rope_scaling": {"type": "default"}, "layer_types": _BIASED[1:] * 5}},
    "granite_swa": {
        "bases by layer": {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "layer_rope_theta": [1e4, 50.0, 1e4],
            "attention_bias": True,
            "mlp_bias": True,
        }
    },
    "granitemoe_swa": {
        "no positions in whole attention": {
            "layer_rope_theta": [0, 1e4],
            "shared_intermediate_size": 0,
            "tie_word_embeddings": True,
        }
    },
    "afmoe": {
        "all sparse, one key head": {
            "num_dense_layers": 0,
            "num_key_value_heads": 1,
            "num_shared_experts": 1,
            "mup_enabled": False,
            "tie_word_embeddings": True,
            "layer_types": _BIASED[1:] * 5,
            **_YARN,
        }
    },
    "mellum": {
        "some dense, YaRN": {
            "mlp_layer_types": ["dense", "sparse"],
            "norm_topk_prob": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_LONG},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        }
    },
    "mimo_v2_flash": {
        "windows in all layers, groups": {
            "layer_types": _BIASED[1:] * 7,
            "n_group": 2,
            "attention_bias": True,
            "attention_value_scale": None,
            "routed_scaling_factor": None,
            "sliding_window_size": 5,
            "tie_word_embeddings": True,
        },
        "no windows": {
            "layer_types": _BIASED[:1] * 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "default",
                    "rope_theta": 50.0,
                    "partial_rotary_factor": 0.5,
                }
            },
        },
    },
    "gemma4_text": {
        "sizes by layer, divided": {
            "per_layer_config": {"3": {"head_dim": 12, "num_key_value_heads": 2}}
            | {"06": {"head_dim": 12, "num_key_value_heads": 2}},
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"] + _BIASED[1:] * 3,
            "attention_k_eq_v": False,
            "global_head_dim": 12,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "factor": 2.0, "rope_theta": 40.0}
                | {"partial_rotary_factor": 0.4},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
            "tie_word_embeddings": False,
        },
        "no windows": {"layer_types": _BIASED[:1] * 7, "num_global_key_value_heads": None},
        "dense": {"enable_moe_block": False},
    },
    "granitemoe": {"wide heads": {"head_dim": 16, "num_experts_per_tok": 3}},
    "granitemoeshared": {
        "without shared experts": {"shared_intermediate_size": 0, "num_experts_per_tok": 3}
    },
    "olmo": {
        "unbounded": {"clip_qkv": None, "attention_bias": True, "tie_word_embeddings": True}
        | {"num_key_value_heads": None, "head_dim": 12, **_YARN},
    },
    "nanochat": {
        "biases, uncapped": {"attention_bias": True, "final_logit_softcapping": None}
        | {"tie_word_embeddings": True, "hidden_act": "gelu", "head_dim": 12, "rms_norm_eps": 0.1}
        | _YARN
    },
    "phi": {
        "tied, with dropout": {"tie_word_embeddings": True, "partial_rotary_factor": 0.25}
        | {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "hidden_act": "gelu", **_YARN},
    },
    "gptj": {
        "whole heads, tied": {"rotary_dim": 8, "n_inner": 48, "tie_word_embeddings": True}
        | {"activation_function": "gelu", "layer_norm_epsilon": 0.1, "resid_pdrop": 0.1},
    },
    "codegen": {"whole heads": {"rotary_dim": 8, "n_inner": 48, "embd_pdrop": 0.1}},
    "opt": {
        "no weights of norms": {"layer_norm_elementwise_affine": False, "dropout": 0.0}
        | {"tie_word_embeddings": False, "activation_function": "gelu"},
        "no biases": {"enable_bias": False, "word_embed_proj_dim": 32},
    },
    "gpt_neo": {
        "no windows": {"attention_types": [[["global"], 3]], "tie_word_embeddings": False}
        | {"intermediate_size": 40, "resid_dropout": 0.1, "attention_layers": ["global"] * 3},
    },
    "seed_oss": {
        "biases of MLPs, dropout": {"mlp_bias": True, "residual_dropout": 0.1}
        | {"attention_bias": False},
        "bias of an output": {"attention_out_bias": True},
        "all biases": {
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            **_YARN,
        },
    },
    "stablelm": {
        "whole heads": {
            "use_qkv_bias": True,
            "partial_rotary_factor": 1.0,
            "tie_word_embeddings": True,
            **_YARN,
        }
    },
    "arcee": {"biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 16, **_YARN}},
    "apertus": {"plain": {"hidden_act": "relu2", "head_dim": 12, "rope_parameters": {}, **_YARN}},
    "nemotron": {
        "biases, whole heads": {
            "attention_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 1.0,
            "head_dim": 12,
            "norm_eps": 0.1,
            "tie_word_embeddings": True,
        }
    },
    "ernie4_5": {
        "biases": {"use_bias": True, "tie_word_embeddings": False, "head_dim": None, **_YARN}
    },
    "ernie4_5_moe": {
        "some layers, no shared experts": {
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
            "head_dim": 12,
        }
    },
    "phi3": {
        "shares and windows": {
            "partial_rotary_factor": 0.75,
            "sliding_window": 5,
            "num_key_value_heads": 1,
            "rope_scaling": None,
        },
        "long factors": {
            "original_max_position_embeddings": 8,
            "max_position_embeddings": 16,
            "tie_word_embeddings": True,
        },
        "short factors of a part of each head": {
            "rope_scaling": {"type": "su", "original_max_position_embeddings": LENGTH}
            | {name: of[:3] for name, of in _FACTORS.items()},
            "original_max_position_embeddings": LENGTH,
            "max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
        },
    },
    "falcon": {
        "several key heads, two norms": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 48,
        },
        "several key heads, one norm": {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        "one after the other": {
            "parallel_attn": False,
            "multi_query": False,
            "bias": True,
            **_YARN,
        },
    },
    "cohere": {"untied": {"tie_word_embeddings": False, "logit_scale": 0.3, **_YARN}},
    "cohere2_moe": {
        "sigmoids, shared experts": {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "num_shared_experts": 2,
            "rms_norm_eps": 1e-6,
            "prefix_dense_intermediate_size": 24,
            "prefix_dense_sliding_window_pattern": 2,
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"],
            "sliding_window_pattern": 3,
        }
    },
    "cohere2": {
        "narrow windows": {
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "num_key_value_heads": 4,
        }
    },
    "olmo2": {"one head of keys": {"num_key_value_heads": 1, **_YARN}},
    "olmoe": {
        "normalised, bounded": {"norm_topk_prob": True, "num_experts_per_tok": 3, "clip_qkv": 0.5}
    },
    "olmo3": {
        "scaled beside windows": {
            "num_key_value_heads": 2,
            "sliding_window": 5,
            "rope_scaling": _YARN["rope_scaling"],
        },
        "tables by layer": {
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_LONG},
                "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
            },
        },
    },
    "gemma3_text": {
        "narrow windows": {
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 8,
            "rope_theta": 500.0,
            "rope_local_base_freq": 50.0,
        },
        "tables by layer": {
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_LONG},
                "sliding_attention": {"rope_theta": 30.0},
            },
        },
        "stretched beside windows": {
            "sliding_window": 4,
            "sliding_window_pattern": 2,
            "final_logit_softcapping": 3.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    },
    "gemma2": {
        "listed layers, no caps": {
            "layer_types": ["full_attention", *["sliding_attention"] * 4],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 50.0},
        }
    },
    "gemma": {"untied": {"tie_word_embeddings": False, "hidden_act": "gelu"}},
    "starcoder2": {
        "windows": {"sliding_window": 5, "tie_word_embeddings": False},
        "without biases": {"use_bias": False, "head_dim": 16},
    },
    "gpt_neox": {
        "biases of MLPs": {"attention_bias": False},
        "in turn": {"use_parallel_residual": False, "rotary_pct": 0.25},
    },
    "qwen3_moe": {
        "normalised": {"norm_topk_prob": True, "decoder_sparse_step": 2},
        "windows": {"use_sliding_window": True, "sliding_window": 5},
    },
    "qwen3_next": {
        "some layers dense, wide taps, YaRN": {
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
        "no linear attention": {"layer_types": _BIASED[:1] * 2},
    },
    "qwen3_5_text": {
        "tied, one key head": {
            "linear_num_key_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 100.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        }
    },
    "kimi_linear": {
        "all dense but the last, query latents, listed": {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_attn_config": {},
            "linear_num_heads": 2,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 2,
            "mlp_layer_types": ["dense", "dense", "sparse"],
            "q_lora_rank": 12,
            "rms_norm_eps": 1e-3,
        },
        "five layers by default": {"num_hidden_layers": 5, "linear_attn_config": {"num_heads": 4}},
        "no linear attention": {"layer_types": ["full_attention"] * 3},
    },
    "nemotron_h": {
        "by names, groups of experts": {
            "layers_block_type": ["moe", "linear_attention", "full_attention"],
            "n_group": 2,
            "routed_scaling_factor": 2.5,
        },
        "latents of experts": {"moe_latent_size": 12},
        "no experts": {"hybrid_override_pattern": "MM*-", "n_groups": 1},
        "MTP": {
            "num_nextn_predict_layers": 2,
            "mtp_layers_block_type": ["full_attention", "moe", "mamba"],
        },
        "MTP, by letters": {
            "num_nextn_predict_layers": 1,
            "mtp_hybrid_override_pattern": "*-",
        },
    },
    "gpt_oss": {
        "small numbers": {"swiglu_limit": 0.3, "sliding_window": 4},
        "unscaled": {"rope_scaling": {"rope_type": "default"}},
    },
    "glm": {"whole heads": {"partial_rotary_factor": 1.0, "attention_bias": False}},
    "glm4": {"a quarter of wider heads": {"partial_rotary_factor": 0.25, "head_dim": 16}},
    "exaone4": {
        "narrow windows": {
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "tie_word_embeddings": True,
        },
        "positions in all": {"sliding_window": None, "layer_types": _BIASED[:1] * 5, **_YARN},
    },
    "glm4_moe": {
        "normalised heads": {
            "use_qk_norm": True,
            "attention_bias": True,
            "head_dim": 16,
            "n_shared_experts": 2,
        },
        "one group": {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0, **_YARN},
    },
    "solar_open": {
        "biases, one group": {
            "attention_bias": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 3.0,
            **_YARN,
        }
    },
    "hunyuan_v1_dense": {"yarn": {"tie_word_embeddings": True, **_YARN}},
    "hunyuan_v1_moe": {
        "lists": {"moe_topk": [3, 3], "num_key_value_heads": 1, "rope_scaling": None}
    },
    "exaone_moe": {
        "narrow windows, listed experts": {
            "sliding_window": 5,
            "sliding_window_pattern": 2,
            "mlp_layer_types": ["sparse", "dense", "sparse", "dense"],
            "num_shared_experts": 2,
            "head_dim": 12,
            "tie_word_embeddings": True,
        }
    },
    "dots1": {"some windows": {"sliding_window": 5, "max_window_layers": 1}},
    "minimax_m2": {
        "whole heads": {
            "rotary_dim": None,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
            **_YARN,
        }
    },
    "minicpm3": {
        "unscaled": {"scale_depth": None, "dim_model_base": None, "q_lora_rank": None}
        | {"rope_scaling": {"type": "longrope", **{n: of[:2] for n, of in _FACTORS.items()}}}
    },
    "mistral4": {
        "dense first, softmax over all": {"first_k_dense_replace": 1, "norm_topk_prob": False}
        | {"routed_scaling_factor": 2.0, "rope_interleave": False}
        | {"rope_parameters": _MINISTRAL | {"mscale": 0.7, "mscale_all_dim": 1.2}}
    },
    "sarvam_mla": {
        "stretched": {"q_lora_rank": 24, "head_dim": 20, "num_shared_experts": 1}
        | {"rope_scaling": {"type": "deepseek_yarn", **_LONG, "mscale": 1.0, "mscale_all_dim": 1.0}}
    },
    "sarvam_moe": {
        "half heads": {"partial_rotary_factor": 0.5, "use_qk_norm": False, "use_qkv_bias": True}
    },
    "flint": {
        "all sparse, listed windows": {"mlp_only_layers": [], "layer_types": _BIASED[1:] * 5}
        | {"num_key_value_heads": 4, "tie_word_embeddings": True, **_YARN}
    },
    "lfm2": {
        "listed, as told": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5}
        | {"block_auto_adjust_ff_dim": False, "tie_embedding": False, **_YARN},
    },
    "lfm2_moe": {
        "without bias": {"use_expert_bias": False, "num_experts_per_tok": 3, "conv_L_cache": 2}
        | {"num_dense_layers": 0, "routed_scaling_factor": 2.0, "tie_word_embeddings": False}
    },
    "deepseek_v2": {
        "dense": {"first_k_dense_replace": 2},
        "greedy": {"topk_method": "greedy", "routed_scaling_factor": 16.0},
        "groups": {"topk_method": "group_limited_greedy"},
    },
    "deepseek_v3": {
        "dense": {"first_k_dense_replace": 2, "q_lora_rank": None},
        "dense, yarn": {
            "first_k_dense_replace": 2,
            "rope_scaling": {"type": "yarn", **_LONG, "mscale": 0.7, "mscale_all_dim": 1.2},
        },
        "halves": {"rope_interleave": False},
        "one group": {"n_group": 1, "topk_group": 1},
        "kimi": {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, **_YARN},
    },
    "glm4_moe_lite": {
        "listed layers, stretched": {
            "mlp_layer_types": ["sparse", "dense"],
            "rms_norm_eps": 0.1,
            "q_lora_rank": None,
            "rope_scaling": {"type": "yarn", **_LONG, "mscale": 0.7, "mscale_all_dim": 1.2},
        }
    },
    "llama4_text": {
        "experts in all layers, stretched": {
            "interleave_moe_layer_step": 1,
            "no_rope_layers": [1, 0, 0, 1, 1],
            "rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0},
            "tie_word_embeddings": True,
        },
        "listed layers, no norms": {
            "moe_layers": [0, 4],
            "use_qk_norm": False,
            "attention_chunk_size": None,
            "attn_scale": 0.7,
            "attn_temperature_tuning": True,
        },
        "YaRN before norms, one chunk": {
            "attention_chunk_size": 24,
            "attn_temperature_tuning": False,
            **_YARN,
        },
        "no experts": {"moe_layers": [], "attention_chunk_size": 2},
    },
}
"""What else a family can have, beside the smallest."""
CASES: Mapping[str, dict[str, Any]] = {
    **{kind: {"model_type": kind} | fields for kind, fields in TINY.items()},
    **{
        f"{kind}, {name}": {"model_type": kind} | TINY[kind] | fields
        for kind, cases in MORE.items()
        for name, fields in cases.items()
    },
}
"""All of them, whole."""
