"""Hunyuan (Tencent): heads normalised after RoPE, whose base is raised once and for all; Hunyuan 3,
with DeepSeek-V3's router."""

from dataclasses import replace

from fivefold.config.huggingface.family import EACH, Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing, refuse_one_expert
from fivefold.config.huggingface.grouped_experts import listed_sparse, written_sparse
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, raised_rope
from fivefold.config.layer_pattern import layer_frequency
from fivefold.config.model import ModelConfig


def _rope(reader: Reader, default: Rope) -> Rope:
    return raised_rope(reader, default, reader.size("head_dim"))


_HUNYUAN = LlamaLike(rms_norm_eps=1e-5, heads="per_head", rope=_rope, code=True)


def _dense(reader: Reader) -> ModelConfig:
    """The dense models (0.5B to 7B, Hunyuan-MT)."""
    model = _HUNYUAN.read(reader)
    # Of the published files, which transformers has no use for.
    reader.fixed("attention_head_dim", model.head_dim)
    for name in ("use_qk_norm", "use_rotary_pos_emb"):
        reader.fixed(name, True)
    for name in ("use_cla", "add_classification_head", "position_embedding_xdrope"):
        reader.fixed(name, False)
    reader.fixed("norm_type", "rms", "hf_rms")
    reader.without_effect("cla_share_factor", "class_num", "dense_list", "pool_type", *_TOKENS)
    return replace(model, qk_layernorm_after_rope=True)


def _mixture(reader: Reader) -> ModelConfig:
    """Hunyuan-A13B: experts in every layer, and one of all tokens."""
    model = _dense(reader)
    read_balancing(reader)
    layers, inner = model.num_layers, model.ffn_size
    reader.fixed("moe_intermediate_size", inner, [inner] * layers)
    reader.fixed("num_shared_expert", 1, [1] * layers)
    reader.fixed("use_mixed_mlp_moe", True)
    reader.fixed("norm_topk_prob", True)
    reader.fixed("moe_layer_num_skipped", 0)
    reader.without_effect("capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token")
    return replace(
        model,
        num_experts=reader.size("num_experts", "num_local_experts"),
        moe_router_topk=_topk(reader, layers),
        moe_shared_expert_intermediate_size=inner,
    )


def _topk(reader: Reader, layers: int) -> int:
    """Experts of a token: a number, or a list with the same one for each layer."""
    name = "num_experts_per_tok" if "num_experts_per_tok" in reader.fields else "moe_topk"
    listed = reader.fields.get(name)
    if not isinstance(listed, list):
        return reader.size("moe_topk", "num_experts_per_tok", default=1)
    chosen = reader.sizes(name)
    if len(chosen) < layers or len({*chosen[:layers]}) != 1 or not chosen[0]:
        usual = chosen[0] if chosen and chosen[0] else 1
        reader.unsupported(name, listed, [[usual] * layers], "all layers choose as many here")
        return 1
    reader.fixed("num_experts_per_tok", listed)
    reader.fixed("moe_topk", listed)
    return chosen[0]


_TOKENS = (
    *("eod_token_id", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "image_token_id"),
    *("text_start_id", "text_end_id", "mask_init_id", "org_vocab_size"),
)


def _write_mixture(model: ModelConfig) -> Fields:
    return _HUNYUAN.write(model) | {
        "num_experts": model.num_experts,
        "moe_topk": model.moe_router_topk,
        "intermediate_size": model.expert_ffn_size,
    }


_HUNYUAN3 = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=11158840.0,
    heads="per_head",
    null_key_value_heads=False,
)


def _third(reader: Reader) -> ModelConfig:
    """Hunyuan 3: a dense layer, then experts that a sigmoid chooses, and some of all tokens."""
    model = _HUNYUAN3.read(reader)
    model = replace(model, init_method_std=reader.number("initializer_range", 0.006))
    read_balancing(reader)
    reader.without_effect("enable_moe_fp32_combine")  # how sums are rounded
    inner, topk = reader.size("moe_intermediate_size"), reader.size("num_experts_per_tok")
    refuse_one_expert(reader, topk)
    listed = listed_sparse(reader, model.num_layers)
    sparse = [layer > 0 for layer in range(model.num_layers)] if listed is None else listed
    experts = reader.size("num_experts", "num_local_experts", default=192)
    shared = reader.size("num_shared_experts", default=1)
    scale = reader.number("router_scaling_factor", 2.826)
    if not any(sparse):
        return model
    return replace(
        model,
        num_experts=experts,
        moe_router_topk=topk,
        moe_ffn_hidden_size=inner,
        moe_shared_expert_intermediate_size=shared * inner,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=None if scale == 1.0 else scale,
        moe_layer_freq=layer_frequency(sparse),
    )


def _write_third(model: ModelConfig) -> Fields:
    return _HUNYUAN3.write(model) | {
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_router_topk,
        "moe_intermediate_size": model.expert_ffn_size,
        "num_shared_experts": model.shared_ffn_size // model.expert_ffn_size,
        "router_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "mlp_layer_types": written_sparse(model),
    }


_NAMES: Names = {
    ".self_attn.q_norm.": ".self_attn.query_layernorm.",
    ".self_attn.k_norm.": ".self_attn.key_layernorm.",
}
_OF_EXPERTS = {".mlp.router.": ".mlp.gate.wg.", ".mlp.shared_experts.": ".mlp.shared_mlp.", **EACH}
_DENSE, _MOE = Tensors(_NAMES), Tensors({**_OF_EXPERTS, **_NAMES})
_THIRD = Tensors(
    {
        ".mlp.router.expert_bias": ".mlp.expert_bias",
        ".mlp.router.": ".mlp.router.gate.",
        ".mlp.shared_experts.": ".mlp.shared_mlp.",
        **EACH,
    }
)
FAMILIES = (
    Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", _dense, _HUNYUAN.write, _DENSE),
    Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", _mixture, _write_mixture, _MOE),
    Family("hy_v3", "HYV3ForCausalLM", _third, _write_third, _THIRD),
)
