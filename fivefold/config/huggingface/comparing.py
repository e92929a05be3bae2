"""Compares two models in everything that their weights depend on."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fivefold.config.by_layer import IN_BF16, OF_ITS_LOSS, OF_WINDOWS
from fivefold.config.config import SETTINGS, Config
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.config.rules.dependents import DEPENDENTS
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
    one, two = _comparable(model), _comparable(other)
    changed = {
        name: SETTINGS[name].words
        for name in {**one, **two}
        for usual in [SETTINGS[name].default]  # what has no effect in one of them may be so
        if one.get(name, usual) != two.get(name, usual)
    }
    return [f"{n}: {words(one.get(n))}, there {words(two.get(n))}" for n, words in changed.items()]


@lru_cache(maxsize=256)
def _comparable(model: ModelConfig) -> Mapping[str, Any]:
    """The fields that weights depend on, as far as they have an effect; a model is compared with
    those of all families."""
    layers = range(model.num_layers)
    values = dict(vars(model.spelt_out()))
    values["softmax_scale"] = softmax_scale(model)
    values["latent_norm_epsilon"] = model.latent_epsilon
    values["rotary_base_local"] = _local_base(model)
    values |= _local_sizes(model)
    values["longrope_attention_factor"] = longrope_scale(model)
    values["window_size"] = tuple(map(model.window_of, layers))
    values["no_rope_freq"] = tuple(not model.rotates(layer) for layer in layers)
    values["linear_attention_freq"] = tuple(map(model.is_linear, layers))
    values["hybrid_override_pattern"] = model.hybrid_override_pattern
    values["mtp_num_layers"] = model.prediction_sets
    values["moe_layer_freq"] = tuple(map(model.is_moe, layers))
    unused = {*_OURS, "window_attn_skip_freq", "mtp_use_repeated_layer"}
    config = Config(model)
    unused.update(name for of in DEPENDENTS if not of.alive(config) for name in of.names)
    if not model.has_dense_layers:
        unused.add("ffn_hidden_size")
    if model.position_embedding_type != "learned_absolute":  # positions are computed, however many
        unused.add("max_position_embeddings")
    return {name: value for name, value in values.items() if name not in unused}


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
    turns = model.window_size is not None and model.position_embedding_type == "rope"
    return base if turns and (scaled or base != model.rotary_base) else None
