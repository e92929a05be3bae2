"""Rotary positions that depend on the length of sequences: LongRoPE and dynamic NTK."""

from math import log, sqrt

from fivefold.config.model import ModelConfig


def is_long(model: ModelConfig, seq_length: int) -> bool:
    """Whether LongRoPE divides by its long factors, and dynamic NTK raises the base, in sequences
    of this many tokens."""
    return seq_length > model.original_max_position_embeddings


def base_at(model: ModelConfig, seq_length: int) -> float:
    """Base of RoPE in sequences of this many tokens.

    Dynamic NTK (emozilla 2023) raises it in those that are longer than the original length L, so
    that the longest wavelength grows by `rotary_scaling_factor` for each L tokens more.
    """
    if model.rope_type != "dynamic" or not is_long(model, seq_length):
        return model.rotary_base
    longer = seq_length / model.original_max_position_embeddings
    growth = 1.0 + model.rotary_scaling_factor * (longer - 1.0)
    return model.rotary_base * growth ** (model.rotary_dim / (model.rotary_dim - 2))


def longrope_scale(model: ModelConfig) -> float:
    """Factor on rotary features with LongRoPE (Ding et al. 2024), at any length."""
    if model.longrope_attention_factor is not None:
        return model.longrope_attention_factor
    original = model.original_max_position_embeddings
    return longrope_attention(model.max_position_embeddings / original, original)


def longrope_attention(growth: float, original: int) -> float:
    """Factor on rotary features for a context `growth` times as long as the original (LongRoPE)."""
    return sqrt(1.0 + log(growth) / log(original)) if growth > 1.0 else 1.0
