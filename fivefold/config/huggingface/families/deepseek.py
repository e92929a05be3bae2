"""DeepSeek-V2 to V3.2, Kimi-K2, GLM-4.7-Flash and GLM-5: latent attention, dense layers first."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import activation_name, rope_fields, size_fields
from fivefold.config.huggingface.generic import read_stored_weights, refuse_shared_keys
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


@dataclass(frozen=True, kw_only=True)
class LatentLike:
    """What a family with latent attention has, and takes absent fields for.

    Attributes:
        experts: its routers; None: it has no experts, or reads them by itself.
        epsilon: `rms_norm_eps`.
        queries: `q_lora_rank`.
        heads: `num_key_value_heads`.
        index_heads: `index_n_heads`, of a family with an indexer; None: it has none.
        shares: whether layers may take what the indexer of an earlier one has chosen.
        predicts: whether there may be layers of multi-token prediction.
        tied: whether embeddings are tied.
        rope: reads RoPE, by its default.
        head_dim: whether `head_dim` is the size of a query, not of its rotary features; None: it
            says nothing.
    """

    experts: GroupedExperts | None = None
    epsilon: float = 1e-6
    queries: int | None = 1536
    heads: int | None = 128
    index_heads: int | None = None
    shares: bool = False
    predicts: bool = True
    tied: bool = False
    rope: Callable[[Reader, Rope], Rope] = partial(read_rope, latents=True)
    head_dim: bool | None = False


_SECOND, _THIRD = LatentLike(experts=V2, heads=None, predicts=False), LatentLike(experts=V3)
_LITE = LatentLike(
    experts=replace(ONE_GROUP, scale=1.8, listed=True, first_counts=False, always=True),
    epsilon=1e-5,
    queries=768,
    heads=20,
)
_LISTED = replace(V3, listed=True, always=True)
_SPARSE = LatentLike(experts=_LISTED, index_heads=64)
_GLM5 = LatentLike(
    experts=replace(_LISTED, groups=1, chosen_groups=1),
    epsilon=1e-5,
    queries=2048,
    heads=64,
    index_heads=32,
    shares=True,
)


def read_latents(reader: Reader, kind: LatentLike = _THIRD) -> ModelConfig:
    """The model; heads share one rotary key, and adjacent rotary features are paired."""
    sizes = transformer_sizes(reader)
    read_stored_weights(reader, code=True, rounded=True)
    reader.fixed("attention_bias", False)
    reader.fixed("mlp_bias", False)
    indexes = kind.index_heads is not None
    # The order in which weights are stored; the computation is the same. Null is false.
    reader.fixed("rope_interleave", True, *(() if indexes else (False, None)))
    epsilon = reader.number("rms_norm_eps", kind.epsilon)
    rope = kind.rope(reader, Rope(10000.0, 1.0, "default"))
    if rope.share != 1.0:
        reader.unsupported("partial_rotary_factor", rope.share, [1.0])
    inner = reader.size("intermediate_size")
    latents: dict[str, Any] = {
        "q_lora_rank": (reader.size if indexes else reader.optional_size)(
            "q_lora_rank", default=kind.queries
        ),
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_head_dim": reader.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }
    # Derived sizes, which transformers 5 also writes.
    turned = latents["qk_pos_emb_head_dim"]
    refuse_shared_keys(reader, sizes["num_attention_heads"], kind.heads)
    reader.fixed("qk_head_dim", latents["qk_head_dim"] + turned)
    if kind.head_dim is None:
        reader.without_effect("head_dim")
    else:
        reader.fixed("head_dim", turned + latents["qk_head_dim"] * kind.head_dim)
    return ModelConfig(
        **sizes,
        **latents,
        ffn_hidden_size=inner,
        norm_epsilon=epsilon,
        latent_norm_epsilon=None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON,
        activation_func=activation(reader, "hidden_act", "silu"),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", kind.tied),
        attention_dropout=reader.number("attention_dropout", 0.0),
        multi_latent_attention=True,
        mtp_num_layers=predictions(reader) if kind.predicts else 0,
        **(kind.experts.read(reader, sizes["num_layers"]) if kind.experts is not None else {}),
        **rope.settings(),
        **(_indexer(reader, kind, sizes["num_layers"]) if indexes else {}),
    )


def _indexer(reader: Reader, kind: LatentLike, layers: int) -> dict[str, Any]:
    """DeepSeek Sparse Attention, whose loss no file tells."""
    listed = reader.texts("layer_types", ("indexed_attention",))
    if listed is not None:
        reader.has_each_layer("layer_types", listed, layers)
    if kind.shares:
        reader.fixed("indexer_rope_interleave", True)
        own = reader.texts("indexer_types", ("full",))
        if own is not None:
            reader.has_each_layer("indexer_types", own, layers)
        else:
            reader.fixed("index_topk_pattern", None, "F" * layers, ["full"] * layers)
            reader.fixed("index_topk_freq", 1, 0)
        reader.without_effect("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": reader.size("index_n_heads", default=kind.index_heads),
        "dsa_indexer_head_dim": reader.size("index_head_dim", default=128),
        "dsa_indexer_topk": reader.size("index_topk", default=2048),
    }


def write_latents(model: ModelConfig, kind: LatentLike = _THIRD) -> Fields:
    """Fields of a model that `read_latents` reads."""
    experts = kind.experts
    fields = {
        **size_fields(model),
        **rope_fields(model),
        **(experts.write(model) if experts is not None else {}),
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
    if kind.index_heads is not None:
        fields["index_n_heads"] = model.dsa_indexer_n_heads
        fields["index_head_dim"] = model.dsa_indexer_head_dim
        fields["index_topk"] = model.dsa_indexer_topk
    if experts is not None and experts.listed:
        fields["mlp_layer_types"] = written_sparse(model)
    if experts is not None:
        fields["topk_method"] = "noaux_tc"
    if kind.predicts:
        fields["num_nextn_predict_layers"] = model.prediction_sets
    return fields | {"rope_interleave": True}


_V2, _V3 = Tensors(DEEPSEEK_NAMES, pairs=True), Tensors(DEEPSEEK_NAMES, pairs=None, predicts=True)
_V32 = replace(_V3, pairs=True)


def _family(name: str, architecture: str, kind: LatentLike, tensors: Tensors) -> Family:
    return Family(
        name,
        architecture,
        partial(read_latents, kind=kind),
        partial(write_latents, kind=kind),
        tensors,
    )


FAMILIES = (
    _family("deepseek_v2", "DeepseekV2ForCausalLM", _SECOND, _V2),
    _family("deepseek_v3", "DeepseekV3ForCausalLM", _THIRD, _V3),
    _family("glm4_moe_lite", "Glm4MoeLiteForCausalLM", _LITE, _V3),
    _family("deepseek_v32", "DeepseekV32ForCausalLM", _SPARSE, _V32),
    _family("glm_moe_dsa", "GlmMoeDsaForCausalLM", _GLM5, replace(_V32, index_pairs=True)),
    Family("kimi_k2", "DeepseekV3ForCausalLM", read_latents, None, _V3),
)
