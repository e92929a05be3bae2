"""Arcee's Trinity (AFMoE): gated attention, with RoPE where it has windows; DeepSeek-V3's experts
without groups, beside one of all tokens."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import EACH, Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig

_AFMOE = LlamaLike(
    head_dim=128, rms_norm_eps=1e-5, norms="both", heads="per_head", windows=None, code=True
)


def _afmoe(reader: Reader) -> ModelConfig:
    model = _AFMOE.read(reader)
    window = reader.optional_size("sliding_window", default=1024, least=2)
    number = reader.size("global_attn_every_n_layers", default=4)
    slides = windows.listed(reader, model.num_layers)
    slides = slides or tuple((layer + 1) % number != 0 for layer in range(model.num_layers))
    if window is None:
        reader.unsupported("sliding_window", None, [1024], "layers without it have no RoPE")
    scaled = reader.flag("mup_enabled", False)
    return replace(
        model,
        attention_output_gate=True,
        embedding_multiplier=model.hidden_size**0.5 if scaled else 1.0,
        **windows.with_rope(reader, window, slides, 1024),
        **_experts(reader, model.num_layers),
    )


def _experts(reader: Reader, layers: int) -> dict[str, Any]:
    """ModelConfig settings of the experts, in all but the first layers."""
    read_balancing(reader)
    # Of published files, and transformers has no use for them.
    reader.without_effect("load_balance_coeff", "use_grouped_mm")
    for name in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        reader.fixed(name, 1)
    reader.fixed("route_norm", True)
    reader.fixed("score_func", "sigmoid")
    dense = reader.size("num_dense_layers", default=1, least=0)
    experts, inner = reader.size("num_experts"), reader.size("moe_intermediate_size")
    shared = reader.size("num_shared_experts", default=2, least=0)
    factor, topk = reader.number("route_scale", 1.0), reader.size("num_experts_per_tok")
    if dense >= layers:
        return {}
    refuse_one_expert(reader, topk)
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        "moe_router_enable_expert_bias": True,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": shared * inner or None,
        "moe_layer_freq": layer_frequency([layer >= dense for layer in range(layers)]),
    }


def _write(model: ModelConfig) -> Fields:
    sparse = [model.is_moe(layer) for layer in range(model.num_layers)]
    experts = {
        "num_experts": model.num_experts or 1,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "num_dense_layers": sparse.count(False),
        "route_scale": model.moe_router_topk_scaling_factor or 1.0,
        "mup_enabled": model.embedding_multiplier != 1.0,
    }
    return _AFMOE.write(model) | windows.fields(model) | experts


_NAMES: Names = {
    ".mlp.router.expert_bias": ".mlp.expert_bias",
    ".mlp.router.weight": ".mlp.router.gate.weight",
    ".post_attention_layernorm.": ".pre_mlp_layernorm.",
    ".post_self_attn_layernorm.": ".post_attention_layernorm.",
    **EACH,
}
FAMILIES = (
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        _afmoe,
        _write,
        Tensors(_NAMES, apart={"q_proj.": ("q_proj.", "gate_proj.")}),
    ),
)
