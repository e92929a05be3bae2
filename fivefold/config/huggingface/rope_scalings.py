"""Reads how a config.json stretches rotary positions: the numbers of each kind."""

from math import isclose, log
from typing import Any

from fivefold.config.huggingface.reader import Reader
from fivefold.config.stretched_rope import longrope_attention


def yarn_settings(
    factor: float,
    original: int,
    *,
    fast: float = 32.0,
    slow: float = 1.0,
    whole_pairs: bool,
    scales: tuple[float, float] = (1.0, 0.0),
) -> tuple[tuple[str, Any], ...]:
    """ModelConfig settings for YaRN.

    Args:
        factor: scaling factor.
        original: sequence length before scaling, in tokens.
        fast: `beta_fast`, the start of the ramp.
        slow: `beta_slow`, the end of the ramp.
        whole_pairs: whether the ends of the ramp are rounded to whole pairs.
        scales: (mscale, mscale_all_dim).
    """
    return (
        ("rope_type", "yarn"),
        ("rotary_scaling_factor", factor),
        ("original_max_position_embeddings", original),
        ("beta_fast", fast),
        ("beta_slow", slow),
        ("yarn_correction_range_round_to_int", whole_pairs),
        ("mscale", scales[0]),
        ("mscale_all_dim", scales[1]),
    )


def proportional(table: Reader) -> tuple[tuple[str, Any], ...]:
    """A part of a whole head's frequencies, which may all be divided."""
    factor, share = table.number("factor", 1.0), table.number("partial_rotary_factor", 1.0)
    divided = () if factor == 1.0 else (("rotary_seq_len_interpolation_factor", factor),)
    return (*divided, *proportional_settings(share)) if share != 1.0 else divided


def proportional_settings(share: float) -> tuple[tuple[str, Any], ...]:
    """ModelConfig settings for RoPE that turns this share of a whole head's frequencies."""
    return ("rope_type", "proportional"), ("rotary_percent", share)


def dynamic(table: Reader, whole: Reader) -> tuple[tuple[str, Any], ...]:
    """Dynamic NTK, of sequences that are longer than `max_position_embeddings`."""
    if "factor" not in table.fields:
        table.mistakes.add(
            'rope_type = "dynamic" needs factor, by which the longest wavelength grows'
        )
    return (
        ("rope_type", "dynamic"),
        ("rotary_scaling_factor", table.number("factor", 1.0)),
        ("original_max_position_embeddings", longest(whole)),
    )


def yarn(table: Reader, latents: bool, whole: Reader) -> tuple[tuple[str, Any], ...]:
    """YaRN; its two mscales count only together, and scale scores only with latent attention."""
    if "factor" not in table.fields:
        table.mistakes.add("yarn RoPE scaling needs factor")
    _read_attention_factor(table)
    rotary, every = table.optional_number("mscale"), table.optional_number("mscale_all_dim")
    scales = (rotary or 1.0, every) if every else (1.0, 0.0)
    if every and rotary == every and not latents:
        scales = 0.0, 0.0  # features are multiplied by as much as they are divided by
    elif every and not latents:
        table.unsupported("mscale_all_dim", every, [0.0])
    if every and not rotary:
        table.unsupported("mscale", rotary, [1.0], "mscale_all_dim is given without it")
    return yarn_settings(
        table.number("factor", 1.0),
        table.size("original_max_position_embeddings", default=longest(whole)),
        fast=table.optional_number("beta_fast") or 32.0,
        slow=table.optional_number("beta_slow") or 1.0,
        whole_pairs=table.flag("truncate", True),
        scales=scales,
    )


def temperature(table: Reader) -> tuple[tuple[str, Any], ...]:
    """ModelConfig settings for factors of queries; in files they apply to layers with RoPE."""
    table.without_effect("max_position_embeddings")
    beta, length = "llama_4_scaling_beta", table.size("original_max_position_embeddings")
    if beta not in table.fields:
        table.mistakes.add(f'rope_type = "yarn" of this family needs {beta}, a number')
    scale = table.number(beta, 0.0)
    return tempered(scale, length) if scale else ()


def tempered(scale: float, length: int) -> tuple[tuple[str, Any], ...]:
    """ModelConfig settings for queries that grow with the position, in layers with RoPE."""
    return (
        ("attn_temperature_tuning", True),
        ("attn_temperature_rotated", True),
        ("attn_scale", scale),
        ("floor_scale", length),
    )


def alpha(table: Reader) -> float:
    """Hunyuan's alpha; the other scaling fields of its files have no effect."""
    table.without_effect("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    alpha = table.number("alpha", 0.0)
    if alpha <= 0:
        why = "without alpha the base depends on the length"
        table.unsupported("alpha", table.fields.get("alpha"), [1000.0], why)
        return 1.0
    return alpha


def longest(whole: Reader) -> int:
    """The longest sequence of a model, from which transformers derives the scaling."""
    positions = whole.fields.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 0 else 1


def longrope(table: Reader, beside: int | None, longest: int) -> tuple[tuple[str, Any], ...]:
    """LongRoPE; its factor, if given, only decides how attention is scaled."""
    original = table.size("original_max_position_embeddings", default=beside or longest)
    if beside is not None:
        why = f"original_max_position_embeddings beside the table, {beside}, is what counts"
        table.fixed("original_max_position_embeddings", beside, why=why)
    attention, factor = table.optional_number("attention_factor"), table.optional_number("factor")
    if attention is None and factor is not None and original > 1:
        attention = longrope_attention(factor, original)
    return (
        ("rope_type", "longrope"),
        ("original_max_position_embeddings", original),
        ("longrope_short_factor", table.numbers("short_factor")),
        ("longrope_long_factor", table.numbers("long_factor")),
        ("longrope_attention_factor", attention),
    )


def _read_attention_factor(table: Reader) -> None:
    """Accept the value that YaRN derives from its factor anyway, which files of OLMo 3 spell
    out."""
    given, factor = table.fields.get("attention_factor"), table.fields.get("factor")
    usual = False
    if isinstance(given, float) and isinstance(factor, int | float) and factor > 1:
        usual = isclose(given, 0.1 * log(factor) + 1.0, rel_tol=1e-12)
    if usual and not table.fields.get("mscale_all_dim"):
        table.without_effect("attention_factor")
    else:
        table.fixed("attention_factor", None)
