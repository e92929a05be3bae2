"""What a Hugging Face config.json says, as a ModelConfig."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivefold.config.layer_pattern import layer_frequency
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
    """Reads fields of a config.json and collects what is missing or not supported.

    Attributes:
        fields: of the file.
        mistakes: what cannot be read.
        left_out: what is there and a ModelConfig cannot say; nobody may train without it.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields
        self.mistakes = Mistakes()
        self.left_out: list[str] = []

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

    Understands what `_FAMILIES` lists, as transformers v4 and v5 write it. Fields that do not
    change the function computed (torch_dtype, use_cache, ...) are ignored. Features of families
    that can only be planned with, and that leave sizes alone, such as how a router scores, are
    named in `unmodelled`; every other feature that is not supported is refused.

    Raises:
        ConfigError: the file cannot be read, or the model has a feature that is not supported.
    """
    fields = source if isinstance(source, Mapping) else _read_json(Path(source))
    kind = str(fields.get("model_type"))
    if kind not in _FAMILIES:
        what = f"unsupported model_type {kind!r}{did_you_mean(kind, _FAMILIES)}"
        raise ConfigError(Mistake(what, works=tuple(_FAMILIES)))
    reader = _Reader(fields)
    model = _FAMILIES[kind](reader, kind)
    reader.mistakes.raise_if_any()
    check_model(model, reader.mistakes)
    reader.mistakes.raise_if_any()
    return replace(model, unmodelled=tuple(reader.left_out))


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
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gpt_oss": {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
    },
}


def _llama_like(reader: _Reader, kind: str) -> ModelConfig:
    """Llama and its relatives: RMSNorm, RoPE, gated MLP, no bias but where the family has one."""
    defaults = _LLAMA_LIKE[kind]
    sparse_bias = kind == "gpt_oss"  # of its attention, router and experts
    attention_bias = bool(reader.get("attention_bias", sparse_bias))
    mlp_bias = bool(reader.get("mlp_bias", sparse_bias))
    if attention_bias != mlp_bias:  # Hugging Face's attention_bias is also the output projection's
        name, value = (
            ("attention_bias", attention_bias) if kind != "llama" else ("mlp_bias", mlp_bias)
        )
        reader.unsupported(name, value, [not value])
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
        norm_epsilon=reader.get("rms_norm_eps", defaults.get("rms_norm_eps", 1e-6)),
        activation_func=reader.activation("hidden_act", "silu"),
        add_bias_linear=attention_bias and mlp_bias,
        add_qkv_bias=kind == "qwen2",
        qk_layernorm=kind in ("qwen3", "qwen3_moe"),
        untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings", False),
        attention_dropout=reader.get("attention_dropout", 0.0),
        window_size=None if kind == "gpt_oss" else _window(reader, kind),
        init_method_std=reader.get("initializer_range", 0.02),
        **_rope(reader, defaults.get("rope_theta", 10000.0), leave_out=kind == "gpt_oss"),
    )


def _mixtral(reader: _Reader, kind: str) -> ModelConfig:
    return replace(
        _llama_like(reader, kind),
        num_experts=reader.size("num_local_experts"),
        moe_router_topk=reader.size("num_experts_per_tok"),
    )


def _qwen3_moe(reader: _Reader, kind: str) -> ModelConfig:
    model = _llama_like(reader, kind)
    dense, step = reader.get("mlp_only_layers", []), reader.get("decoder_sparse_step", 1)
    has_experts = [i not in dense and (i + 1) % step == 0 for i in range(model.num_layers)]
    if not reader.get("norm_topk_prob", False):
        reader.left_out.append(_NOT_NORMALISED)
    return replace(
        model,
        num_experts=reader.size("num_experts"),
        moe_router_topk=reader.size("num_experts_per_tok"),
        moe_ffn_hidden_size=reader.size("moe_intermediate_size"),
        moe_layer_freq=layer_frequency(has_experts),
    )


def _gpt_oss(reader: _Reader, kind: str) -> ModelConfig:
    """OpenAI's gpt-oss, which has more than a ModelConfig can say."""
    model = _llama_like(reader, kind)
    layers = model.num_layers
    types = reader.get("layer_types", ["sliding_attention", "full_attention"] * (layers // 2))
    window, windows = reader.get("sliding_window", 128), types.count("sliding_attention")
    reader.left_out += ["attention sinks", "a clamped SwiGLU"]
    if windows:
        reader.left_out.append(f"a window of {window} tokens in {windows} of {layers} layers")
    return replace(
        model,
        num_experts=reader.size("num_local_experts"),
        moe_router_topk=reader.size("num_experts_per_tok"),
    )


# model_type -> how its router works where a config.json does not say so
_ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
}
_NOT_NORMALISED = "router weights that are not normalised"


def _deepseek(reader: _Reader, kind: str) -> ModelConfig:
    """DeepSeek-V2, V3 and Kimi-K2: latent attention, dense layers first, shared experts."""
    layers = reader.size("num_hidden_layers")
    if reader.get("attention_bias", False):
        reader.unsupported("attention_bias", True, [False])
    experts = reader.get("n_routed_experts", None)
    return ModelConfig(
        num_layers=layers,
        hidden_size=reader.size("hidden_size"),
        num_attention_heads=reader.size("num_attention_heads"),
        ffn_hidden_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        norm_epsilon=reader.get("rms_norm_eps", 1e-6),
        activation_func=reader.activation("hidden_act", "silu"),
        untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings", False),
        attention_dropout=reader.get("attention_dropout", 0.0),
        init_method_std=reader.get("initializer_range", 0.02),
        multi_latent_attention=True,
        q_lora_rank=reader.fields.get("q_lora_rank", 1536),
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_head_dim=reader.size("qk_nope_head_dim"),
        qk_pos_emb_head_dim=reader.size("qk_rope_head_dim"),
        v_head_dim=reader.size("v_head_dim"),
        mtp_num_layers=reader.get("num_nextn_predict_layers", 0),
        **(_deepseek_experts(reader, kind, layers) if experts else {}),
        **_rope(reader, 10000.0, leave_out=True),
    )


def _deepseek_experts(reader: _Reader, kind: str, layers: int) -> dict[str, Any]:
    router = _ROUTERS["deepseek_v2" if kind == "deepseek_v2" else "deepseek_v3"]
    how = {name: reader.get(name, default) for name, default in router.items()}
    groups, chosen = reader.get("n_group", 1), reader.get("topk_group", 1)
    grouped = how["topk_method"] != "greedy" and chosen < groups
    if how["scoring_func"] != "softmax":
        reader.left_out.append(f"{how['scoring_func']} router scores")
    if how["topk_method"] == "noaux_tc":
        reader.left_out.append("balancing by a bias of the router")
    if not how["norm_topk_prob"]:
        reader.left_out.append(_NOT_NORMALISED)
    if how["routed_scaling_factor"] != 1.0:
        reader.left_out.append(f"router weights times {how['routed_scaling_factor']}")
    first, every = reader.get("first_k_dense_replace", 0), reader.get("moe_layer_freq", 1)
    inner = reader.size("moe_intermediate_size")
    return {
        "num_experts": reader.size("n_routed_experts"),
        "moe_router_topk": reader.size("num_experts_per_tok"),
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": reader.get("n_shared_experts", 0) * inner or None,
        "moe_layer_freq": layer_frequency([i >= first and i % every == 0 for i in range(layers)]),
    }


def _window(reader: _Reader, kind: str) -> int | None:
    """The same window in every layer; one that no sequence outgrows is none.

    Hugging Face counts the token itself, Megatron-LM only those before it.
    """
    layer_types = set(reader.get("layer_types", ["full_attention"]))
    if layer_types != {"full_attention"}:
        reader.unsupported("layer_types", sorted(layer_types), [["full_attention"]])
    window = reader.get("sliding_window", None)
    used = kind in ("mistral", "mixtral") or reader.get("use_sliding_window", False)
    if kind == "llama" or not used or not window:
        return None
    if window >= reader.get("max_position_embeddings", 0):
        return None
    if kind not in ("mistral", "mixtral"):  # Qwen's begins at some layer
        reader.unsupported("sliding_window", window, [None])
    return int(window) - 1


def _rope(reader: _Reader, theta: float, *, leave_out: bool) -> dict[str, Any]:
    """RoPE settings: rope_parameters of transformers v5, or rope_theta and rope_scaling of v4.

    Args:
        reader: of the file.
        theta: where it names none.
        leave_out: whether a scaling that is not supported is left out rather than refused.
    """
    rope = reader.get("rope_parameters", None) or reader.get("rope_scaling", {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        reader.unsupported("rope_parameters by layer type", sorted(rope), ["one for all layers"])
        return {}
    partial = rope.get("partial_rotary_factor", reader.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        reader.unsupported("partial_rotary_factor", partial, [1.0])
    settings = {"rotary_base": float(rope.get("rope_theta", reader.get("rope_theta", theta)))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return settings
    if kind != "llama3" and leave_out:
        reader.left_out.insert(0, f"{kind} RoPE scaling")
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


def _gpt2(reader: _Reader, kind: str) -> ModelConfig:
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


def _gpt_neox(reader: _Reader, kind: str) -> ModelConfig:
    rope = reader.get("rope_parameters", {})
    share = rope.get("partial_rotary_factor", reader.get("rotary_pct", 0.25))
    if share != 1.0:
        reader.left_out.append(f"rotary positions in {share:.0%} of a head's features")
    if reader.get("use_parallel_residual", True):
        reader.left_out.append("attention and MLP side by side")
    if not reader.get("attention_bias", True):
        reader.unsupported("attention_bias", False, [True])
    return ModelConfig(
        num_layers=reader.size("num_hidden_layers"),
        hidden_size=reader.size("hidden_size"),
        num_attention_heads=reader.size("num_attention_heads"),
        ffn_hidden_size=reader.size("intermediate_size"),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings"),
        normalization="LayerNorm",
        norm_epsilon=reader.get("layer_norm_eps", 1e-5),
        rotary_base=float(rope.get("rope_theta", reader.get("rotary_emb_base", 10000.0))),
        activation_func=reader.activation("hidden_act", "gelu"),
        gated_linear_unit=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not reader.get("tie_word_embeddings", False),
        hidden_dropout=reader.get("hidden_dropout", 0.0),
        attention_dropout=reader.get("attention_dropout", 0.0),
        init_method_std=reader.get("initializer_range", 0.02),
    )


_FAMILIES: Mapping[str, Callable[[_Reader, str], ModelConfig]] = MappingProxyType(
    {
        "llama": _llama_like,
        "mistral": _llama_like,
        "mixtral": _mixtral,
        "qwen2": _llama_like,
        "qwen3": _llama_like,
        "qwen3_moe": _qwen3_moe,
        "deepseek_v2": _deepseek,
        "deepseek_v3": _deepseek,
        "kimi_k2": _deepseek,
        "gpt_oss": _gpt_oss,
        "gpt_neox": _gpt_neox,
        "gpt2": _gpt2,
    }
)
