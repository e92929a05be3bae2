"""Arcee's Trinity (AFMoE): gated attention, with RoPE where it has windows; DeepSeek-V3's experts
without groups, beside one of all tokens."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import EACH, Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.grouped_experts import sigmoid_expert_fields, sigmoid_experts
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
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
    shared = reader.size("num_shared_experts", default=2, least=0)
    found = sigmoid_experts(reader, layers, first=1, factor="route_scale")
    if not found:
        return {}
    return found | {
        "moe_shared_expert_intermediate_size": shared * found["moe_ffn_hidden_size"] or None
    }


def _write(model: ModelConfig) -> Fields:
    experts = sigmoid_expert_fields(model, "route_scale") | {
        "num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
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
