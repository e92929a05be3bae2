"""OLMo 1, whose norms have no weights; OLMo 2 and 3, OLMoE and FlexOlmo: all query heads normalised
together, and all key heads."""

from dataclasses import replace
from functools import partial

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.families.mistral import mixtral_fields
from fivefold.config.huggingface.families.qwen import QWEN_MOE_NAMES
from fivefold.config.huggingface.family import AFTER, Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import LlamaLike, attention_biases, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, rope_by_layer
from fivefold.config.huggingface.rope_tables import written_tables
from fivefold.config.model import ModelConfig

_OLMO = LlamaLike(rms_norm_eps=1e-5, biases=attention_biases, padded=True)
_OLMOE = LlamaLike(rms_norm_eps=1e-5, heads="all_heads", padded=True)
_OLMO2 = replace(_OLMOE, norms="after")
_FLEX = replace(_OLMO2, rms_norm_eps=1e-6, rope_theta=5e5)
_OLMO3 = replace(_OLMO2, windows=None, rope=None)
_BASE = 500000.0
"""Of RoPE in OLMo 3, unless its tables say another."""


def _olmo(reader: Reader) -> ModelConfig:
    """OLMo 1 and 1.7: LayerNorm without weights, and bounds of queries, keys and values."""
    model = _OLMO.read(reader)
    reader.fixed("rms_norm_eps", 1e-5, why="transformers takes no notice of it in this family")
    return replace(
        model,
        normalization="LayerNorm",
        norm_elementwise_affine=False,
        clip_qkv=_bound(reader),
    )


def _write_olmo(model: ModelConfig) -> Fields:
    fields = _OLMO.write(model)
    del fields["rms_norm_eps"]
    return fields | {"attention_bias": model.output_bias, "clip_qkv": model.clip_qkv}


def _bound(reader: Reader) -> float | None:
    most = reader.number_or_null("clip_qkv", None)
    if most is not None and most <= 0.0:
        reader.unsupported("clip_qkv", most, [None], "it is the largest number that is left")
        return None
    return most


def _olmo3(reader: Reader) -> ModelConfig:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose RoPE is not scaled."""
    model = _OLMO3.read(reader)
    slides = windows.listed(reader, model.num_layers)
    slides = slides or tuple((layer + 1) % 4 != 0 for layer in range(model.num_layers))
    if reader.fields.get("rope_parameters") is None:
        why = f"transformers 5 gives layers with a window {_BASE:.0f}, whatever stands here"
        reader.fixed("rope_theta", _BASE, why=why)
    rope, base = rope_by_layer(reader, Rope(_BASE, 1.0, "default"), _BASE)
    return replace(model, **windows.beside_rope(reader, slides, rope, base))


def _write_olmo3(model: ModelConfig) -> Fields:
    """Other bases than the usual one are in tables, which transformers 4 does not read."""
    fields = _OLMO3.write(model) | windows.fields(model)
    local = model.rotary_base_local or model.rotary_base
    return fields if {model.rotary_base, local} == {_BASE} else written_tables(model, fields)


def _olmoe(reader: Reader) -> ModelConfig:
    """OLMoE: experts in every layer, weighted by a softmax over all of them."""
    return replace(_mixture(reader, _OLMOE, experts=64, chosen=8), clip_qkv=_bound(reader))


def _flex(reader: Reader) -> ModelConfig:
    """FlexOlmo: OLMo 2 with OLMoE's experts."""
    return _mixture(reader, _FLEX, experts=7, chosen=5)


def _mixture(reader: Reader, like: LlamaLike, *, experts: int, chosen: int) -> ModelConfig:
    model = like.read(reader)
    read_balancing(reader)
    refuse_head_dim(reader, model, "norms there have hidden_size features of queries")
    return replace(
        model,
        num_experts=reader.size("num_experts", "num_local_experts", default=experts),
        moe_router_topk=reader.size("num_experts_per_tok", default=chosen),
        moe_router_pre_softmax=not reader.flag("norm_topk_prob", False),
    )


def _write_mixture(model: ModelConfig, like: LlamaLike) -> Fields:
    normalised = {"norm_topk_prob": not model.moe_router_pre_softmax}
    return like.write(model) | mixtral_fields(model) | normalised


def _write_olmoe(model: ModelConfig) -> Fields:
    return _write_mixture(model, _OLMOE) | {"clip_qkv": model.clip_qkv}


FAMILIES = (
    Family("olmo", "OlmoForCausalLM", _olmo, _write_olmo),
    Family("olmo2", "Olmo2ForCausalLM", _OLMO2.read, _OLMO2.write, Tensors(AFTER)),
    Family(
        "olmo3",
        "Olmo3ForCausalLM",
        _olmo3,
        _write_olmo3,
        Tensors(AFTER),
    ),
    Family(
        "olmoe",
        "OlmoeForCausalLM",
        _olmoe,
        _write_olmoe,
        Tensors(QWEN_MOE_NAMES),
    ),
    Family(
        "flex_olmo",
        "FlexOlmoForCausalLM",
        _flex,
        partial(_write_mixture, like=_FLEX),
        Tensors({**QWEN_MOE_NAMES, **AFTER}),
    ),
)
