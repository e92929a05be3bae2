"""Settings of one kind of layer, which have no effect where a model has no such layer."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from fivefold.config.by_layer import OF_WINDOWS
from fivefold.config.config import SETTINGS, Config
from fivefold.config.model import ModelConfig
from fivefold.config.rules.orphan import Dependents
from fivefold.errors import ConfigError

_MIXERS, _STATES, _UNROTATED = "hybrid_override_pattern", "linear_attention_freq", "no_rope_freq"
_OF_ROPE = (
    *("rotary_base", "rotary_percent", "rotary_interleaved"),
    *("rotary_seq_len_interpolation_factor", "qk_l2_norm", "attention_chunk_size"),
    *("use_rope_scaling", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor"),
    *("rope_original_max_position_embeddings", "rope_type", "rotary_scaling_factor"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("yarn_correction_range_round_to_int", "longrope_short_factor", "longrope_long_factor"),
    "longrope_attention_factor",
)
_OF_TEMPERATURE = (
    *("attn_temperature_tuning", "attn_temperature_rotated", "attn_scale", "floor_scale"),
)


class LayerSettings(NamedTuple):
    """Settings of one kind of layer.

    Attributes:
        names: the settings.
        what: such layers, after "layers with".
        has: whether a layer is of this kind; those of MTP modules come after the model's.
        on: settings because of which a model may have none, the likeliest first.
    """

    names: tuple[str, ...]
    what: str
    has: Callable[[ModelConfig, int], bool]
    on: tuple[str, ...] = (_MIXERS,)


def _is_local(model: ModelConfig, layer: int) -> bool:
    return model.is_softmax(layer) and model.window_of(layer) is not None


def _is_global(model: ModelConfig, layer: int) -> bool:
    return model.is_softmax(layer) and model.window_of(layer) is None


def _is_dense(model: ModelConfig, layer: int) -> bool:
    return model.mixer_of(layer) in (None, "-") and not model.is_moe(layer)


def _shares(local: str) -> Callable[[ModelConfig, int], bool]:
    """Whether a layer has the size of attention that others have as setting `local`."""
    return lambda model, layer: getattr(model, local) is None or _is_global(model, layer)


def _multiplies(model: ModelConfig, layer: int) -> bool:
    return model.is_moe(layer) or _is_dense(model, layer)


KINDS = (
    LayerSettings(
        (
            *("num_query_groups", "kv_channels", "v_channels", "value_multiplier"),
            *("softmax_scale", "attn_logit_softcapping", "add_qkv_bias", "attention_out_bias"),
            *("clip_qkv", "qk_layernorm", "qk_layernorm_type", "qk_layernorm_after_rope"),
            *("v_l2_norm", "attention_dropout", "softmax_type", "attention_output_gate"),
        ),
        "attention",
        ModelConfig.is_softmax,
    ),
    LayerSettings(
        ("window_size", "window_attn_skip_freq", *OF_WINDOWS),
        "attention to a window",
        _is_local,
        (_MIXERS, _STATES),
    ),
    LayerSettings(("keys_as_values",), "attention to all tokens", _is_global, (_MIXERS, _STATES)),
    *(
        LayerSettings(
            (name.removesuffix("_local"),),
            f"attention to all tokens, as others have {name}",
            _shares(name),
            (_STATES, _MIXERS),
        )
        for name in OF_WINDOWS
    ),
    LayerSettings(_OF_ROPE, "attention and rotary positions", ModelConfig.rotates),
    LayerSettings(
        ("rotary_base_local",),
        "rotary positions in a window",
        lambda model, layer: _is_local(model, layer) and model.rotates(layer),
        (_MIXERS, _STATES, _UNROTATED),
    ),
    LayerSettings(
        (_UNROTATED,),
        "attention, but no rotary positions",
        lambda model, layer: model.is_softmax(layer) and not model.rotates(layer),
        (_MIXERS, _STATES, "num_layers"),
    ),
    LayerSettings(
        _OF_TEMPERATURE,
        "attention that it sharpens",
        ModelConfig.tempers,
        (_MIXERS, _STATES, "num_layers"),
    ),
    LayerSettings(
        (
            *("activation_func", "gated_linear_unit", "glu_linear_offset"),
            "activation_func_clamp_value",
        ),
        "an MLP or experts",
        _multiplies,
    ),
    LayerSettings(("mlp_bias",), "an MLP", _is_dense),
    LayerSettings(
        ("ffn_hidden_size",),
        "an MLP, or experts of its size",
        lambda model, layer: (
            _is_dense(model, layer) or (model.is_moe(layer) and model.moe_ffn_hidden_size is None)
        ),
    ),
    LayerSettings(
        ("add_bias_linear",),
        "attention, an MLP or experts",
        lambda model, layer: model.is_softmax(layer) or _multiplies(model, layer),
    ),
)
"""The settings of each kind of layer that a model may lack.

Settings of layers with a state hang on the setting that gives a model some (`model_dependents`).
`num_attention_heads` has no default, and a `position_embedding_type` of none holds wherever there
is no attention, so that neither is of a kind."""


def _rows() -> Iterator[Dependents]:
    for kind in KINDS:
        for on in kind.on:
            why = f"is for layers with {kind.what}"
            yield Dependents(kind.names, on, _alive(kind, on), why)


def _alive(kind: LayerSettings, on: str) -> Callable[[Config], bool]:
    """Whether a model has a layer of this kind, or none for another reason than setting `on`."""
    usual = SETTINGS[on].default

    def alive(config: Config) -> bool:
        model = config.model
        if getattr(model, on) == usual or all(
            getattr(model, name) == SETTINGS[name].default for name in kind.names
        ):
            return True
        try:
            return any(kind.has(model, layer) for layer in range(model.num_all_layers))
        except ConfigError:  # a pattern that other rules refuse
            return True

    return alive


DECIDES = tuple(dict.fromkeys(on for kind in KINDS for on in kind.on))
"""Settings that say which kinds of layers a model has."""
OF_LAYERS = tuple(_rows())
"""Settings of models that have an effect only where some layers are of a kind."""
