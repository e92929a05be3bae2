"""What a Hugging Face config.json says, as a ModelConfig."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config.model import ModelConfig, check_model
from fivefold.errors import ConfigError, Mistake, Mistakes, did_you_mean

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ROPE_TYPES = ("default", "llama3")


class _Reader:
    """Reads fields of a config.json and collects what is missing or not supported."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.mistakes = Mistakes()

    def size(self, name: str) -> int:
        """A whole number that must be there."""
        value = self.fields.get(name)
        if isinstance(value, int):
            return value
        self.mistakes.add(f"config.json needs a whole number for {name!r}, not {value!r}")
        return 1

    def get(self, name: str, default: Any) -> Any:
        """A field that may be absent or null."""
        value = self.fields.get(name)
        return default if value is None else value

    def activation(self, name: str, default: str) -> Any:
        value = self.get(name, default)
        if value not in _ACTIVATIONS:
            self.unsupported(name, value, _ACTIVATIONS)
        return _ACTIVATIONS.get(value, "silu")

    def unsupported(self, name: str, value: Any, works: Any) -> None:
        kind = self.fields.get("model_type")
        self.mistakes.add(
            f"{name} = {value!r} of this {kind} model is not supported",
            works=[f"{name} = {choice!r}" for choice in works],
        )


def from_hf_config(source: Mapping[str, Any] | str | Path) -> ModelConfig:
    """The architecture that a Hugging Face config.json (its content, path or folder) describes.

    Understands model_type llama, mistral, qwen2, qwen3 and gpt2, as transformers v4 and v5 write
    them. Fields that do not change the function computed (torch_dtype, use_cache, ...) are ignored.

    Raises:
        ConfigError: the file cannot be read, or the model has a feature that is not supported.
    """
    fields = source if isinstance(source, Mapping) else _read_json(Path(source))
    kind = str(fields.get("model_type"))
    if kind != "gpt2" and kind not in _LLAMA_LIKE:
        known = ("gpt2", *_LLAMA_LIKE)
        what = f"unsupported model_type {kind!r}{did_you_mean(kind, known)}"
        raise ConfigError(Mistake(what, works=known))
    reader = _Reader(fields)
    model = _gpt2(reader) if kind == "gpt2" else _llama_like(reader, kind)
    reader.mistakes.raise_if_any()
    check_model(model, reader.mistakes)
    reader.mistakes.raise_if_any()
    return model


def _read_json(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Mistake(f"cannot read {file} as JSON", why=(str(error),))) from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{file} must hold a JSON object, not a {type(fields).__name__}")
    return fields


# model_type -> defaults of transformers for fields that a config.json may leave out
_LLAMA_LIKE: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}


def _llama_like(reader: _Reader, kind: str) -> ModelConfig:
    """Llama and its relatives: RMSNorm, RoPE, gated MLP, no bias but where the family has one."""
    defaults = _LLAMA_LIKE[kind]
    attention_bias = bool(reader.get("attention_bias", False))
    mlp_bias = bool(reader.get("mlp_bias", False))
    if attention_bias != mlp_bias:  # Hugging Face's attention_bias is also the output projection's
        name, value = (
            ("attention_bias", attention_bias) if kind != "llama" else ("mlp_bias", mlp_bias)
        )
        reader.unsupported(name, value, [not value])
    _refuse_sliding_window(reader, kind)
    return ModelConfig(
        num_layers=reader.size("num_hidden_layers"),
        hidden_size=reader.size("hidden_size"),
        num_attention_heads=reader.size("num_attention_heads"),
        num_query_groups=reader.fields.get(
            "num_key_value_heads", defaults.get("num_key_value_heads")
        ),
        kv_channels=reader.get("head_dim", defaults.get("head_dim")),
        ffn_hidden_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        norm_epsilon=reader.get("rms_norm_eps", 1e-6),
        activation_func=reader.activation("hidden_act", "silu"),
        add_bias_linear=attention_bias and mlp_bias,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind == "qwen3",
        untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings", False),
        attention_dropout=reader.get("attention_dropout", 0.0),
        init_method_std=reader.get("initializer_range", 0.02),
        **_rope(reader),
    )


def _refuse_sliding_window(reader: _Reader, kind: str) -> None:
    """A window that no sequence outgrows is no window; any other changes the attention."""
    layer_types = set(reader.get("layer_types", ["full_attention"]))
    if layer_types != {"full_attention"}:
        reader.unsupported("layer_types", sorted(layer_types), [["full_attention"]])
    window = reader.get("sliding_window", None)
    used = kind == "mistral" or reader.get("use_sliding_window", False)
    if kind != "llama" and used and window and window < reader.get("max_position_embeddings", 0):
        reader.unsupported("sliding_window", window, [None])


def _rope(reader: _Reader) -> dict[str, Any]:
    """RoPE settings: rope_parameters of transformers v5, or rope_theta and rope_scaling of v4."""
    rope = reader.get("rope_parameters", None) or reader.get("rope_scaling", {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        reader.unsupported("rope_parameters by layer type", sorted(rope), ["one for all layers"])
        return {}
    partial = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reader.unsupported("partial_rotary_factor", partial, [1.0])
    settings = {"rotary_base": float(rope.get("rope_theta", reader.get("rope_theta", 10000.0)))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return settings
    if kind != "llama3":
        reader.unsupported("rope_type", kind, _ROPE_TYPES)
        return settings
    missing = [name for name in _ROPE_SCALING.values() if name not in rope]
    if missing:
        reader.mistakes.add(f"llama3 RoPE scaling needs {', '.join(missing)}")
        return settings
    scaling = {ours: rope[theirs] for ours, theirs in _ROPE_SCALING.items()}
    return settings | {"use_rope_scaling": True} | scaling


_ROPE_SCALING = {
    "rope_scaling_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
}


def _gpt2(reader: _Reader) -> ModelConfig:
    dropout = reader.get("resid_pdrop", 0.1)
    if reader.get("embd_pdrop", 0.1) != dropout:
        reader.unsupported("embd_pdrop", reader.get("embd_pdrop", 0.1), [dropout])
    if reader.get("scale_attn_by_inverse_layer_idx", False):
        reader.unsupported("scale_attn_by_inverse_layer_idx", True, [False])
    if not reader.get("scale_attn_weights", True):
        reader.unsupported("scale_attn_weights", False, [True])
    return ModelConfig(
        num_layers=reader.size("n_layer"),
        hidden_size=reader.size("n_embd"),
        num_attention_heads=reader.size("n_head"),
        ffn_hidden_size=reader.get("n_inner", None),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("n_positions"),
        normalization="LayerNorm",
        norm_epsilon=reader.get("layer_norm_epsilon", 1e-5),
        position_embedding_type="learned_absolute",
        activation_func=reader.activation("activation_function", "gelu_new"),
        gated_linear_unit=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings", True),
        hidden_dropout=dropout,
        attention_dropout=reader.get("attn_pdrop", 0.1),
        init_method_std=reader.get("initializer_range", 0.02),
    )
