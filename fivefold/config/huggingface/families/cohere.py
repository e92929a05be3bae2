"""Cohere's Command R, and mixtures: attention and MLP read one norm without bias, side by side."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import EACH, Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.grouped_experts import listed_sparse, written_sparse
from fivefold.config.huggingface.llama_like import LlamaLike, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, whole_head_rope
from fivefold.config.layer_pattern import layer_frequency, unrotated_frequency
from fivefold.config.model import ModelConfig

_COHERE2 = LlamaLike(
    rms_norm_eps=1e-5, tied=True, epsilon="layer_norm_eps", windows=None, padded=True
)


def _unscaled(reader: Reader, default: Rope) -> Rope:
    """The base of RoPE, of which transformers takes a table as it is, or no notice."""
    reader.fixed("rope_scaling", None, why="transformers takes no notice of it in this family")
    table = reader.fields.get("rope_parameters", {"rope_theta": default.theta})
    if not isinstance(table, dict) or "rope_theta" not in table:
        why = "transformers cannot run the model without rope_theta in it"
        reader.unsupported("rope_parameters", table, [{"rope_theta": default.theta}], why)
    return whole_head_rope(reader, default, scalings=("default",))


_COHERE2_MOE = replace(_COHERE2, head_dim=128, rope=_unscaled)
_COHERE = replace(_COHERE2, rope_theta=500000.0, windows=windows.none)


def _cohere(reader: Reader) -> ModelConfig:
    """Command R, of which those that normalise heads give each head weights of its own."""
    reader.fixed("use_qk_norm", False, None, why="each head would have weights of its own")
    model = _side_by_side(reader, _COHERE)
    refuse_head_dim(reader, model)
    return model


def _cohere2(reader: Reader) -> ModelConfig:
    """Command R7B and Command A: windows in three of four layers, and RoPE in these alone."""
    # Of files that are older than transformers' class, which has no use for these.
    reader.fixed("position_embedding_type", "rope_gptj")
    reader.fixed("order_of_interleaved_layers", "local_attn_first")
    reader.fixed("layer_switch", reader.fields.get("sliding_window_pattern", 4))
    reader.fixed("rotary_pct", 1.0)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        reader.fixed(name, True)
    reader.fixed("use_parallel_embedding", False)
    reader.without_effect("cache_implementation")
    model = _side_by_side(reader, _COHERE2)
    refuse_head_dim(reader, model)
    slides = windows.all_but_every(reader, 4, model.num_layers)
    window = windows.needed(reader, slides)
    return replace(model, **windows.with_rope(reader, window, slides, 4096))


def _cohere2_moe(reader: Reader) -> ModelConfig:
    """Experts, after layers with MLPs, in which RoPE may be without a window, too."""
    model = _side_by_side(reader, _COHERE2_MOE)
    layers, dense = model.num_layers, reader.size("first_k_dense_replace", default=0, least=0)
    sparse = listed_sparse(reader, layers) or [layer >= dense for layer in range(layers)]
    first = reader.size("prefix_dense_sliding_window_pattern", default=1)
    every = reader.size("sliding_window_pattern", default=4)
    slides = windows.listed(reader, layers) or tuple(
        (n + 1) % first != 0 if n < dense else (n - dense + 1) % every != 0 for n in range(layers)
    )
    window = windows.needed(reader, slides)
    without = [not slides[n] and (sparse[n] or first != 1) for n in range(layers)]
    if all(without):
        reader.unsupported("layer_types", None, [["sliding_attention"] * layers], "none has RoPE")
        without = [False] * layers
    inner = reader.optional_size("prefix_dense_intermediate_size", default=None)
    if reader.fields.get("rms_norm_eps") is not None:
        epsilon = reader.number("rms_norm_eps", 1e-5)
        model = replace(model, normalization="RMSNorm", layernorm_bias=True, norm_epsilon=epsilon)
    reader.without_effect("rms_norm_eps")
    return replace(
        model,
        no_rope_freq=unrotated_frequency(without) if any(without) else None,
        **windows.settings(window, slides),
        **_experts(reader, model.ffn_size, sparse),
        ffn_hidden_size=inner or model.ffn_size,
    )


def _experts(reader: Reader, inner: int, sparse: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings of experts, and of those of all tokens."""
    read_balancing(reader)
    shared = reader.size("num_shared_experts", default=0, least=0)
    average = reader.text(
        "shared_expert_combination_strategy", default="average", choices=("average", "sum")
    )
    if shared and average == "average":
        why = f"what both kinds of experts make is added here, and num_shared_experts is {shared}"
        reader.unsupported("shared_expert_combination_strategy", "average", ["sum"], why)
    scores = reader.text("expert_selection_fn", default="softmax", choices=("softmax", "sigmoid"))
    normalised = reader.flag("norm_topk_prob", True)
    topk = reader.size("num_experts_per_tok", default=2)
    experts = reader.size("num_experts", default=8)
    if not any(sparse):
        return {}
    if scores == "sigmoid":
        refuse_one_expert(reader, topk)
        if not normalised:
            reader.unsupported("norm_topk_prob", False, [True], "weights are of sigmoids")
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_score_function": scores or "softmax",
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": shared * inner or None,
        "moe_layer_freq": layer_frequency(sparse),
    }


def _side_by_side(reader: Reader, like: LlamaLike) -> ModelConfig:
    model = like.read(reader)
    reader.without_effect("model_max_length")  # of the tokenizer
    scale = reader.number("logit_scale", 0.0625)
    if scale <= 0:
        reader.unsupported("logit_scale", scale, [0.0625])
        scale = 1.0
    return replace(
        model,
        normalization="LayerNorm",
        layernorm_bias=False,
        parallel_residual=True,
        parallel_residual_one_norm=True,
        logits_scaling=1.0 / scale,
    )


def _write(model: ModelConfig) -> Fields:
    fields = _COHERE.write(model)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    fields["logit_scale"] = 1.0 / model.logits_scaling
    del fields["head_dim"]  # hidden_size / num_attention_heads
    return fields


def _write_mixture(model: ModelConfig) -> Fields:
    inner, sparse = model.expert_ffn_size, written_sparse(model)
    turned = [model.rotates(n) for n in range(model.num_layers) if sparse[n] == "dense"]
    return (
        _write(model)
        | windows.fields(model)
        | {
            "head_dim": model.head_dim,
            "rms_norm_eps": model.norm_epsilon if model.normalization == "RMSNorm" else None,
            "intermediate_size": inner,
            "prefix_dense_intermediate_size": model.ffn_size,
            "prefix_dense_sliding_window_pattern": 1 if all(turned) else 2,
            "mlp_layer_types": sparse,
            "num_experts": model.num_experts or 8,
            "num_experts_per_tok": model.moe_router_topk,
            "num_shared_experts": model.shared_ffn_size // inner,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": model.moe_router_score_function,
        }
    )


_TENSORS = Tensors(pairs=True)
FAMILIES = (
    Family("cohere", "CohereForCausalLM", _cohere, _write, _TENSORS),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        _cohere2,
        lambda model: _write(model) | windows.fields(model),
        _TENSORS,
    ),
    Family(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        _cohere2_moe,
        _write_mixture,
        Tensors({".mlp.router.": ".mlp.gate.", **EACH}, pairs=True),
    ),
)
