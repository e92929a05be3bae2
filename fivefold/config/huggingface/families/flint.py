"""Flint (RecursiveSI): sinks in every layer, RoPE where it has windows, experts by sigmoids."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.families.qwen import QWEN_MOE_NAMES
from fivefold.config.huggingface.family import Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig

_FLINT = LlamaLike(
    num_key_value_heads=4,
    head_dim=128,
    heads="per_head",
    null_key_value_heads=False,
    windows=None,
)


def _flint(reader: Reader) -> ModelConfig:
    model = _FLINT.read(reader)
    layers = model.num_layers
    whole = {0, 1, *range(1, layers, 4), layers - 1}
    slides = windows.listed(reader, layers) or tuple(n not in whole for n in range(layers))
    window = windows.needed(reader, slides, 513)
    return replace(
        model,
        softmax_type="learnable",
        **windows.with_rope(reader, window, slides, 513),
        **_experts(reader, layers),
    )


def _experts(reader: Reader, layers: int) -> dict[str, Any]:
    """ModelConfig settings of the experts, beside one of all tokens, after two dense layers."""
    read_balancing(reader)
    dense = {0, 1}
    if reader.fields.get("mlp_only_layers") is not None:
        dense = {*reader.sizes("mlp_only_layers")}
    reader.without_effect("mlp_only_layers")
    step = reader.size("decoder_sparse_step", default=1)
    experts, inner = (
        reader.size("num_experts", "num_local_experts"),
        reader.size("moe_intermediate_size"),
    )
    shared = reader.size("shared_expert_intermediate_size", default=1024)
    topk = reader.size("num_experts_per_tok")
    reader.fixed("norm_topk_prob", True, why="weights are of sigmoids")
    sparse = [n not in dense and (n + 1) % step == 0 for n in range(layers)]
    if not any(sparse):
        return {}
    refuse_one_expert(reader, topk)
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": shared,
        "moe_layer_freq": layer_frequency(sparse),
    }


def _write(model: ModelConfig) -> Fields:
    layers = range(model.num_layers)
    return (
        _FLINT.write(model)
        | windows.fields(model)
        | {
            "num_experts": model.num_experts or 1,
            "num_experts_per_tok": model.moe_router_topk,
            "moe_intermediate_size": model.expert_ffn_size,
            "shared_expert_intermediate_size": model.shared_ffn_size,
            "mlp_only_layers": [n for n in layers if not model.is_moe(n)],
            "norm_topk_prob": True,
        }
    )


_NAMES: Names = {
    ".self_attn.sinks.weight": ".self_attn.softmax_offset",
    **QWEN_MOE_NAMES,
}
FAMILIES = (Family("flint", "FlintForCausalLM", _flint, _write, Tensors(_NAMES)),)
