"""Checks layers that keep a state, and layers with one mixer each."""

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.config.by_layer import LINEAR_VARIANTS
from fivefold.config.divisors import divisors, nearest
from fivefold.config.layer_pattern import layers_of, letters, mixers
from fivefold.config.model import ModelConfig
from fivefold.config.settings import flag_of
from fivefold.errors import Mistakes

_OFF = "--hybrid-override-pattern none"
_OF_VARIANT: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(LINEAR_VARIANTS, "linear attention"),
        "short_convolution": "short convolutions",
    }
)
"""What layers have that keep a state, by `experimental_attention_variant`."""


def check_states(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check which layers have linear attention, its heads, and layers of one mixer each."""
    if model.attention_output_gate and model.multi_latent_attention:
        mistakes.add(
            "attention_output_gate is computed by the query projection, and the projections of "
            "multi_latent_attention compute no gate",
            works=("--no-attention-output-gate", "--no-multi-latent-attention"),
        )
    if model.hybrid_override_pattern is not None:
        with mistakes.collecting():
            mixers(model.hybrid_override_pattern, model.num_layers)
            _check_further(model, mistakes)
            _check_hybrid(model, model.hybrid_override_pattern, mistakes)
    elif model.has_linear_layers:
        _check_linear(model, mistakes)
        _check_kimi(model, mistakes)


def _check_linear(model: ModelConfig, mistakes: Mistakes) -> None:
    off, freq = "--experimental-attention-variant none", model.linear_attention_freq
    variant = model.experimental_attention_variant
    assert variant is not None, "layers with states are of one"
    if freq is None:
        mistakes.add(
            f"experimental_attention_variant {variant} needs "
            "linear_attention_freq, which says in which layers",
            works=("--linear-attention-freq 2", off)[model.num_layers < 2 :],
        )
        return
    with mistakes.collecting():
        linear = layers_of("linear_attention_freq", freq, model.num_layers)
        if len({*linear}) < 2:
            kind = _OF_VARIANT[variant] if linear[0] else "a softmax"
            mistakes.add(
                f"linear_attention_freq {freq!r} gives all layers {kind}, and a model with "
                "experimental_attention_variant has layers of both kinds",
                works=("--linear-attention-freq 2", f"--linear-attention-freq none {off}")[
                    model.num_layers < 2 :
                ],
            )
    hidden, heads = model.hidden_size, model.num_attention_heads
    if variant == "short_convolution" and hidden % heads:
        mistakes.add(
            f"hidden_size {hidden} cannot be split into num_attention_heads {heads} groups of a "
            "short convolution's features",
            f"{hidden} / {heads} = {hidden / heads:.2f} (must be whole)",
            works=[f"--num-attention-heads {n}" for n in nearest(heads, divisors(hidden))],
        )
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if variant == "gated_delta_net" and values % keys:
        mistakes.add(
            f"{values} value heads of linear attention cannot share {keys} key heads",
            f"linear_num_value_heads / linear_num_key_heads = {values} / {keys} = "
            f"{values / keys:.2f} (must be whole)",
            works=[f"--linear-num-key-heads {n}" for n in nearest(keys, divisors(values))],
        )


def _check_kimi(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check for features that Kimi Delta Attention lacks."""
    if not model.fades_features:
        return
    name = "experimental_attention_variant kimi_delta_attention"
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads
    if keys != values:
        mistakes.add(
            f"{name} has a value head for each key head, and there are {values} for {keys}",
            works=(f"--linear-num-key-heads {values}", f"--linear-num-value-heads {keys}"),
        )
    if model.lora_rank is not None:
        mistakes.add(f"lora_rank: layers with {name} have no adapters", works=("--lora-rank none",))


def _check_further(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check the layers of which a multi-token prediction consists.

    Raises:
        ConfigError: its pattern has letters that are no layers.
    """
    name, pattern = "mtp_hybrid_override_pattern", model.mtp_hybrid_override_pattern
    if pattern:
        letters(name, pattern)
    elif model.mtp_num_layers or pattern is not None:
        needs = f"mtp_num_layers {model.mtp_num_layers} of a hybrid model needs {name}"
        mistakes.add(
            f"{needs}, which says of which layers an MTP module consists",
            works=(f"{flag_of(name)} '*-'", "--mtp-num-layers 0"),
        )


def _check_hybrid(model: ModelConfig, pattern: str, mistakes: Mistakes) -> None:
    """Check a model whose layers have one mixer each."""
    name = "hybrid_override_pattern"
    if "M" not in pattern:
        example = "M" + pattern[1:]
        mistakes.add(
            f"{name} {pattern!r} has no layer with Mamba-2",
            works=(f"{flag_of(name)} {example!r}", _OFF),
        )
    if ("E" in model.mixers_used) != (model.num_experts is not None):
        has = "layers" if "E" in model.mixers_used else "no layer"
        number = "no num_experts" if model.num_experts is None else f"{model.num_experts} of them"
        off = "--num-experts 8" if model.num_experts is None else "--num-experts none"
        mistakes.add(
            f"{name} {model.mixers_used!r} has {has} with experts, and the model {number}",
            works=(off,),
        )
    if model.parallel_residual:
        mistakes.add(
            f"parallel_residual needs attention and an MLP in each layer, and {name} gives a layer "
            "only one of them",
            works=("--no-parallel-residual", _OFF),
        )
    if model.moe_layer_freq != "1":
        mistakes.add(
            f"moe_layer_freq {model.moe_layer_freq!r} and {name} both say which layers have "
            "experts",
            works=("--moe-layer-freq 1", _OFF),
        )
    if model.experimental_attention_variant in _OF_VARIANT:
        mistakes.add(
            f"experimental_attention_variant {model.experimental_attention_variant} and {name} "
            "both say which layers keep states",
            works=("--experimental-attention-variant none --linear-attention-freq none", _OFF),
        )
    if model.multi_latent_attention:
        mistakes.add(
            f"{name} has no multi_latent_attention",
            works=("--no-multi-latent-attention", _OFF),
        )
    if model.lora_rank is not None:
        mistakes.add(f"{name}: layers with Mamba-2 have no adapters", works=("--lora-rank none",))
    _check_mamba_heads(model, mistakes)


def _check_mamba_heads(model: ModelConfig, mistakes: Mistakes) -> None:
    """Check that Mamba-2's heads are whole, and that each group has equally many."""
    inner, size = 2 * model.hidden_size, model.mamba_head_dim
    if model.mamba_num_heads is None and inner % size:
        mistakes.add(
            f"hybrid_override_pattern: 2 x hidden_size {model.hidden_size} cannot be split into "
            f"heads of {size}",
            f"{inner} / {size} = {inner / size:.2f} (must be whole, or set mamba_num_heads)",
            works=[f"--mamba-head-dim {n}" for n in nearest(size, divisors(inner))],
        )
        return
    groups, heads = model.mamba_num_groups, model.states.heads
    if heads % groups:
        mistakes.add(
            f"hybrid_override_pattern: {heads} heads of Mamba-2 cannot be in {groups} groups",
            f"mamba_num_heads / mamba_num_groups = {heads} / {groups} = {heads / groups:.2f} "
            "(must be whole)",
            works=[f"--mamba-num-groups {n}" for n in nearest(groups, divisors(heads))],
        )
