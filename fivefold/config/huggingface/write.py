"""Writes the config.json of a model: of the family that, read again, is the same model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.comparing import differences, softmax_scale
from fivefold.config.huggingface.multimodal import text_reader
from fivefold.config.huggingface.read import from_hf_config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError, Mistake

Fields = dict[str, Any]


def to_hf_config(model: ModelConfig) -> Fields:
    """The content of a config.json that describes this model.

    Raises:
        ConfigError: no supported family has such models; names the fields in which the nearest
            differs.
    """
    nearest: tuple[str, list[str]] | None = None
    for kind, (name, write) in _FAMILIES.items():
        fields = {"architectures": [name], "model_type": kind, **write(model, kind)}
        try:
            again = from_hf_config(fields)
        except ConfigError:
            continue
        wrong = differences(model, again)
        if not wrong:
            return fields
        if nearest is None or len(wrong) < len(nearest[1]):
            nearest = kind, wrong
    why = [] if nearest is None else [f"nearest: {nearest[0]}, but for", *nearest[1]]
    what = "no model family of Hugging Face's that is supported has this architecture"
    raise ConfigError(Mistake(what, tuple(why)))


def text_model_fields(fields: Mapping[str, Any]) -> Fields:
    """The config.json of the text model alone, from that of a multimodal one.

    Raises:
        ConfigError: it is not supported.
    """
    reader, kind = text_reader(fields)
    reader.mistakes.raise_if_any()
    whole = {name: fields[name] for name in _TOKENS if name in fields}
    named = {"architectures": [_FAMILIES[kind][0]], "model_type": kind}
    return {**reader.fields, **whole, **named}


_TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Fields of a whole model that go before those of its text model."""


def _sizes(model: ModelConfig) -> Fields:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _rope(model: ModelConfig) -> Fields:
    """rope_theta and rope_scaling, under the names that transformers 4 and 5 both read."""
    fields: Fields = {"rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_low_freq_factor,
            "high_freq_factor": model.rope_high_freq_factor,
            "original_max_position_embeddings": model.rope_original_max_position_embeddings,
        }
    if model.rotary_seq_len_interpolation_factor is not None:
        factor = model.rotary_seq_len_interpolation_factor
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if model.rope_type == "yarn":
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            "original_max_position_embeddings": model.original_max_position_embeddings,
            "beta_fast": model.beta_fast,
            "beta_slow": model.beta_slow,
            "truncate": model.yarn_correction_range_round_to_int,
        }
        if model.mscale_all_dim:
            scales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            fields["rope_scaling"] |= scales
    return fields


def _gpt2(model: ModelConfig, kind: str) -> Fields:
    names = {"gelu_tanh": "gelu_new"}
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "n_inner": model.ffn_size,
        "activation_function": names.get(model.activation_func, model.activation_func),
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _starcoder2(model: ModelConfig, kind: str) -> Fields:
    return {
        **_sizes(model),
        **_rope(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": _ACTIVATIONS.get(model.activation_func, model.activation_func),
        "use_bias": model.add_bias_linear,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "sliding_window": _width(model.widest_window),
    }


def _gpt_neox(model: ModelConfig, kind: str) -> Fields:
    names = {"gelu_tanh": "gelu_new"}
    rope = _rope(model)
    return {
        **_sizes(model),
        "intermediate_size": model.ffn_size,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": names.get(model.activation_func, model.activation_func),
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": rope.pop("rope_theta"),
        **rope,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


_ACTIVATIONS = {"gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "silu"}


def _llama_like(model: ModelConfig, kind: str) -> Fields:
    fields = {
        **_sizes(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": _ACTIVATIONS.get(model.activation_func, model.activation_func),
        "attention_dropout": model.attention_dropout,
        **_rope(model),
    }
    if kind.startswith(("phi3", "smollm3", "glm", "olmo", "gemma", "ernie")):
        fields["pad_token_id"] = None  # the family's default may be outside of this vocabulary
    if kind == "phi3":
        fields |= {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}
    if kind.startswith(("phi3", "glm")):
        fields["partial_rotary_factor"] = model.rotary_percent
    if kind == "smollm3":
        rotates = [int(model.rotates(layer)) for layer in range(model.num_layers)]
        fields |= {"no_rope_layers": rotates} | _qwen_windows(model)
    if kind.startswith("granite"):
        names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
        fields |= {name: getattr(model, name) for name in names}
        fields["attention_multiplier"] = softmax_scale(model)
    if kind in ("llama", "smollm3", "granite"):
        fields |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    if kind in ("mistral", "mixtral", "phi3"):
        fields["sliding_window"] = _width(model.widest_window)
    if kind.startswith("qwen"):
        fields |= _qwen_windows(model)
    if kind.startswith("glm"):
        fields["attention_bias"] = model.add_qkv_bias
    if kind in ("exaone4", "olmo3", "gemma2", "gemma3_text"):
        fields |= _listed_windows(model)
    if kind in ("gemma2", "gemma3_text"):
        fields["hidden_activation"] = fields.pop("hidden_act")
        fields["query_pre_attn_scalar"] = round(softmax_scale(model) ** -2)
        fields["final_logit_softcapping"] = model.final_logit_softcapping
    if kind == "gemma2":
        fields["attn_logit_softcapping"] = model.attn_logit_softcapping
    if kind == "gemma3_text":
        fields["rope_local_base_freq"] = model.rotary_base_local or model.rotary_base
    return fields


def _qwen_windows(model: ModelConfig) -> Fields:
    if model.window_size is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window_size + 1,
        "layer_types": _layer_types(model),
        "max_window_layers": 0,
    }


def _listed_windows(model: ModelConfig) -> Fields:
    return {"sliding_window": _width(model.window_size), "layer_types": _layer_types(model)}


def _width(window: int | None) -> int | None:
    """A window's width there, which includes the token itself."""
    return None if window is None else window + 1


def _layer_types(model: ModelConfig) -> list[str]:
    limited = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return [f"{'sliding' if has else 'full'}_attention" for has in limited]


def _mixtral(model: ModelConfig, kind: str) -> Fields:
    fields = _llama_like(model, kind)
    return fields | {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.expert_ffn_size,
    }


def _granite_moe_shared(model: ModelConfig, kind: str) -> Fields:
    return _mixtral(model, kind) | {"shared_intermediate_size": model.shared_ffn_size}


def _ernie4_5(model: ModelConfig, kind: str) -> Fields:
    fields = _llama_like(model, kind) | {"use_bias": model.add_bias_linear}
    del fields["attention_dropout"]  # there is none in this family
    return fields


def _ernie4_5_moe(model: ModelConfig, kind: str) -> Fields:
    sparse = [layer for layer in range(model.num_layers) if model.is_moe(layer)]
    interval = sparse[1] - sparse[0] if len(sparse) > 1 else 1
    return _ernie4_5(model, kind) | {
        "moe_num_experts": model.num_experts,
        "moe_k": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "moe_num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "moe_layer_start_index": sparse[0] if sparse else model.num_layers,
        "moe_layer_end_index": sparse[-1] if sparse else -1,
        "moe_layer_interval": interval,
    }


def _minimax_m2(model: ModelConfig, kind: str) -> Fields:
    return _mixtral(model, kind) | {
        "rotary_dim": model.rotary_dim,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


def _olmoe(model: ModelConfig, kind: str) -> Fields:
    return _mixtral(model, kind) | {"norm_topk_prob": not model.moe_router_pre_softmax}


def _qwen_moe(model: ModelConfig, kind: str) -> Fields:
    fields = _llama_like(model, kind)
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


def _gpt_oss(model: ModelConfig, kind: str) -> Fields:
    return _llama_like(model, kind) | {
        "attention_bias": True,
        "intermediate_size": model.expert_ffn_size,
        # transformers asks for a width even where no layer has a window.
        "sliding_window": 128 if model.window_size is None else model.window_size + 1,
        "layer_types": _layer_types(model),
        "swiglu_limit": model.activation_func_clamp_value,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
    }


def _deepseek(model: ModelConfig, kind: str) -> Fields:
    second = kind == "deepseek_v2"
    fields = {
        **_sizes(model),
        **_rope(model),
        **_grouped_experts(model, second),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_attention_heads,
        "hidden_act": _ACTIVATIONS.get(model.activation_func, model.activation_func),
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
    return fields | {
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.mtp_num_layers,
        "rope_interleave": True,
    }


def _grouped_experts(model: ModelConfig, second: bool = False) -> Fields:
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


def _glm4_moe(model: ModelConfig, kind: str) -> Fields:
    return (
        _llama_like(model, kind)
        | _grouped_experts(model)
        | {
            "use_qk_norm": model.qk_layernorm,
            "num_nextn_predict_layers": model.mtp_num_layers,
        }
    )


def _dots1(model: ModelConfig, kind: str) -> Fields:
    return _llama_like(model, kind) | _grouped_experts(model) | _listed_windows(model)


_FAMILIES: Mapping[str, tuple[str, Callable[[ModelConfig, str], Fields]]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", _llama_like),
        "mistral": ("MistralForCausalLM", _llama_like),
        "qwen2": ("Qwen2ForCausalLM", _llama_like),
        "qwen3": ("Qwen3ForCausalLM", _llama_like),
        "phi3": ("Phi3ForCausalLM", _llama_like),
        "smollm3": ("SmolLM3ForCausalLM", _llama_like),
        "granite": ("GraniteForCausalLM", _llama_like),
        "glm": ("GlmForCausalLM", _llama_like),
        "glm4": ("Glm4ForCausalLM", _llama_like),
        "exaone4": ("Exaone4ForCausalLM", _llama_like),
        "olmo2": ("Olmo2ForCausalLM", _llama_like),
        "olmo3": ("Olmo3ForCausalLM", _llama_like),
        "gemma": ("GemmaForCausalLM", _llama_like),
        "gemma2": ("Gemma2ForCausalLM", _llama_like),
        "gemma3_text": ("Gemma3ForCausalLM", _llama_like),
        "gpt2": ("GPT2LMHeadModel", _gpt2),
        "starcoder2": ("Starcoder2ForCausalLM", _starcoder2),
        "gpt_neox": ("GPTNeoXForCausalLM", _gpt_neox),
        "mixtral": ("MixtralForCausalLM", _mixtral),
        "granitemoe": ("GraniteMoeForCausalLM", _mixtral),
        "granitemoeshared": ("GraniteMoeSharedForCausalLM", _granite_moe_shared),
        "ernie4_5": ("Ernie4_5ForCausalLM", _ernie4_5),
        "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", _ernie4_5_moe),
        "olmoe": ("OlmoeForCausalLM", _olmoe),
        "minimax_m2": ("MiniMaxM2ForCausalLM", _minimax_m2),
        "qwen2_moe": ("Qwen2MoeForCausalLM", _qwen_moe),
        "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen_moe),
        "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
        "glm4_moe": ("Glm4MoeForCausalLM", _glm4_moe),
        "dots1": ("Dots1ForCausalLM", _dots1),
        "deepseek_v2": ("DeepseekV2ForCausalLM", _deepseek),
        "deepseek_v3": ("DeepseekV3ForCausalLM", _deepseek),
    }
)
"""Of each family: the name of transformers' class, and what writes its fields."""
