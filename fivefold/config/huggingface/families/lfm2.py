"""LFM2 (Liquid AI): gated short convolutions in place of attention in most layers; mixtures with
DeepSeek-V3's router, without groups."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from fivefold.config.huggingface.family import Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.grouped_experts import sigmoid_expert_fields, sigmoid_experts
from fivefold.config.huggingface.llama_like import LlamaLike, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import MAX_LAYERS, window_frequency
from fivefold.config.model import ModelConfig

_LFM2 = LlamaLike(
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    tied=True,
    heads="per_head",
    epsilon="norm_eps",
    null_key_value_heads=False,
    padded=True,
)


def _lfm2(reader: Reader) -> ModelConfig:
    reader.also(intermediate_size="block_ff_dim", tie_word_embeddings="tie_embedding")
    model = _with_convolutions(reader, _read(reader), _all_or_listed(reader))
    # Of published files, and transformers has no use for them.
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        reader.fixed(name, model.hidden_size)
    for name in ("block_use_swiglu", "use_pos_enc"):
        reader.fixed(name, True)
    reader.without_effect("block_norm_eps", "block_mlp_init_scale", "block_out_init_scale")
    reader.without_effect("block_use_xavier_init", "conv_use_xavier_init")
    return replace(model, ffn_hidden_size=_inner_size(reader, model.ffn_size))


def _read(reader: Reader) -> ModelConfig:
    """The model with attention in every layer."""
    model = _LFM2.read(reader)
    refuse_head_dim(reader, model)
    reader.fixed("hidden_act", "silu")
    reader.fixed("attention_dropout", 0.0)
    # Of published files, and transformers has no use for them.
    reader.fixed("num_heads", model.num_attention_heads)
    reader.fixed("theta", model.rotary_base)
    return model


def _mixture(reader: Reader) -> ModelConfig:
    """Experts in all layers but the first few."""
    reader.also(tie_word_embeddings="tie_embedding")
    model = _read(reader)
    layers = model.num_layers
    if reader.fields.get("layer_types") is None:
        why = "transformers cannot run the model without it"
        reader.unsupported("layer_types", None, [["full_attention"] * layers], why)
    model = _with_convolutions(reader, model, range(layers))
    read_balancing(reader)
    reader.fixed("norm_topk_prob", True, why="weights are of sigmoids")
    experts = sigmoid_experts(reader, layers, first=2, factor=_FACTOR)
    own = {
        "moe_router_enable_expert_bias": reader.flag("use_expert_bias", True),
        "moe_router_norm_epsilon": _EPSILON,
    }
    return replace(model, **(experts | own)) if experts else model


def _inner_size(reader: Reader, listed: int) -> int:
    """Two thirds of what is listed, times a factor, up to the next multiple; or just that."""
    unit = reader.size("block_multiple_of", default=256)
    factor = reader.number("block_ffn_dim_multiplier", 1.0)
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return listed
    part = int(2 * listed / 3)
    size = int(factor * part)
    if size < 1:
        name, value, works = "block_ffn_dim_multiplier", factor, 1.0
        if part < 1:
            name, value, works = "intermediate_size", listed, 2
        reader.unsupported(name, value, [works], "it leaves MLPs no features")
    return unit * ceil(size / unit)


def _all_or_listed(reader: Reader) -> Sequence[int]:
    """Layers with attention, where no list names what each has."""
    listed = reader.fields.get("full_attn_idxs") is not None
    reader.without_effect("full_attn_idxs")
    return reader.sizes("full_attn_idxs") if listed else range(MAX_LAYERS)


def _with_convolutions(reader: Reader, model: ModelConfig, whole: Sequence[int]) -> ModelConfig:
    """The same model with short convolutions in layers that are listed, or in all but these."""
    layers = model.num_layers
    reader.fixed("conv_bias", False)
    taps = reader.size("conv_L_cache", default=3)
    types = reader.texts("layer_types", ("full_attention", "conv"))
    if types is None:
        types = ["full_attention" if layer in whole else "conv" for layer in range(layers)]
    elif not reader.has_each_layer("layer_types", types, layers):
        return model
    convolves = [kind == "conv" for kind in types]
    if not any(convolves):
        return model
    if all(convolves):
        name = "layer_types" if reader.fields.get("layer_types") else "full_attn_idxs"
        works = [[*types[1:], "full_attention"] if name == "layer_types" else [layers - 1]]
        why = f"none of num_hidden_layers = {layers} has attention"
        reader.unsupported(name, reader.fields.get(name), works, why)
        return model
    return replace(
        model,
        experimental_attention_variant="short_convolution",
        linear_attention_freq=window_frequency(convolves),
        linear_conv_kernel_dim=taps,
    )


def _write_mixture(model: ModelConfig) -> Fields:
    fields = _write(model) | {
        **sigmoid_expert_fields(model, _FACTOR),
        "use_expert_bias": model.moe_router_enable_expert_bias,
        "norm_topk_prob": True,
    }
    del fields["block_auto_adjust_ff_dim"]
    return fields


def _write(model: ModelConfig) -> Fields:
    linear = [model.is_linear(layer) for layer in range(model.num_layers)]
    fields = _LFM2.write(model) | {
        "norm_eps": model.norm_epsilon,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": model.linear_conv_kernel_dim if any(linear) else 3,
        "layer_types": ["conv" if convolves else "full_attention" for convolves in linear],
    }
    del fields["rms_norm_eps"], fields["head_dim"]  # hidden_size / num_attention_heads
    return fields


_FACTOR = "routed_scaling_factor"
_EPSILON = 1e-6
"""Added to the sum by which transformers divides weights of experts."""
_MLP = {"gate": "w1", "up": "w3", "down": "w2"}
_NAMES: Names = {
    **{f".self_attn.{part}_norm.": f".self_attn.{part}_layernorm." for part in "qk"},
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".linear_attn.in_proj_xc.": ".conv.in_proj.",
    ".linear_attn.in_proj_b.": ".conv.in_proj.",
    ".linear_attn.conv1d.": ".conv.conv.",
    ".linear_attn.": ".conv.",
    ".input_layernorm.": ".operator_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".mlp.experts.": ".mlp.experts.{e}.",
    ".mlp.router.expert_bias": ".mlp.expert_bias",
    ".mlp.router.": ".mlp.gate.",
    **{f".{ours}_proj.": f".{theirs}." for ours, theirs in _MLP.items()},
    ".mlp.": ".feed_forward.",
}
_TENSORS = Tensors(_NAMES, last="embedding_norm.")
FAMILIES = (
    Family("lfm2", "Lfm2ForCausalLM", _lfm2, _write, _TENSORS),
    Family("lfm2_moe", "Lfm2MoeForCausalLM", _mixture, _write_mixture, _TENSORS),
)
