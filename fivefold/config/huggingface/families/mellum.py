"""Mellum 2: Qwen3's experts in some layers or all, windows in layers with a RoPE of their own."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.families.qwen import (
    QWEN_MOE_NAMES,
    expert_sizes,
    qwen_expert_fields,
)
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.grouped_experts import listed_sparse, written_sparse
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope
from fivefold.config.huggingface.rope_tables import rope_tables, written_tables
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig

_MELLUM = LlamaLike(num_key_value_heads=4, head_dim=128, heads="per_head", windows=None, rope=None)


def _mellum(reader: Reader) -> ModelConfig:
    model = _MELLUM.read(reader)
    layers = model.num_layers
    slides = windows.listed(reader, layers) or (False,) * layers
    model = replace(
        model,
        **windows.settings(windows.needed(reader, slides, 1024), slides),
        **rope_tables(reader, Rope(500000.0, 1.0, "default"), 10000.0, slides),
    )
    read_balancing(reader)
    # Of multi-token prediction, which transformers makes for generation alone.
    reader.without_effect("num_mtp_layers", "num_nextn_predict_layers")
    reader.without_effect("mtp_layer_types", "mtp_mlp_layer_types")
    sparse = listed_sparse(reader, layers) or [True] * layers
    experts = expert_sizes(reader, normalised=True)
    if not any(sparse):
        return model
    return replace(model, **experts, moe_layer_freq=layer_frequency(sparse))


def _write(model: ModelConfig) -> Fields:
    fields = _MELLUM.write(model) | windows.fields(model)
    if model.num_experts is not None:
        fields |= qwen_expert_fields(model)
        del fields["mlp_only_layers"], fields["decoder_sparse_step"]
    fields |= {"mlp_layer_types": written_sparse(model)}
    return written_tables(model, fields)


FAMILIES = (
    Family(
        "mellum",
        "MellumForCausalLM",
        _mellum,
        _write,
        Tensors(QWEN_MOE_NAMES, left_out=("mtp.",)),
    ),
)
