"""Mistral and Ministral; Ministral 3, whose attention gets hotter with the position; Mixtral's
experts; MiniMax-M2, whose router is DeepSeek-V3's without groups."""

from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope, sharpened_rope
from fivefold.config.model import ModelConfig


def _any_windows(reader: Reader, layers: int) -> dict[str, Any]:
    """A window in all layers, or in those that are listed."""
    width = windows.width_of(reader)
    if width is None:
        why = "transformers cannot run the model without one"
        reader.unsupported("sliding_window", None, [4096], why)
    return windows.settings(width, windows.listed(reader, layers) or (True,) * layers)


def _windows(reader: Reader, layers: int, default: int | None = 4096) -> dict[str, Any]:
    """A window, of which a list of layers may say the same."""
    width = windows.width_of(reader, default)
    slides, listed = (width is not None,) * layers, windows.listed(reader, layers)
    # transformers' MistralModel ignores the list; its AutoModel uses it.
    if listed is not None and listed != slides:
        reader.contradict({"layer_types": reader.fields["layer_types"], "sliding_window": width})
    return windows.settings(width, slides)


_MISTRAL = LlamaLike(num_key_value_heads=8, null_head_dim=True, windows=_windows)
_MINISTRAL8B = replace(_MISTRAL, null_head_dim=False, windows=_any_windows)


def _ministral(reader: Reader) -> ModelConfig:
    """Ministral 8B: Mistral's layers, of which some may have no window."""
    reader.size("head_dim")  # which transformers has no value for
    return _MINISTRAL8B.read(reader)


_MINISTRAL = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    null_head_dim=True,
    null_key_value_heads=False,
    windows=partial(_windows, default=None),
    rope=sharpened_rope,
)
_MIXTRAL = LlamaLike(
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    null_head_dim=True,
    windows=windows.everywhere,
)


def _write(model: ModelConfig, like: LlamaLike = _MISTRAL) -> Fields:
    return like.write(model) | {"sliding_window": windows.written_width(model.widest_window)}


def _write_ministral(model: ModelConfig) -> Fields:
    return with_temperature(_write(model, _MINISTRAL), model)


def with_temperature(fields: Fields, model: ModelConfig) -> Fields:
    """The same fields, and in their table of YaRN how attention gets hotter with the position."""
    if "rope_scaling" in fields:
        beta = model.attn_scale if model.attn_temperature_tuning else 0.0
        fields["rope_scaling"]["llama_4_scaling_beta"] = beta
    return fields


def _mixtral_experts(reader: Reader, model: ModelConfig) -> ModelConfig:
    """Experts in every layer, with normalised router weights."""
    read_balancing(reader)
    if reader.number("router_jitter_noise", 0.0):
        reader.left_out.append("noise on the router's input")
    return replace(
        model,
        num_experts=reader.size("num_local_experts", "num_experts"),
        moe_router_topk=reader.size("num_experts_per_tok"),
    )


def mixtral_fields(model: ModelConfig) -> Fields:
    """Of Mixtral's experts, in place of a dense model's MLPs."""
    return {
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "intermediate_size": model.expert_ffn_size,
    }


def _minimax_rope(reader: Reader, default: Rope) -> Rope:
    """RoPE of a share of each head, which rotary_dim says, if nothing else does."""
    turned, head = reader.optional_size("rotary_dim"), reader.size("head_dim", default=128)
    if turned is None:
        return read_rope(reader, default)
    if turned % 2 or turned > head:
        why = f"head_dim = {head}, of which RoPE turns pairs of features"
        reader.unsupported("rotary_dim", turned, [head - head % 2], why)
        return read_rope(reader, default)
    return read_rope(reader, replace(default, share=turned / head))


_MINIMAX = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    heads="all_heads",
    null_key_value_heads=False,
    rope=_minimax_rope,
    rounded=True,
)


def _minimax(reader: Reader) -> ModelConfig:
    model = _mixtral_experts(reader, _MINIMAX.read(reader))
    reader.fixed("scoring_func", "sigmoid")
    reader.fixed("use_routing_bias", True)
    reader.fixed("use_qk_norm", True)
    reader.fixed("qk_norm_type", "per_layer")
    reader.fixed("shared_intermediate_size", 0)
    reader.fixed("attn_type_list", [1] * model.num_layers)
    # Of MiniMax-01, and of multi-token prediction, whose weights are not published.
    reader.without_effect("layernorm_full_attention_beta", "layernorm_linear_attention_beta")
    reader.without_effect("layernorm_mlp_beta", "mlp_intermediate_size", "shared_moe_mode")
    reader.without_effect("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    refuse_one_expert(reader, model.moe_router_topk)
    return replace(model, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)


def _write_minimax(model: ModelConfig) -> Fields:
    fields = _MINIMAX.write(model) | mixtral_fields(model)
    return fields | {
        "rotary_dim": model.rotary_dim,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
    }


_MIXTRAL_NAMES: Names = {
    ".mlp.router.": ".block_sparse_moe.gate.",
    ".mlp.experts.gate_proj.": ".block_sparse_moe.experts.{e}.w1.",
    ".mlp.experts.down_proj.": ".block_sparse_moe.experts.{e}.w2.",
    ".mlp.experts.up_proj.": ".block_sparse_moe.experts.{e}.w3.",
}
_MINIMAX_NAMES = {
    ".mlp.router.expert_bias": ".block_sparse_moe.e_score_correction_bias",
    **_MIXTRAL_NAMES,
}
FAMILIES = (
    Family("mistral", "MistralForCausalLM", _MISTRAL.read, _write),
    Family(
        "ministral",
        "MinistralForCausalLM",
        _ministral,
        lambda model: _MINISTRAL8B.write(model) | windows.fields(model),
    ),
    Family("ministral3", "Ministral3ForCausalLM", _MINISTRAL.read, _write_ministral),
    Family(
        "mixtral",
        "MixtralForCausalLM",
        lambda reader: _mixtral_experts(reader, _MIXTRAL.read(reader)),
        lambda model: _write(model, _MIXTRAL) | mixtral_fields(model),
        Tensors(_MIXTRAL_NAMES),
    ),
    Family("minimax_m2", "MiniMaxM2ForCausalLM", _minimax, _write_minimax, Tensors(_MINIMAX_NAMES)),
)
