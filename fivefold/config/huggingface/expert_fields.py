"""What goes into the config.json of a mixture of experts."""

from fivefold.config.by_layer import OF_LINEAR_ATTENTION
from fivefold.config.huggingface.dense_fields import (
    ACTIVATIONS,
    Fields,
    ernie4_5,
    layer_types,
    listed_windows,
    llama_like,
    rope_fields,
    size_fields,
)
from fivefold.config.model import ModelConfig


def mixtral(model: ModelConfig, kind: str) -> Fields:
    """Of Mixtral and Granite."""
    fields = llama_like(model, kind)
    return fields | {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.expert_ffn_size,
    }


def granite_moe_shared(model: ModelConfig, kind: str) -> Fields:
    """Of Granite's mixtures with an expert of all tokens."""
    return mixtral(model, kind) | {"shared_intermediate_size": model.shared_ffn_size}


def hunyuan_moe(model: ModelConfig, kind: str) -> Fields:
    """Of Hunyuan's mixtures."""
    return llama_like(model, kind) | {
        "num_experts": model.num_experts,
        "moe_topk": model.moe_router_topk,
        "intermediate_size": model.expert_ffn_size,
    }


def ernie4_5_moe(model: ModelConfig, kind: str) -> Fields:
    """Of ERNIE 4.5's mixtures."""
    sparse = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return ernie4_5(model, kind) | {
        "moe_num_experts": model.num_experts,
        "moe_k": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "moe_num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "moe_layer_start_index": sparse[0] if sparse else model.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else -1,
        "moe_layer_interval": interval,
    }


def minimax_m2(model: ModelConfig, kind: str) -> Fields:
    """Of MiniMax-M2."""
    return mixtral(model, kind) | {
        "rotary_dim": model.rotary_dim,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


def olmoe(model: ModelConfig, kind: str) -> Fields:
    """Of OLMoE."""
    return mixtral(model, kind) | {"norm_topk_prob": not model.moe_router_pre_softmax}


def qwen_moe(model: ModelConfig, kind: str) -> Fields:
    """Of Qwen2-MoE and Qwen3-MoE."""
    fields = llama_like(model, kind)
    dense = [layer for layer in range(model.num_layers) if not model.is_moe(layer)]
    fields |= {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
    }
    if kind == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = model.shared_ffn_size
        fields["qkv_bias"] = model.add_qkv_bias
    return fields


def qwen_linear(model: ModelConfig, kind: str) -> Fields:
    """Of Qwen3-Next and Qwen3.5."""
    dense = kind == "qwen3_5_text"
    fields = llama_like(model, kind) if dense else qwen_moe(model, kind)
    fields["partial_rotary_factor"] = model.rotary_percent
    if not dense:
        fields["shared_expert_intermediate_size"] = model.shared_ffn_size
    if kind == "qwen3_5_moe_text":
        del fields["intermediate_size"]  # of dense layers
    linear = [model.is_linear(layer) for layer in range(model.num_layers)]
    return fields | {
        "layer_types": [f"{'linear' if has else 'full'}_attention" for has in linear],
        **{name: getattr(model, name) for name in OF_LINEAR_ATTENTION[1:]},
    }


def nemotron_h(model: ModelConfig, kind: str) -> Fields:
    """Of Nemotron-H and Nemotron 3 Nano."""
    sizes = size_fields(model)
    del sizes["num_hidden_layers"]
    names = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    states, experts = model.states, {}
    if model.num_experts is not None:
        experts = {
            "n_routed_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_ffn_size,
            "moe_shared_expert_intermediate_size": model.shared_ffn_size,
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_group": model.moe_router_num_groups or 1,
            "topk_group": model.moe_router_group_topk or 1,
        }
        if model.moe_latent_size is not None:
            experts["moe_latent_size"] = model.moe_latent_size
    return {
        **sizes,
        "layers_block_type": [names[letter] for letter in model.hybrid_override_pattern or ""],
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "mlp_hidden_act": ACTIVATIONS.get(model.activation_func, model.activation_func),
        "layer_norm_epsilon": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "ssm_state_size": states.key,
        "mamba_head_dim": states.value,
        "n_groups": states.groups,
        "mamba_num_heads": states.heads,
        "rescale_prenorm_residual": False,
        **experts,
    }


def gpt_oss(model: ModelConfig, kind: str) -> Fields:
    """Of gpt-oss."""
    return llama_like(model, kind) | {
        "attention_bias": True,
        "intermediate_size": model.expert_ffn_size,
        # transformers asks for a width even where no layer has a window.
        "sliding_window": 128 if model.window_size is None else model.window_size + 1,
        "layer_types": layer_types(model),
        "swiglu_limit": model.activation_func_clamp_value,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def llama4(model: ModelConfig, kind: str) -> Fields:
    """Of Llama 4."""
    rotates = [model.rotates(layer) for layer in range(model.num_layers)]
    chunks, types = model.attention_chunk_size, ("full_attention", "chunked_attention")
    return llama_like(model, kind) | {
        "intermediate_size": model.expert_ffn_size,
        "intermediate_size_mlp": model.ffn_size,
        "num_local_experts": model.num_experts or 1,  # of no layer, but transformers wants a number
        "num_experts_per_tok": 1,
        "moe_layers": [layer for layer in range(model.num_layers) if model.is_moe(layer)],
        "use_qk_norm": model.qk_l2_norm,
        "no_rope_layers": [int(turns) for turns in rotates],
        "attention_chunk_size": chunks,
        "layer_types": [types[chunks is not None and turns] for turns in rotates],
        "attn_temperature_tuning": model.attn_temperature_tuning,
        "floor_scale": model.floor_scale,
        "attn_scale": model.attn_scale,
    }


def deepseek(model: ModelConfig, kind: str) -> Fields:
    """Of DeepSeek-V2, V3, Kimi-K2 and GLM-4.7-Flash."""
    second = kind == "deepseek_v2"
    fields = {
        **size_fields(model),
        **rope_fields(model),
        **grouped_experts(model, second),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_attention_heads,
        "hidden_act": ACTIVATIONS.get(model.activation_func, model.activation_func),
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
    }
    if second:
        grouped = model.moe_router_num_groups is not None
        fields["topk_method"] = "group_limited_greedy" if grouped else "greedy"
        return fields
    if kind == "glm4_moe_lite":
        fields["mlp_layer_types"] = _layer_types(model)
    return fields | {
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.mtp_num_layers,
        "rope_interleave": True,
    }


def _layer_types(model: ModelConfig) -> list[str]:
    """Whether each layer has experts."""
    return ["sparse" if model.is_moe(layer) else "dense" for layer in range(model.num_layers)]


def grouped_experts(model: ModelConfig, second: bool = False) -> Fields:
    """Fields of experts as DeepSeek-V3 has them, or V2."""
    dense = [layer for layer in range(model.num_layers) if not model.is_moe(layer)]
    return {
        "n_routed_experts": model.num_experts or 1,  # of no layer, but transformers wants a number
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "n_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "first_k_dense_replace": len(dense),
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "scoring_func": "softmax" if second else "sigmoid",
        "norm_topk_prob": not second,
        "moe_layer_freq": 1,
    }


def glm4_moe(model: ModelConfig, kind: str) -> Fields:
    """Of GLM-4.5."""
    return (
        llama_like(model, kind)
        | grouped_experts(model)
        | {
            "use_qk_norm": model.qk_layernorm,
            "num_nextn_predict_layers": model.mtp_num_layers,
        }
    )


def solar_open(model: ModelConfig, kind: str) -> Fields:
    """Of Solar Open."""
    fields = llama_like(model, kind) | grouped_experts(model)
    del fields["intermediate_size"]  # of dense layers
    return fields


def exaone_moe(model: ModelConfig, kind: str) -> Fields:
    """Of K-EXAONE."""
    fields = llama_like(model, kind) | grouped_experts(model)
    return fields | {
        "num_experts": fields.pop("n_routed_experts"),
        "num_shared_experts": fields.pop("n_shared_experts"),
        "mlp_layer_types": _layer_types(model),
    }


def dots1(model: ModelConfig, kind: str) -> Fields:
    """Of dots.llm1."""
    return llama_like(model, kind) | grouped_experts(model) | listed_windows(model)
