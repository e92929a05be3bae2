"""MiMo-V2-Flash: layers with a window have twice the key heads of the others, and sinks;
DeepSeek-V3's experts, in one group."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.grouped_experts import DEEPSEEK_NAMES, ONE_GROUP, written_sparse
from fivefold.config.huggingface.llama_like import LlamaLike, qkv_biases
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope
from fivefold.config.huggingface.rope_tables import rope_tables, written_tables
from fivefold.config.model import ModelConfig

_MIMO = LlamaLike(
    num_key_value_heads=4,
    head_dim=192,
    rms_norm_eps=1e-5,
    null_key_value_heads=False,
    biases=qkv_biases(False),
    windows=None,
    rope=None,
    rounded=True,
)
_EXPERTS = replace(
    ONE_GROUP,
    scale=1.0,
    null_scale=True,
    listed=True,
    first_counts=False,
    shared=None,
    experts=("n_routed_experts", "num_local_experts"),
    always=True,
)
_MORE = 2
"""Key heads of layers with a window for each of the others."""


def _mimo(reader: Reader) -> ModelConfig:
    model = _MIMO.read(reader)
    layers = range(model.num_layers)
    slides = windows.listed(reader, len(layers))
    slides = slides or tuple(layer > 0 and (layer + 1) % 6 != 0 for layer in layers)
    before = reader.optional_size("sliding_window_size", default=None)
    width = reader.size("sliding_window", default=129, least=2)
    window = windows.settings(width if before is None else before + 1, slides)
    default = Rope(5000000.0, 0.334, "default")
    rope = rope_tables(reader, default, 10000.0, slides, scalings=("default",), partial=True)
    reader.fixed("n_shared_experts", None, 0)  # transformers makes none, whatever it says
    scale = reader.number_or_null("attention_value_scale", 0.707)
    model = replace(
        model,
        v_channels=reader.size("v_head_dim", default=128),
        value_multiplier=1.0 if scale is None else scale,
        **rope,
        **window,
        **_EXPERTS.read(reader, len(layers)),
    )
    _read_published(reader, model, slides)
    return replace(model, **_of_windows(reader, model, slides))


def _of_windows(reader: Reader, model: ModelConfig, slides: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings of attention in layers with a window."""
    if not any(slides):
        return {}
    keys, heads = _MORE * model.num_kv_heads, model.num_attention_heads
    if heads % keys:
        why = f"num_key_value_heads is {model.num_kv_heads}, of layers with a window {keys}"
        reader.unsupported("num_attention_heads", heads, [-(-heads // keys) * keys], why)
    sizes = {"num_query_groups": keys, "softmax_type": "learnable"}
    return sizes if all(slides) else {f"{name}_local": size for name, size in sizes.items()}


def _read_published(reader: Reader, model: ModelConfig, slides: Sequence[bool]) -> None:
    """Fields of the published file for code of its own, which transformers has no use for: they
    have to say what it does."""
    local = model.attention_of(True)
    for name, value in {
        "layernorm_epsilon": model.norm_epsilon,
        "hybrid_layer_pattern": [int(slide) for slide in slides],
        "swa_num_attention_heads": model.num_attention_heads,
        "swa_num_key_value_heads": _MORE * model.num_kv_heads,
        "swa_head_dim": model.head_dim,
        "swa_v_head_dim": model.value_dim,
        "swa_rope_theta": local.rotary_base,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
    }.items():
        reader.fixed(name, None, value)
    reader.without_effect("hybrid_block_size")


def _write(model: ModelConfig) -> Fields:
    slides = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    fields = _MIMO.write(model) | windows.fields(model) | _EXPERTS.write(model)
    del fields["first_k_dense_replace"]
    if fields["sliding_window"] is None:
        del fields["sliding_window"]
    tables = written_tables(model, fields)
    for table in tables["rope_parameters"].values():
        table["partial_rotary_factor"] = model.rotary_percent
    return tables | {
        "num_key_value_heads": max(model.num_kv_heads // (_MORE if all(slides) else 1), 1),
        "attention_bias": model.add_qkv_bias,
        "mlp_layer_types": written_sparse(model),
        "v_head_dim": model.value_dim,
        "attention_value_scale": model.value_multiplier,
    }


FAMILIES = (
    Family(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        _mimo,
        _write,
        Tensors(
            {".self_attn.sinks.weight": ".self_attn.attention_sink_bias", **DEEPSEEK_NAMES},
            left_out=("mtp.",),
        ),
    ),
)
