"""Granite 4's dense models, in files of the family that also has Mamba layers and experts."""

from dataclasses import replace

from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama import llama_like
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def granite_hybrid(reader: Reader, kind: str) -> ModelConfig:
    """Those with attention in every layer (Micro, and the small ones): Granite 3's layers."""
    model = llama_like(reader, kind)
    read_balancing(reader)
    names = "layer_types", "layers_block_type"
    types = next(filter(None, [reader.texts(name, _ATTENTION) for name in names]), None)
    if types is None:
        why = "transformers gives all layers Mamba, which there is none of here"
        reader.unsupported("layer_types", None, [["attention"] * model.num_layers], why)
    elif len(types) != model.num_layers:
        counts = f"{len(types)} entries, num_hidden_layers is {model.num_layers}"
        reader.mistakes.add(f"layer_types must have one entry a layer: {counts}")
    if reader.fields.get("num_local_experts") != 0:
        told = reader.fields.get("num_local_experts", 8)
        reader.unsupported("num_local_experts", told, [0], "granitemoeshared has experts")
    if (position := reader.fields.get("position_embedding_type")) != "rope":
        why = "layers without RoPE would know no positions"
        reader.unsupported("position_embedding_type", position, ["rope"], why)
    reader.without_effect("num_local_experts", "num_experts_per_tok", "position_embedding_type")
    reader.without_effect(*_OF_MAMBA, "init_method")
    reader.fixed("normalization_function", "rmsnorm")
    return replace(model, ffn_hidden_size=reader.size("shared_intermediate_size", default=1024))


_ATTENTION = "attention", "full_attention"
_OF_MAMBA = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)
