"""Kimi Linear: Kimi Delta Attention in three of four layers, latent attention without positions in
the others, and DeepSeek-V3's experts."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import activation_name, size_fields
from fivefold.config.huggingface.generic import read_stored_weights, refuse_shared_keys
from fivefold.config.huggingface.grouped_experts import ONE_GROUP, written_sparse
from fivefold.config.huggingface.llama_like import activation, transformer_sizes
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import window_frequency
from fivefold.config.model import ModelConfig

_EXPERTS = replace(
    ONE_GROUP,
    scale=2.446,
    listed=True,
    always=True,
    experts=("num_experts", "num_local_experts"),
)
_OWN: Mapping[str, str] = MappingProxyType(
    {
        "max_position_embeddings": "model_max_length",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    }
)
"""Its names of fields that DeepSeek-V3 has, too, which transformers takes as well."""
_LATENT_EPSILON = 1e-6
"""With which transformers normalises latents, whatever the file says."""


def _read(reader: Reader) -> ModelConfig:
    """The model; heads have the features that RoPE would rotate, but they are not rotated."""
    reader.also(**_OWN)
    read_stored_weights(reader, code=True, rounded=True)
    sizes = transformer_sizes(reader)
    for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
        reader.fixed(name, False)
    reader.fixed("mla_use_nope", True)
    reader.fixed("use_grouped_topk", True)
    reader.fixed("moe_router_activation_func", "sigmoid")
    reader.fixed("num_nextn_predict_layers", 0)
    for name in ("rope_scaling", "rope_parameters"):
        reader.fixed(name, None, {}, why="it has no positions, mla_use_nope")
    reader.without_effect("rope_theta", "head_dim")
    refuse_shared_keys(reader, sizes["num_attention_heads"], 32)
    epsilon = reader.number("rms_norm_eps", 1e-5)
    model = ModelConfig(
        **sizes,
        ffn_hidden_size=reader.size("intermediate_size"),
        norm_epsilon=epsilon,
        latent_norm_epsilon=None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON,
        activation_func=activation(reader, "hidden_act", "silu"),
        attention_dropout=reader.number("attention_dropout", 0.0),
        position_embedding_type="none",
        multi_latent_attention=True,
        q_lora_rank=reader.optional_size("q_lora_rank", default=None),
        kv_lora_rank=reader.size("kv_lora_rank", default=512),
        qk_head_dim=reader.size("qk_nope_head_dim", default=128),
        qk_pos_emb_head_dim=reader.size("qk_rope_head_dim", default=64),
        v_head_dim=reader.size("v_head_dim", default=128),
        **_EXPERTS.read(reader, sizes["num_layers"]),
    )
    reader.fixed("qk_head_dim", model.query_dim)
    return replace(model, **_linear_attention(reader, model.num_layers))


def _linear_attention(reader: Reader, layers: int) -> dict[str, Any]:
    """Which layers have Kimi Delta Attention, and its heads."""
    heads, size = (
        reader.size("linear_num_heads", default=32),
        reader.size("linear_head_dim", default=128),
    )
    taps = reader.size("linear_conv_kernel_dim", default=4)
    table = reader.table("linear_attn_config")
    linear = _layers(reader, table, layers)
    if table is not None:  # which says more than the fields beside it
        heads = table.size("num_heads", default=heads)
        size = table.size("head_dim", default=size)
        taps = table.size("short_conv_kernel_size", default=taps)
        table.refuse_unread()
    if not any(linear):
        return {}
    if all(linear):
        works = [["full_attention"] * layers]
        why = f"none of num_hidden_layers {layers} would have attention with a softmax"
        reader.unsupported("layer_types", "linear_attention", works, why)
        return {}
    reader.fixed("hidden_act", "silu", "swish", why="linear attention has no other activation here")
    return {
        "experimental_attention_variant": "kimi_delta_attention",
        "linear_attention_freq": window_frequency(linear),
        "linear_conv_kernel_dim": taps,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size),
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
    }


def _layers(reader: Reader, table: Reader | None, layers: int) -> tuple[bool, ...]:
    """Those with linear attention: listed layer by layer, or by their numbers from 1; else, as in
    transformers, all but every fourth after the first."""
    listed = reader.texts("layer_types", ("full_attention", "linear_attention"))
    both = ("full_attn_layers", "kda_layers")
    full, linear = (table.sizes(name) if table is not None else () for name in both)
    if listed is not None:
        if not reader.has_each_layer("layer_types", listed, layers):
            return (False,) * layers
        return tuple(word == "linear_attention" for word in listed)
    if table is None or not {*both} <= {*table.fields}:
        return tuple(layer % 4 != 0 or layer == 0 for layer in range(layers))
    if sorted([*full, *linear]) != [*range(1, layers + 1)]:
        why = f"with full_attn_layers they are not 1 to num_hidden_layers {layers}"
        table.unsupported("kda_layers", [*linear], (), why)
    return tuple(layer + 1 in linear for layer in range(layers))


def _write(model: ModelConfig) -> Fields:
    fields = {**size_fields(model), **_EXPERTS.write(model)}
    for theirs, own in _OWN.items():
        fields[own] = fields.pop(theirs)
    del fields["scoring_func"]
    fields |= {
        "num_experts": fields.pop("n_routed_experts"),
        "moe_router_activation_func": "sigmoid",
        "mlp_layer_types": written_sparse(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_attention_heads,
        "hidden_act": activation_name(model),
        "rms_norm_eps": model.norm_epsilon,
        "attention_dropout": model.attention_dropout,
        "mla_use_nope": True,
        "pad_token_id": None,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
    }
    linear = [model.is_linear(layer) for layer in range(model.num_layers)]
    states = model.states
    fields["layer_types"] = [f"{'linear' if has else 'full'}_attention" for has in linear]
    return fields | {
        "linear_head_dim": states.key,
        "linear_num_heads": states.heads,
        "linear_conv_kernel_dim": states.taps,
        "linear_attn_config": {
            "full_attn_layers": [n for n, has in enumerate(linear, 1) if not has],
            "kda_layers": [n for n, has in enumerate(linear, 1) if has],
            "head_dim": states.key,
            "num_heads": states.heads,
            "short_conv_kernel_size": states.taps,
        },
    }


_NAMES: Mapping[str, str] = MappingProxyType(
    {
        ".kv_a_proj.": ".kv_a_proj_with_mqa.",
        ".self_attn.norm.": ".self_attn.o_norm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".mlp.router.expert_bias": ".block_sparse_moe.gate.e_score_correction_bias",
        ".mlp.router.": ".block_sparse_moe.gate.",
        ".mlp.experts.gate_proj.": ".block_sparse_moe.experts.{e}.w1.",
        ".mlp.experts.down_proj.": ".block_sparse_moe.experts.{e}.w2.",
        ".mlp.experts.up_proj.": ".block_sparse_moe.experts.{e}.w3.",
        ".mlp.shared_experts.": ".block_sparse_moe.shared_experts.",
    }
)
_APART: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "in_proj_qkv.": ("q_proj.", "k_proj.", "v_proj."),
        "conv1d.": ("q_conv1d.", "k_conv1d.", "v_conv1d."),
    }
)
_FILES = Tensors(_NAMES, apart=_APART, linear=".self_attn.", also="mixtures")
FAMILIES = (Family("kimi_linear", "KimiLinearForCausalLM", _read, _write, _FILES),)
