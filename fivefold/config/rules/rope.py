"""Checks settings of rotary positions: those that stretch them, and layers without any."""

from fivefold.config.layer_pattern import layers_of
from fivefold.config.model import ModelConfig
from fivefold.errors import Mistakes
from fivefold.units import several


def check_rope(model: ModelConfig, mistakes: Mistakes) -> None:
    """Report what is wrong with the settings of rotary positions."""
    rope, stretched = model.position_embedding_type == "rope", model.rope_type != "rope"
    if model.rope_type == "proportional":
        _check_proportional(model, mistakes)
    if model.rotary_percent > 1.0:
        mistakes.add(
            f"rotary_percent {model.rotary_percent} is more than all of a head's features",
            works=["--rotary-percent 1.0"],
        )
    if model.rotary_percent != 1.0 and model.multi_latent_attention:
        mistakes.add(
            f"rotary_percent {model.rotary_percent} has no effect on multi_latent_attention, whose "
            f"heads have qk_pos_emb_head_dim {model.qk_pos_emb_head_dim} rotary features",
            works=["--rotary-percent 1.0"],
        )
    if model.rotary_interleaved and model.multi_latent_attention:
        mistakes.add(
            "rotary_interleaved pairs neighbours, and multi_latent_attention has its rotary "
            "features in two halves: weights that hold them as neighbours are reordered when read",
            works=["--no-rotary-interleaved"],
        )
    if stretched and not rope:
        mistakes.add(f"rope_type {model.rope_type} needs position_embedding_type rope")
    if stretched and model.use_rope_scaling:
        mistakes.add(
            f"rope_type {model.rope_type} and use_rope_scaling both stretch RoPE",
            works=["--rope-type rope", "--no-use-rope-scaling"],
        )
    if model.rope_type == "yarn" and model.beta_fast < model.beta_slow:
        mistakes.add(
            "beta_fast must not be less than beta_slow", f"{model.beta_fast} < {model.beta_slow}"
        )
    if model.mscale_all_dim and not model.multi_latent_attention:
        mistakes.add(
            f"mscale_all_dim = {model.mscale_all_dim} has an effect on multi_latent_attention only",
            works=["--mscale-all-dim 0.0", "--multi-latent-attention"],
        )
    if model.use_rope_scaling and model.rope_high_freq_factor < model.rope_low_freq_factor:
        mistakes.add(
            "rope_high_freq_factor must not be less than rope_low_freq_factor",
            f"{model.rope_high_freq_factor} < {model.rope_low_freq_factor}",
        )
    if model.rotary_base_local is not None and (not rope or model.multi_latent_attention):
        mistakes.add(
            f"rotary_base_local {model.rotary_base_local:g} needs position_embedding_type rope, "
            "without multi_latent_attention",
            works=["--rotary-base-local none"],
        )
    if model.rotary_seq_len_interpolation_factor is not None:
        _check_interpolation(model, mistakes)
    if model.use_rope_scaling and model.position_embedding_type != "rope":
        mistakes.add("use_rope_scaling needs position_embedding_type rope")
    if model.rope_type == "longrope":
        _check_longrope(model, mistakes)
        if model.kv_channels_local is not None and model.rotary_base_local is None:
            mistakes.add(
                "rope_type longrope has a number for each feature pair of a head, of which "
                f"kv_channels_local {model.kv_channels_local} has another number",
                works=["--rotary-base-local 10000", "--kv-channels-local none"],
            )
    if model.rope_type == "dynamic" and model.rotary_dim == 2:
        mistakes.add(
            "rope_type dynamic needs more than one rotary feature pair",
            "the base grows to the power of R / (R - 2), with R = 2 rotary features",
            works=["--rope-type rope"],
        )
    _check_unrotated(model, mistakes)


def _check_proportional(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that some frequencies of whole heads turn and others do not."""
    if model.multi_latent_attention or model.rotary_percent == 1.0:
        what = "multi_latent_attention" if model.multi_latent_attention else "rotary_percent 1.0"
        mistakes.add(
            f"rope_type proportional has no effect on {what}: it turns a part of a head's "
            "frequencies",
            works=["--rope-type rope", "--rotary-percent 0.25"],
        )
    elif not int(model.rotary_percent * model.head_dim // 2):
        few = 2.5 / model.head_dim
        mistakes.add(
            f"rope_type proportional turns none of {model.head_dim // 2} feature pairs",
            f"{model.rotary_percent} x {model.head_dim} / 2 is less than 1",
            works=[f"--rotary-percent {few:.3g}"] if few < 1.0 else [],
        )


def _check_longrope(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that each pair of features has its factors, and attention has one."""
    pairs = model.rotary_dim // 2
    for name in ("longrope_short_factor", "longrope_long_factor"):
        if (given := len(getattr(model, name))) != pairs:
            what = f"{name} needs a number for each of {several(pairs, 'rotary feature pair')}"
            mistakes.add(what, f"{several(given, 'number')}, for {model.rotary_dim} features")
    original, longest = model.original_max_position_embeddings, model.max_position_embeddings
    if model.longrope_attention_factor is None and original == 1 < longest:
        mistakes.add(
            "original_max_position_embeddings 1 leaves longrope_attention_factor without a value",
            f"sqrt(1 + ln({longest} / 1) / ln(1)) divides by 0",
            works=["--longrope-attention-factor 1.0"],
        )


def _check_interpolation(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that there are positions to divide, and that no other setting stretches them."""
    off = "--rotary-seq-len-interpolation-factor none"
    if model.position_embedding_type != "rope":
        what = "rotary_seq_len_interpolation_factor needs position_embedding_type rope"
        mistakes.add(what, works=[off])
    for name, stretched in (
        (f"rope_type {model.rope_type}", model.rope_type not in ("rope", "proportional")),
        ("use_rope_scaling", model.use_rope_scaling),
    ):
        if stretched:
            what = f"{name} and rotary_seq_len_interpolation_factor both stretch RoPE"
            mistakes.add(what, works=[off])


def _check_unrotated(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that some layers have RoPE, if some have none."""
    if model.no_rope_freq is None:
        return
    if model.multi_latent_attention:
        mistakes.add(
            f"no_rope_freq {model.no_rope_freq!r} has no effect on multi_latent_attention, whose "
            "heads have rotary features in all layers",
            works=("--no-rope-freq none",),
        )
    with mistakes.collecting():
        without = layers_of("no_rope_freq", model.no_rope_freq, model.num_layers)
        layers = model.softmax_layers
        if layers and all(without[layer] for layer in layers):
            few = len(layers) < model.num_layers
            mistakes.add(
                f"no_rope_freq {model.no_rope_freq!r} leaves all layers{' with attention' * few} "
                "without positions",
                works=(
                    "--no-rope-freq none",
                    *(() if few or model.num_layers < 2 else ("--no-rope-freq 2",)),
                ),
            )
