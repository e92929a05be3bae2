"""Compares two models in everything that their weights depend on."""

from dataclasses import asdict
from typing import Any

from fivefold.config.by_layer import (
    IN_BF16,
    OF_CONVOLUTIONS,
    OF_DELTA_NET,
    OF_INDEXER,
    OF_ITS_LOSS,
    OF_LATENTS,
    OF_MAMBA,
    OF_WINDOWS,
)
from fivefold.config.config import SETTINGS
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.config.stretched_rope import longrope_scale

_DROPOUT = "hidden_dropout", "embedding_dropout", "attention_dropout"
_TRAINING = (*_DROPOUT, *INITIAL, *IN_BF16, *OF_ITS_LOSS)
_OURS = (*_TRAINING, "make_vocab_size_divisible_by", "rotary_interleaved", "unmodelled")
"""Fields of a ModelConfig that weights do not depend on, but for the order of rotary features, in
which they are read and written."""


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Differences between two models that affect their weights, one line for each field.

    Multi-token prediction counts only if the first model has it: otherwise the other's weights have
    all it needs and more.
    """
    if not model.mtp_num_layers:
        other = other.without_predictions
    one, two = _told(model), _told(other)
    changed = {n: SETTINGS[n].words for n in {**one, **two} if one.get(n) != two.get(n)}
    return [f"{n}: {words(one.get(n))}, there {words(two.get(n))}" for n, words in changed.items()]


def _told(model: ModelConfig) -> dict[str, Any]:
    """The fields that weights depend on, as they take effect."""
    layers = range(model.num_layers)
    moe = model.num_experts is not None
    latent = model.multi_latent_attention
    told = asdict(model.spelt_out())
    told["softmax_scale"] = softmax_scale(model)
    told["latent_norm_epsilon"] = model.latent_epsilon
    told["rotary_base_local"] = _local_base(model)
    told |= _local_sizes(model)
    told["longrope_attention_factor"] = longrope_scale(model)
    told["window_size"] = tuple(map(model.window_of, layers))
    told["no_rope_freq"] = tuple(not model.rotates(layer) for layer in layers)
    told["linear_attention_freq"] = tuple(map(model.is_linear, layers))
    told["hybrid_override_pattern"] = model.hybrid_override_pattern
    told["mtp_num_layers"] = model.prediction_sets
    told["moe_layer_freq"] = tuple(map(model.is_moe, layers))
    unused = [*_OURS, "window_attn_skip_freq", "mtp_use_repeated_layer"]
    if not model.attn_temperature_tuning:
        unused += ["attn_scale", "floor_scale", "attn_temperature_rotated"]
    if not model.has_dense_layers:
        unused.append("ffn_hidden_size")
    if not moe:
        unused += [name for name in told if name.startswith("moe_")]
    if not latent:
        unused += [*OF_LATENTS, "latent_norm_epsilon"]
    if model.position_embedding_type != "learned_absolute":  # positions are computed, however many
        unused.append("max_position_embeddings")
    if model.position_embedding_type != "rope":
        unused += [name for name in told if name.startswith("rot")]
    if not model.use_rope_scaling:
        unused += [name for name in told if name.startswith("rope_") and name != "rope_type"]
    if model.rope_type not in ("yarn", "dynamic"):
        unused.append("rotary_scaling_factor")
    if model.rope_type != "yarn":
        unused += ["beta_fast", "beta_slow", "mscale", "mscale_all_dim"]
        unused.append("yarn_correction_range_round_to_int")
    if model.rope_type != "longrope":
        unused += [name for name in told if name.startswith("longrope_")]
    if model.rope_type == "rope":
        unused.append("original_max_position_embeddings")
    if not model.has_linear_attention:
        unused += OF_DELTA_NET
    if not model.has_linear_layers or model.hybrid_override_pattern is not None:
        unused += OF_CONVOLUTIONS
    if not model.is_sparse:
        unused += OF_INDEXER
    if model.hybrid_override_pattern is None:
        unused += OF_MAMBA
    if not model.qk_layernorm:
        unused += ["qk_layernorm_type", "qk_layernorm_after_rope"]
    if model.moe_router_num_groups is None:
        unused += ["moe_router_group_topk", "moe_router_group_scores"]
    return {name: value for name, value in told.items() if name not in unused}


def _local_sizes(model: ModelConfig) -> dict[str, Any]:
    """Sizes of attention in layers with a window, if there are any."""
    local = model.attention_of(True).spelt_out()
    names = {name: name.removesuffix("_local") for name in OF_WINDOWS}
    has = model.window_size is not None
    return {name: getattr(local, own) if has else None for name, own in names.items()}


def softmax_scale(model: ModelConfig) -> float:
    """The factor of products of queries and keys."""
    return model.query_dim**-0.5 if model.softmax_scale is None else model.softmax_scale


def _local_base(model: ModelConfig) -> float | None:
    """The RoPE base of layers with a window, if it differs."""
    base = model.rotary_base_local
    scaled = model.use_rope_scaling or model.rope_type != "rope"
    scaled = scaled or model.rotary_seq_len_interpolation_factor not in (None, 1.0)
    return base if model.window_size is not None and (scaled or base != model.rotary_base) else None
