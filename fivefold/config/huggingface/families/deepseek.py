"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: latent attention, dense layers first."""

from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import activation_name, rope_fields, size_fields
from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.grouped_experts import (
    DEEPSEEK_NAMES,
    ONE_GROUP,
    V2,
    V3,
    GroupedExperts,
    predictions,
    written_sparse,
)
from fivefold.config.huggingface.llama_like import activation, transformer_sizes
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope
from fivefold.config.model import ModelConfig

_LATENT_EPSILON = 1e-6
"""With which transformers normalises latents, whatever the file says."""
_LITE = replace(ONE_GROUP, scale=1.8, listed=True, first_counts=False, always=True)


def _read(reader: Reader, experts: GroupedExperts = V3) -> ModelConfig:
    """The model; heads share one rotary key, and adjacent rotary features are paired."""
    second, lite = experts is V2, experts is _LITE
    sizes = transformer_sizes(reader)
    read_stored_weights(reader, code=True, rounded=True)
    reader.fixed("attention_bias", False)
    reader.fixed("mlp_bias", False)
    # The order in which weights are stored; the computation is the same. Null is false.
    reader.fixed("rope_interleave", True, False, None)
    epsilon = reader.number("rms_norm_eps", 1e-5 if lite else 1e-6)
    rope = read_rope(reader, Rope(10000.0, 1.0, "default"), latents=True)
    if rope.share != 1.0:
        reader.unsupported("partial_rotary_factor", rope.share, [1.0])
    inner = reader.size("intermediate_size")
    latents: dict[str, Any] = {
        "q_lora_rank": reader.optional_size("q_lora_rank", default=768 if lite else 1536),
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_head_dim": reader.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }
    # Derived sizes, which transformers 5 also writes.
    turned = latents["qk_pos_emb_head_dim"]
    heads, default = sizes["num_attention_heads"], None if second else 20 if lite else 128
    key_value_heads = reader.optional_size("num_key_value_heads", default=default)
    if key_value_heads not in (None, heads):
        why = f"each of num_attention_heads {heads} has keys of its own"
        reader.unsupported("num_key_value_heads", key_value_heads, [heads], why)
    reader.fixed("qk_head_dim", latents["qk_head_dim"] + turned)
    reader.fixed("head_dim", turned)
    return ModelConfig(
        **sizes,
        **latents,
        ffn_hidden_size=inner,
        norm_epsilon=epsilon,
        latent_norm_epsilon=None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON,
        activation_func=activation(reader, "hidden_act", "silu"),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        attention_dropout=reader.number("attention_dropout", 0.0),
        multi_latent_attention=True,
        mtp_num_layers=0 if second else predictions(reader),
        **experts.read(reader, sizes["num_layers"]),
        **rope.settings(),
    )


def _write(model: ModelConfig, experts: GroupedExperts = V3) -> Fields:
    fields = {
        **size_fields(model),
        **rope_fields(model),
        **experts.write(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_attention_heads,
        "hidden_act": activation_name(model),
        "rms_norm_eps": model.norm_epsilon,
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.qk_head_dim,
        "qk_rope_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
    }
    if experts is V2:
        grouped = model.moe_router_num_groups is not None
        return fields | {"topk_method": "group_limited_greedy" if grouped else "greedy"}
    if experts.listed:
        fields["mlp_layer_types"] = written_sparse(model)
    return fields | {
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": model.prediction_sets,
        "rope_interleave": True,
    }


_V2, _V3 = Tensors(DEEPSEEK_NAMES, pairs=True), Tensors(DEEPSEEK_NAMES, pairs=None, predicts=True)
_read_v2, _write_v2 = partial(_read, experts=V2), partial(_write, experts=V2)
_read_lite, _write_lite = partial(_read, experts=_LITE), partial(_write, experts=_LITE)
FAMILIES = (
    Family("deepseek_v2", "DeepseekV2ForCausalLM", _read_v2, _write_v2, _V2),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", _read, _write, _V3),
    Family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _read_lite, _write_lite, _V3),
    Family("kimi_k2", "DeepseekV3ForCausalLM", _read, None, _V3),
)
