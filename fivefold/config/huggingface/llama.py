"""Llama and related families: RMSNorm, RoPE, a gated MLP, no biases unless the family has them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.defaults import (
    ALWAYS_EXPERTS,
    COUNTED_HEADS,
    DEFAULTS,
    EPSILONS,
    GLM,
    HUNYUAN,
    NO_WINDOWS,
    NULL_HEADS,
)
from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import (
    PHI3,
    Rope,
    raised_rope,
    read_rope,
    sharpened_rope,
    whole_head_rope,
    yarn_settings,
)
from fivefold.config.layer_pattern import MAX_LAYERS, unrotated_frequency, window_frequency
from fivefold.config.model import ModelConfig

ACTIVATIONS: Mapping[str, Any] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "relu2": "squared_relu",
    }
)


_OWN_ROPE = "olmo3", "gemma3_text"
_OWN_WINDOWS = "gpt_oss", "exaone4", "exaone_moe", "gemma2", "cohere2", *_OWN_ROPE
_WITH_CODE = "phi3", "ernie4_5", "ernie4_5_moe", *HUNYUAN
"""Families that were published with code of their own before transformers had them."""
_PHI3_DROPOUTS = "resid_pdrop", "embd_pdrop"


def llama_like(reader: Reader, kind: str) -> ModelConfig:
    """The dense model; mixtures of experts replace its MLPs."""
    defaults = DEFAULTS[kind]
    sizes = transformer_sizes(reader)
    key_value_heads = defaults.num_key_value_heads
    rope = Rope(defaults.rope_theta, defaults.rotary_share or 1.0, "default")
    gpt_oss = kind == "gpt_oss"
    if gpt_oss and reader.fields.get("rope_parameters") != {}:  # {} means no scaling
        scaling = yarn_settings(32.0, 4096, whole_pairs=False)
        rope = Rope(defaults.rope_theta, 1.0, "yarn", scaling)
    head_dim = reader.optional_size if kind in NULL_HEADS else reader.size
    heads = reader.optional_size
    if kind in COUNTED_HEADS:
        heads = reader.size
    rounded = kind in ("gpt_oss", "minimax_m2")
    read_stored_weights(reader, code=rounded or kind in _WITH_CODE, rounded=rounded)
    _read_unused(reader, kind)
    unrotated = unrotated_layers(reader, sizes["num_layers"]) if kind == "smollm3" else ()
    return ModelConfig(
        **sizes,
        no_rope_freq=unrotated_frequency(unrotated),
        ffn_hidden_size=None if kind in ALWAYS_EXPERTS else reader.size("intermediate_size"),
        num_query_groups=heads("num_key_value_heads", default=key_value_heads),
        kv_channels=head_dim("head_dim", default=defaults.head_dim),
        norm_epsilon=reader.number(EPSILONS.get(kind, "rms_norm_eps"), defaults.rms_norm_eps),
        activation_func=activation(
            reader,
            "hidden_activation" if kind in ("gemma2", "gemma3_text") else "hidden_act",
            defaults.activation,
        ),
        add_bias_linear=_biases(reader, kind),
        add_qkv_bias=_qkv_bias(reader, kind),
        qk_layernorm=_normalises_heads(reader, kind),
        qk_layernorm_type=defaults.heads or "per_head",
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", defaults.tied),
        attention_dropout=reader.number("attention_dropout", 0.0),
        hidden_dropout=equal_dropouts(reader, _PHI3_DROPOUTS, 0.0) if kind == "phi3" else 0.0,
        norm_placement=defaults.norms,
        **(_multipliers(reader) if kind.startswith("granite") else {}),
        **({} if kind in _OWN_WINDOWS else _window(reader, kind, sizes["num_layers"], unrotated)),
        **({} if kind in _OWN_ROPE else _rope(reader, kind, rope).settings()),
    )


def _read_unused(reader: Reader, kind: str) -> None:
    """Read fields of published files that transformers has no use for."""
    if kind == "llama":
        reader.without_effect("max_sequence_length", "is_llama_config")
        reader.fixed("rope_interleaved", False)
    if kind == "qwen2":
        reader.fixed("use_mrope", False)
    if kind == "phi3":  # of Phi-4-mini
        reader.fixed("lm_head_bias", False)
        reader.fixed("full_attn_mod", 1)
        reader.fixed("interpolate_factor", 1)
    if kind == "olmoe":
        reader.fixed("clip_qkv", None)


def _multipliers(reader: Reader) -> dict[str, Any]:
    """Granite's factors; a missing one is 1, that of scores, too."""
    names = "embedding_multiplier", "residual_multiplier", "logits_scaling"
    found: dict[str, Any] = {name: reader.number(name, 1.0) for name in names}
    return found | {"softmax_scale": reader.number("attention_multiplier", 1.0)}


def _rope(reader: Reader, kind: str, default: Rope) -> Rope:
    if kind == "ministral3":
        return sharpened_rope(reader, default)
    if kind in HUNYUAN:
        return raised_rope(reader, default, reader.size("head_dim"))
    if DEFAULTS[kind].rotary_share is None:
        return whole_head_rope(reader, default)
    if kind == "minimax_m2":
        return read_rope(reader, replace(default, share=_turned_share(reader, default.share)))
    if kind.startswith("qwen3_5"):
        return read_rope(reader, default, ignored=("mrope_section", "mrope_interleaved"))
    if kind != "phi3":
        return read_rope(reader, default)
    original = reader.size("original_max_position_embeddings", default=4096)
    return read_rope(reader, default, scalings=PHI3, original=original)


def _turned_share(reader: Reader, default: float) -> float:
    """The share of a head that RoPE turns where rotary_dim says it, if nothing else does."""
    turned, head = reader.optional_size("rotary_dim"), reader.size("head_dim", default=128)
    if turned is None:
        return default
    if turned % 2 or turned > head:
        why = f"head_dim = {head}, of which RoPE turns pairs of features"
        reader.unsupported("rotary_dim", turned, [head - head % 2], why)
        return default
    return turned / head


def transformer_sizes(reader: Reader) -> dict[str, Any]:
    """Settings that most families give by the same names."""
    return {
        "num_layers": reader.size("num_hidden_layers", most=MAX_LAYERS),
        "hidden_size": reader.size("hidden_size"),
        "num_attention_heads": reader.size("num_attention_heads"),
        "vocab_size": reader.size("vocab_size"),
        "max_position_embeddings": reader.size("max_position_embeddings"),
        "init_method_std": reader.number("initializer_range", 0.02),
    }


def activation(reader: Reader, name: str, default: str) -> Any:
    """Activation function of the MLP, under Fivefold's name."""
    word = reader.text(name, default=default, choices=ACTIVATIONS)
    return ACTIVATIONS[word or default]


def refuse_head_dim(
    reader: Reader, model: ModelConfig, why: str = "hidden_size / num_attention_heads"
) -> None:
    """Report heads that together have not the features of a hidden state."""
    usual = model.hidden_size // model.num_attention_heads
    if model.head_dim != usual:
        reader.unsupported("head_dim", model.head_dim, [usual], why)


def layer_types(reader: Reader, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer has a window, if the config.json lists it; else None."""
    types = reader.texts("layer_types", ("full_attention", "sliding_attention"))
    if types is None:
        return None
    if not reader.has_each_layer("layer_types", types, layers):
        return (False,) * layers
    return tuple(kind == "sliding_attention" for kind in types)


def _biases(reader: Reader, kind: str) -> bool:
    """Whether every linear layer of a block has a bias, including attention's output."""
    if kind == "gpt_oss":  # biases in attention, router and experts
        reader.fixed("attention_bias", True)
        return True
    if kind in (*GLM, "seed_oss"):
        return False  # attention_bias means queries, keys and values
    if kind not in ("llama", "smollm3", "granite", "arcee", "nemotron"):
        # In Qwen3 and Granite's mixtures it affects attention alone; others have no such field.
        reader.fixed("attention_bias", False)
        reader.fixed("mlp_bias", False)
        return False
    attention, mlp = reader.flag("attention_bias", False), reader.flag("mlp_bias", False)
    if attention != mlp:
        reader.unsupported("mlp_bias", mlp, [attention], "attention_bias has to be the same")
    return attention and mlp


def _qkv_bias(reader: Reader, kind: str) -> bool:
    """Whether the projections of queries, keys and values have biases, and no others."""
    if kind in (*GLM, "seed_oss"):
        return reader.flag("attention_bias", kind in ("glm", "glm4", "seed_oss"))
    return kind == "qwen2" or (kind == "qwen2_moe" and reader.flag("qkv_bias", True))


def _normalises_heads(reader: Reader, kind: str) -> bool:
    if kind == "glm4_moe":
        return reader.flag("use_qk_norm", False)
    return DEFAULTS[kind].heads is not None


def equal_dropouts(reader: Reader, names: tuple[str, str], default: float) -> float:
    """Dropout of residual branches and of embeddings, by their names, which must be the same."""
    dropout, embedded = (reader.number(name, default) for name in names)
    if embedded != dropout:
        branches, embeddings = names
        reader.unsupported(embeddings, embedded, [dropout], f"{branches} has to be the same")
    return dropout


def window_settings(width: int | None, slides: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings for a sliding window in some layers.

    Args:
        width: tokens in the window, including the token itself.
        slides: whether each layer has the window.
    """
    if width is None or not any(slides):
        return {}
    skip = None if all(slides) else window_frequency(slides)
    return {"window_size": width - 1, "window_attn_skip_freq": skip}


def unrotated_layers(reader: Reader, layers: int) -> tuple[bool, ...]:
    """Which layers of SmolLM3 and Llama 4 have no RoPE: 0 in a list, or every fourth."""
    interval = reader.size("no_rope_layer_interval", default=4)
    listed = reader.sizes("no_rope_layers")
    if not listed:
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    if len(listed) < layers:
        sizes = f"{len(listed)} entries, {layers} layers"
        reader.mistakes.add(f"no_rope_layers must have one entry a layer: {sizes}")
        return (False,) * layers
    return tuple(not turns for turns in listed[:layers])


def _window(reader: Reader, kind: str, layers: int, unrotated: tuple[bool, ...]) -> dict[str, Any]:
    """The window, and the layers that have it; in SmolLM3 those without RoPE.

    Hugging Face's width includes the token itself, Megatron-LM's does not. A window counts even if
    it is as long as `max_position_embeddings`, which limits no sequence.
    """
    if kind in NO_WINDOWS:
        reader.fixed("sliding_window", None)
        return {}
    default = DEFAULTS[kind].sliding_window
    none = kind == "qwen2_moe"  # writes 0 if there is no window
    width = reader.optional_size("sliding_window", default=default, least=0 if none else 2) or None
    if width == 1:
        reader.unsupported("sliding_window", width, [2])
    slides = (width is not None,) * layers
    if kind in ("mistral", "ministral3"):
        listed = layer_types(reader, layers)
        # transformers' MistralModel ignores the list; its AutoModel uses it.
        if listed is not None and listed != slides:
            reader.contradict(
                {"layer_types": reader.fields["layer_types"], "sliding_window": width}
            )
    elif kind in ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "dots1", "smollm3"):
        if kind == "dots1":
            # transformers has no such field; files that say false have no window
            reader.fixed("use_sliding_window", width is not None)
        elif not reader.flag("use_sliding_window", False):
            width = None
        slides = _qwen_windows(reader, kind, layers, width, unrotated)
    return window_settings(width, slides)


def _qwen_windows(
    reader: Reader, kind: str, layers: int, width: int | None, unrotated: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Which layers have a window if the file does not list them.

    Layers from `max_window_layers` on do; in Qwen2-MoE also every other layer before.
    """
    if kind == "qwen3_moe":
        reader.without_effect("max_window_layers")
        return (width is not None,) * layers
    first = reader.size("max_window_layers", default=62 if kind == "dots1" else 28, least=0)
    listed = layer_types(reader, layers)
    if listed is None and kind == "smollm3":
        return tuple(width is not None and without for without in unrotated)
    if listed is None and kind == "qwen2_moe":
        return tuple(
            width is not None and layer < first and not layer % 2 for layer in range(layers)
        )
    if listed is None:
        return tuple(width is not None and layer >= first for layer in range(layers))
    if any(listed) and width is None:
        reader.unsupported(
            "layer_types", "sliding_attention", ["full_attention"], "there is no window"
        )
    return listed
