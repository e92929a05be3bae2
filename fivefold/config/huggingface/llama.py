"""Llama and its relatives: RMSNorm, RoPE, a gated MLP, no bias but where the family has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope, whole_head_rope
from fivefold.config.layer_pattern import MAX_LAYERS
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
    }
)


@dataclass(frozen=True)
class _Defaults:
    """What transformers takes for fields that a config.json leaves out.

    Attributes:
        num_key_value_heads: None: as many as query heads.
        head_dim: None: hidden size / heads.
        rms_norm_eps: added to the mean square.
        rope_theta: base of RoPE.
        sliding_window: sliding window in tokens, where a window is used.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    sliding_window: int | None = 4096


_DEFAULTS: Mapping[str, _Defaults] = MappingProxyType(
    {
        "llama": _Defaults(),
        "mistral": _Defaults(8),
        "mixtral": _Defaults(8, None, 1e-5, 1e6, sliding_window=None),
        "qwen2": _Defaults(32),
        "qwen3": _Defaults(32, head_dim=128),
        "qwen3_moe": _Defaults(4),
        "gpt_oss": _Defaults(8, 64, 1e-5, 150000.0),
    }
)


def llama_like(reader: Reader, kind: str) -> ModelConfig:
    """The dense model, which mixtures of experts change in their MLPs."""
    defaults = _DEFAULTS[kind]
    sizes = transformer_sizes(reader)
    key_value_heads = defaults.num_key_value_heads
    rope = Rope(defaults.rope_theta, 1.0, "yarn" if kind == "gpt_oss" else "default")
    gpt_oss = kind == "gpt_oss"
    # null means hidden size / heads where transformers fills it in.
    head_dim = reader.size if kind.startswith("qwen") else reader.optional_size
    read_stored_weights(reader, published=gpt_oss)
    if kind == "llama":
        reader.without_effect("max_sequence_length", "is_llama_config")
        reader.fixed("rope_interleaved", False)
    if kind == "qwen2":
        reader.fixed("use_mrope", False)
    return ModelConfig(
        **sizes,
        ffn_hidden_size=reader.size("intermediate_size"),
        num_query_groups=reader.optional_size("num_key_value_heads", default=key_value_heads),
        kv_channels=head_dim("head_dim", default=defaults.head_dim),
        norm_epsilon=reader.number("rms_norm_eps", defaults.rms_norm_eps),
        activation_func=activation(reader, "hidden_act", "silu"),
        add_bias_linear=_biases(reader, kind),
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        attention_dropout=reader.number("attention_dropout", 0.0),
        window_size=None if gpt_oss else _window(reader, kind, sizes["num_layers"]),
        **(
            read_rope(reader, rope, leave_out=True) if gpt_oss else whole_head_rope(reader, rope)
        ).settings(),
    )


def transformer_sizes(reader: Reader) -> dict[str, Any]:
    """Settings that most families call by the same names."""
    return {
        "num_layers": reader.size("num_hidden_layers", most=MAX_LAYERS),
        "hidden_size": reader.size("hidden_size"),
        "num_attention_heads": reader.size("num_attention_heads"),
        "vocab_size": reader.size("vocab_size"),
        "max_position_embeddings": reader.size("max_position_embeddings"),
        "init_method_std": reader.number("initializer_range", 0.02),
    }


def activation(reader: Reader, name: str, default: str) -> Any:
    """Activation of the MLP, under our name."""
    word = reader.text(name, default=default, choices=ACTIVATIONS)
    return ACTIVATIONS[word or default]


def layer_types(reader: Reader, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer has a window, where a config.json lists it."""
    types = reader.texts("layer_types", ("full_attention", "sliding_attention"))
    if types is None:
        return None
    if len(types) != layers:
        reader.mistakes.add(
            f"layer_types must have one entry a layer: {len(types)} entries, {layers} layers"
        )
        return (False,) * layers
    return tuple(kind == "sliding_attention" for kind in types)


def _biases(reader: Reader, kind: str) -> bool:
    """Whether every linear layer of a block has a bias; those of attention include the output's."""
    if kind == "gpt_oss":  # of its attention, router and experts
        reader.fixed("attention_bias", True)
        return True
    if kind != "llama":  # Qwen3 would have it in attention alone, the others have no such field
        reader.fixed("attention_bias", False)
        reader.fixed("mlp_bias", False)
        return False
    attention, mlp = reader.flag("attention_bias", False), reader.flag("mlp_bias", False)
    if attention != mlp:
        reader.unsupported("mlp_bias", mlp, [attention], "attention_bias has to be the same")
    return attention and mlp


def _window(reader: Reader, kind: str, layers: int) -> int | None:
    """The same window in every layer, or none in any.

    Hugging Face counts the token itself, Megatron-LM only those before it. A window counts even if
    it is as long as `max_position_embeddings`, which limits no sequence.
    """
    if kind == "llama":
        reader.fixed("sliding_window", None)
        return None
    width = reader.optional_size("sliding_window", default=_DEFAULTS[kind].sliding_window, least=2)
    slides = (width is not None,) * layers
    if kind == "mistral":
        listed = layer_types(reader, layers)
        # transformers' MistralModel ignores the list, which its AutoModel obeys.
        if listed is not None and listed != slides:
            reader.contradict(
                {"layer_types": reader.fields["layer_types"], "sliding_window": width}
            )
    elif kind in ("qwen2", "qwen3", "qwen3_moe"):
        if not reader.flag("use_sliding_window", False):
            width = None
        slides = _qwen_windows(reader, kind, layers, width)
    if width is None or not any(slides):
        return None
    if not all(slides):
        where = f"in {sum(slides)} of {layers} layers"
        reader.unsupported("sliding_window", width, [None], f"it is {where}; a ModelConfig has one")
    return width - 1


def _qwen_windows(reader: Reader, kind: str, layers: int, width: int | None) -> tuple[bool, ...]:
    """Which layers have a window: those from `max_window_layers` on, unless they are listed."""
    if kind == "qwen3_moe":
        reader.without_effect("max_window_layers")
        return (width is not None,) * layers
    first = reader.size("max_window_layers", default=28, least=0)
    listed = layer_types(reader, layers)
    if listed is None:
        return tuple(width is not None and layer >= first for layer in range(layers))
    if any(listed) and width is None:
        reader.unsupported(
            "layer_types", "sliding_attention", ["full_attention"], "there is no window"
        )
    return listed
