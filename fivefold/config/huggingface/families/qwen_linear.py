"""Qwen3-Next and the text models of Qwen3.5: Gated DeltaNet in three of four layers."""

from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.by_layer import OF_LINEAR_ATTENTION
from fivefold.config.huggingface.families.qwen import (
    QWEN_MOE_NAMES,
    qwen_expert_fields,
    qwen_experts,
)
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import read_rope
from fivefold.config.layer_pattern import window_frequency
from fivefold.config.model import ModelConfig

_NEXT = LlamaLike(
    num_key_value_heads=2,
    head_dim=256,
    rotary_share=0.25,
    heads="per_head",
    null_key_value_heads=False,
    rope=read_rope,
)
_QWEN35 = replace(
    _NEXT,
    num_key_value_heads=4,
    rope=partial(read_rope, ignored=("mrope_section", "mrope_interleaved")),
)
_QWEN35_MOE = replace(_QWEN35, num_key_value_heads=2, dense=False)


def _qwen3_next(reader: Reader) -> ModelConfig:
    """Qwen3-Next: Qwen2-MoE's experts, of more normalised weights."""
    reader.fixed("use_sliding_window", False)
    model = _NEXT.read(reader)
    return _hybrid(reader, qwen_experts(reader, model, shared=512, normalised=True))


def _qwen3_5(reader: Reader) -> ModelConfig:
    """Qwen3.5's dense text models."""
    _read_unused(reader)
    return _hybrid(reader, _QWEN35.read(reader))


def _qwen3_5_moe(reader: Reader) -> ModelConfig:
    """Qwen3.5's text models with experts in every layer."""
    model = _QWEN35_MOE.read(reader)
    _read_unused(reader)
    read_balancing(reader)
    reader.without_effect("intermediate_size")  # of dense layers, which there are none of
    reader.fixed("norm_topk_prob", True)
    reader.fixed("decoder_sparse_step", 1)
    inner = reader.size("moe_intermediate_size", default=512)
    shared = reader.size("shared_expert_intermediate_size", default=512)
    experts: dict[str, Any] = {
        "num_experts": reader.size("num_experts", "num_local_experts", default=256),
        "moe_router_topk": reader.size("num_experts_per_tok", default=8),
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": True,
    }
    return _hybrid(reader, replace(model, **experts))


def _read_unused(reader: Reader) -> None:
    """Read what files of Qwen3.5 have, and transformers has no use for."""
    reader.fixed("attn_output_gate", True)
    reader.fixed("output_gate_type", "swish", "silu")
    reader.fixed("mlp_only_layers", [], None)
    # Multi-token prediction is left out.
    reader.without_effect("mamba_ssm_dtype", "mtp_num_hidden_layers")
    reader.without_effect("mtp_use_dedicated_embeddings")


def _hybrid(reader: Reader, model: ModelConfig) -> ModelConfig:
    """The same model with gated attention, and Gated DeltaNet in the layers that have it."""
    linear = _linear_layers(reader, model.num_layers)
    sizes: dict[str, Any] = {
        name: reader.size(name, default=default) for name, default in _SIZES.items()
    }
    model = replace(model, apply_layernorm_1p=True, attention_output_gate=True)
    if not any(linear):
        return model
    if all(linear):
        why = f"none of num_hidden_layers {len(linear)} would have attention with a softmax"
        if reader.fields.get("layer_types") is None:
            interval = reader.fields.get("full_attention_interval", 4)
            reader.unsupported("full_attention_interval", interval, [len(linear)], why)
        else:
            works = [["full_attention"] * len(linear)]
            reader.unsupported("layer_types", "linear_attention", works, why)
        return model
    reader.fixed("hidden_act", "silu", "swish", why="linear attention has no other activation here")
    return replace(
        model,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=window_frequency(linear),
        **sizes,
    )


def _linear_layers(reader: Reader, layers: int) -> tuple[bool, ...]:
    """Which layers have linear attention: those that are listed, or all but every Nth."""
    listed = reader.texts("layer_types", ("full_attention", "linear_attention"))
    interval = reader.size("full_attention_interval", default=4)
    if listed is None:
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not reader.has_each_layer("layer_types", listed, layers):
        return (False,) * layers
    return tuple(word == "linear_attention" for word in listed)


_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def _hybrid_fields(model: ModelConfig) -> Fields:
    linear = [model.is_linear(layer) for layer in range(model.num_layers)]
    return {
        "layer_types": [f"{'linear' if has else 'full'}_attention" for has in linear],
        **{name: getattr(model, name) for name in OF_LINEAR_ATTENTION[1:]},
    }


def _write_dense(model: ModelConfig) -> Fields:
    share = {"partial_rotary_factor": model.rotary_percent}
    return _QWEN35.write(model) | share | _hybrid_fields(model)


def _write_mixture(model: ModelConfig) -> Fields:
    fields = _NEXT.write(model) | qwen_expert_fields(model)
    fields["partial_rotary_factor"] = model.rotary_percent
    fields["shared_expert_intermediate_size"] = model.shared_ffn_size
    return fields | _hybrid_fields(model)


def _write_qwen3_5_moe(model: ModelConfig) -> Fields:
    fields = _write_mixture(model)
    del fields["intermediate_size"]  # of dense layers
    return fields


_NEXT_FILES = Tensors(QWEN_MOE_NAMES, left_out=("mtp.",))
_APART = {
    "in_proj_qkvz.": ("in_proj_qkv.", "in_proj_z."),
    "in_proj_ba.": ("in_proj_b.", "in_proj_a."),
}
_DENSE = Tensors(apart=_APART, left_out=("mtp.",))
_MOE = replace(_DENSE, names=QWEN_MOE_NAMES, also="together")
FAMILIES = (
    Family("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next, _write_mixture, _NEXT_FILES),
    Family("qwen3_5_text", "Qwen3_5ForCausalLM", _qwen3_5, _write_dense, _DENSE),
    Family("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _qwen3_5_moe, _write_qwen3_5_moe, _MOE),
)
