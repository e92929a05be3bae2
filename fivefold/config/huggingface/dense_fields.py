"""What goes into the config.json of a dense model, and of any: sizes, RoPE, windows."""

from typing import Any

from fivefold.config.huggingface.comparing import softmax_scale
from fivefold.config.huggingface.defaults import GLM, QWEN_LINEAR
from fivefold.config.model import ModelConfig

Fields = dict[str, Any]


def size_fields(model: ModelConfig) -> Fields:
    """Sizes that most families give by the same names."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def rope_fields(model: ModelConfig) -> Fields:
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
        if not model.mscale:
            fields["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if model.rope_type == "longrope":
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": [*model.longrope_short_factor],
            "long_factor": [*model.longrope_long_factor],
            "original_max_position_embeddings": model.original_max_position_embeddings,
        }
        if model.longrope_attention_factor is not None:
            fields["rope_scaling"]["attention_factor"] = model.longrope_attention_factor
    return fields


def gpt2(model: ModelConfig, kind: str) -> Fields:
    """Of GPT-2."""
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
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


def starcoder2(model: ModelConfig, kind: str) -> Fields:
    """Of StarCoder2."""
    return {
        **size_fields(model),
        **rope_fields(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": ACTIVATIONS.get(model.activation_func, model.activation_func),
        "use_bias": model.add_bias_linear,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "sliding_window": _width(model.widest_window),
    }


def gpt_neox(model: ModelConfig, kind: str) -> Fields:
    """Of GPT-NeoX."""
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    rope = rope_fields(model)
    return {
        **size_fields(model),
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


def falcon(model: ModelConfig, kind: str) -> Fields:
    """Of Falcon; only its newer layers have several key heads, or two norms side by side."""
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    one, side_by_side = model.parallel_residual_one_norm, model.parallel_residual
    few = model.num_kv_heads in (1, model.num_attention_heads)
    newer = side_by_side and not (one and few)
    return {
        **size_fields(model),
        **rope_fields(model),
        "num_kv_heads": model.num_kv_heads,
        "multi_query": model.num_kv_heads == 1,
        "new_decoder_architecture": newer,
        "num_ln_in_parallel_attn": (1 if one else 2) if newer else None,
        "parallel_attn": side_by_side,
        "ffn_hidden_size": model.ffn_size,
        "activation": names.get(model.activation_func, model.activation_func),
        "layer_norm_epsilon": model.norm_epsilon,
        "bias": model.add_bias_linear,
        "alibi": False,
        "attention_dropout": model.attention_dropout,
    }


ACTIVATIONS = {
    "gelu_tanh": "gelu_pytorch_tanh",
    "quick_gelu": "silu",
    "squared_relu": "relu2",
}


_PADDED = ("phi3", "smollm3", "glm", "olmo", "gemma", "ernie", "nemotron", "seed", "cohere")


def llama_like(model: ModelConfig, kind: str) -> Fields:
    """Of Llama and related families."""
    fields = {
        **size_fields(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": ACTIVATIONS.get(model.activation_func, model.activation_func),
        "attention_dropout": model.attention_dropout,
        **rope_fields(model),
    }
    if kind.startswith(_PADDED):
        fields["pad_token_id"] = None  # the family's default may be outside of this vocabulary
    if kind == "phi3":
        fields |= {"resid_pdrop": model.hidden_dropout, "embd_pdrop": model.hidden_dropout}
        if model.rope_type == "longrope":  # under the names of the published files
            rope = fields["rope_scaling"]
            original = rope.pop("original_max_position_embeddings")
            fields["original_max_position_embeddings"] = original
            rope["type"] = rope.pop("rope_type")
    if kind.startswith(("phi3", "glm", "nemotron", "stablelm")):
        fields["partial_rotary_factor"] = model.rotary_percent
    if kind == "smollm3":
        rotates = [int(model.rotates(layer)) for layer in range(model.num_layers)]
        fields |= {"no_rope_layers": rotates} | _qwen_windows(model)
    if kind.startswith("granite"):
        names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
        fields |= {name: getattr(model, name) for name in names}
        fields["attention_multiplier"] = softmax_scale(model)
    if kind in ("llama", "smollm3", "granite", "arcee", "nemotron"):
        fields |= {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}
    if kind == "ministral3" and "rope_scaling" in fields:
        beta = model.attn_scale if model.attn_temperature_tuning else 0.0
        fields["rope_scaling"]["llama_4_scaling_beta"] = beta
    if kind in ("mistral", "ministral3", "mixtral", "phi3"):
        fields["sliding_window"] = _width(model.widest_window)
    if kind == "nemotron":
        fields["norm_eps"] = fields.pop("rms_norm_eps")
    if kind == "stablelm":
        fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
        fields["use_qkv_bias"] = model.qkv_bias
        fields["use_parallel_residual"] = model.parallel_residual
        del fields["head_dim"]  # hidden_size / num_attention_heads
    if kind.startswith("cohere"):
        fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
        fields["logit_scale"] = 1.0 / model.logits_scaling
        del fields["head_dim"]  # hidden_size / num_attention_heads
    if kind.startswith("qwen") and kind not in QWEN_LINEAR:
        fields |= _qwen_windows(model)
    if kind in GLM:
        fields["attention_bias"] = model.add_qkv_bias
    if kind == "seed_oss":
        fields |= dict.fromkeys(("attention_out_bias", "mlp_bias"), model.add_bias_linear)
        fields |= {"attention_bias": model.qkv_bias, "residual_dropout": 0.0}
    if kind in ("cohere2", "exaone4", "exaone_moe", "olmo3", "gemma2", "gemma3_text"):
        fields |= listed_windows(model)
    if kind in ("gemma2", "gemma3_text"):
        fields["hidden_activation"] = fields.pop("hidden_act")
        fields["query_pre_attn_scalar"] = round(softmax_scale(model) ** -2)
        fields["final_logit_softcapping"] = model.final_logit_softcapping
    if kind == "gemma2":
        fields["attn_logit_softcapping"] = model.attn_logit_softcapping
    if kind == "gemma3_text":
        fields["rope_local_base_freq"] = model.rotary_base_local or model.rotary_base
    return fields


def ernie4_5(model: ModelConfig, kind: str) -> Fields:
    """Of ERNIE 4.5."""
    fields = llama_like(model, kind) | {"use_bias": model.add_bias_linear}
    del fields["attention_dropout"]  # there is none in this family
    return fields


def _qwen_windows(model: ModelConfig) -> Fields:
    if model.window_size is None:
        return {"use_sliding_window": False, "sliding_window": None}
    return {
        "use_sliding_window": True,
        "sliding_window": model.window_size + 1,
        "layer_types": layer_types(model),
        "max_window_layers": 0,
    }


def listed_windows(model: ModelConfig) -> Fields:
    """A window, and the layers that have it, one by one."""
    return {"sliding_window": _width(model.window_size), "layer_types": layer_types(model)}


def _width(window: int | None) -> int | None:
    """A window's width there, which includes the token itself."""
    return None if window is None else window + 1


def layer_types(model: ModelConfig) -> list[str]:
    """Whether each layer has a window."""
    limited = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return [f"{'sliding' if has else 'full'}_attention" for has in limited]
