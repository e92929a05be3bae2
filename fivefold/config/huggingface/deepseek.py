"""DeepSeek-V2, V3 and Kimi-K2: latent attention, dense first layers, shared experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.llama import activation, transformer_sizes
from fivefold.config.huggingface.mixtures import read_balancing
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope
from fivefold.config.layer_pattern import MAX_LAYERS, layer_frequency
from fivefold.config.model import ModelConfig

# Router defaults where a config.json does not give them.
_V2: Mapping[str, Any] = MappingProxyType(
    {
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": None,
        "topk_group": None,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    }
)
_V3: Mapping[str, Any] = MappingProxyType(
    {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
    }
)


def deepseek(reader: Reader, kind: str) -> ModelConfig:
    """The model; heads share one rotary key, and adjacent rotary features are paired."""
    second = kind == "deepseek_v2"
    sizes = transformer_sizes(reader)
    read_stored_weights(reader, published=True)
    read_balancing(reader)
    reader.without_effect("aux_loss_alpha", "seq_aux", "ep_size")
    reader.fixed("attention_bias", False)
    reader.fixed("mlp_bias", False)
    # The order in which weights are stored; the computation is the same. Null is false.
    reader.fixed("rope_interleave", True, False, None)
    # transformers normalises latents with this epsilon, whatever the file says.
    reader.fixed("rms_norm_eps", 1e-6)
    rope = read_rope(reader, Rope(10000.0, 1.0, "default"), leave_out=True, latents=True)
    if rope.share != 1.0:
        reader.unsupported("partial_rotary_factor", rope.share, [1.0])
    inner = reader.size("intermediate_size")
    latents: dict[str, Any] = {
        "q_lora_rank": reader.optional_size("q_lora_rank", default=1536),
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_head_dim": reader.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }
    # Derived sizes, which transformers 5 also writes.
    turned = latents["qk_pos_emb_head_dim"]
    heads, default = sizes["num_attention_heads"], None if second else 128
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
        norm_epsilon=1e-6,
        activation_func=activation(reader, "hidden_act", "silu"),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        attention_dropout=reader.number("attention_dropout", 0.0),
        multi_latent_attention=True,
        mtp_num_layers=0 if second else _predictions(reader),
        **_experts(reader, second, sizes["num_layers"]),
        **rope.settings(),
    )


def _predictions(reader: Reader) -> int:
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return reader.size(*names, default=1, least=0, most=MAX_LAYERS)


def _experts(reader: Reader, second: bool, layers: int) -> dict[str, Any]:
    """Settings of the experts; empty for a model without."""
    family = _V2 if second else _V3
    experts = reader.optional_size("n_routed_experts", "num_experts", "num_local_experts")
    names = ("greedy", "group_limited_greedy") if second else ("noaux_tc",)
    method = reader.text("topk_method", default=family["topk_method"], choices=names)
    scores = family["scoring_func"]
    reader.fixed("scoring_func", scores)
    reader.fixed("norm_topk_prob", family["norm_topk_prob"])
    factor = reader.number("routed_scaling_factor", family["routed_scaling_factor"])
    size = reader.optional_size if second else reader.size
    counts = {name: size(name, default=family[name]) for name in ("n_group", "topk_group")}
    first = reader.size("first_k_dense_replace", default=family["first_k_dense_replace"], least=0)
    shared = reader.optional_size("n_shared_experts", default=family["n_shared_experts"], least=0)
    inner, topk = reader.size("moe_intermediate_size"), reader.size("num_experts_per_tok")
    reader.fixed("moe_layer_freq", 1)
    if experts is None or first >= layers:
        return {}
    if topk == 1 and not second:
        reader.unsupported("num_experts_per_tok", topk, [2], "its weight would be normalised to 1")
    if method == "group_limited_greedy":
        for name in (name for name, count in counts.items() if count is None):
            reader.unsupported(name, None, [1], f'topk_method = "{method}" needs it')
    groups, chosen = (count or 1 for count in counts.values())
    grouped = method != "greedy" and chosen < groups
    return {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_router_num_groups": groups if grouped else None,
        "moe_router_group_topk": chosen if grouped else None,
        "moe_router_group_scores": (1 if second else 2) if grouped else None,
        "moe_router_score_function": scores,
        "moe_router_pre_softmax": second,
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        "moe_router_enable_expert_bias": not second,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": (shared or 0) * inner or None,
        "moe_layer_freq": layer_frequency([layer >= first for layer in range(layers)]),
    }
