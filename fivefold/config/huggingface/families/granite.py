"""Granite 3 and 4: Llama's layers, or Mixtral's experts, with factors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.comparing import softmax_scale
from fivefold.config.huggingface.families.mistral import mixtral_fields
from fivefold.config.huggingface.family import SINKS, TOGETHER, Family, Fields, Names, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import (
    LlamaLike,
    bias_fields,
    both_biases,
    refuse_head_dim,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import unrotated_frequency
from fivefold.config.model import ModelConfig

_MIXTURE = LlamaLike()  # whose attention_bias would affect attention alone
_DENSE = replace(_MIXTURE, biases=both_biases)
_FACTORS = "embedding_multiplier", "residual_multiplier", "logits_scaling"


def _granite(reader: Reader, like: LlamaLike = _DENSE) -> ModelConfig:
    """The dense models; a missing factor is 1, that of scores, too."""
    factors: dict[str, Any] = {name: reader.number(name, 1.0) for name in _FACTORS}
    factors["softmax_scale"] = reader.number("attention_multiplier", 1.0)
    return replace(like.read(reader), **factors)


def _mixture(reader: Reader, *, shared: bool = False) -> ModelConfig:
    """Mixtral's experts; or also an expert of all tokens."""
    return _with_experts(reader, _granite(reader, _MIXTURE), shared=shared)


def _with_experts(reader: Reader, model: ModelConfig, *, shared: bool) -> ModelConfig:
    read_balancing(reader)
    size = reader.size("shared_intermediate_size", default=0, least=0) if shared else 0
    return replace(
        model,
        moe_shared_expert_intermediate_size=size or None,
        num_experts=reader.size("num_local_experts", "num_experts", default=8),
        moe_router_topk=reader.size("num_experts_per_tok", default=2),
    )


def _hybrid(reader: Reader) -> ModelConfig:
    """Granite 4 in files of the family that also has Mamba layers and experts: those with attention
    in every layer (Micro, and the small ones), which are Granite 3's."""
    model = _granite(reader, _MIXTURE)
    read_balancing(reader)
    names = "layer_types", "layers_block_type"
    types = next(filter(None, [reader.texts(name, _ATTENTION) for name in names]), None)
    if types is None:
        why = "transformers gives all layers Mamba, which there is none of here"
        reader.unsupported("layer_types", None, [["attention"] * model.num_layers], why)
    else:
        reader.has_each_layer("layer_types", types, model.num_layers)
    if reader.fields.get("num_local_experts") != 0:
        count = reader.fields.get("num_local_experts", 8)
        reader.unsupported("num_local_experts", count, [0], "granitemoeshared has experts")
    if (position := reader.fields.get("position_embedding_type")) != "rope":
        why = "layers without RoPE would know no positions"
        reader.unsupported("position_embedding_type", position, ["rope"], why)
    reader.without_effect("num_local_experts", "num_experts_per_tok", "position_embedding_type")
    reader.without_effect(*_OF_MAMBA, "init_method")
    reader.fixed("normalization_function", "rmsnorm")
    return replace(model, ffn_hidden_size=reader.size("shared_intermediate_size", default=1024))


_SINKS = replace(_DENSE, num_key_value_heads=4, rms_norm_eps=1e-5, tied=True, windows=None)
_SINKS_MIXTURE = replace(_MIXTURE, windows=None)


def _sinks_mixture(reader: Reader) -> ModelConfig:
    return _with_experts(reader, _sinks(reader, _SINKS_MIXTURE), shared=True)


def _sinks(reader: Reader, like: LlamaLike = _SINKS) -> ModelConfig:
    """Granite with sinks in every layer, and windows in three of four; RoPE may have a base in
    those and another one in the rest, or be in either alone."""
    model = _granite(reader, like)
    layers = model.num_layers
    listed = windows.listed(reader, layers)
    slides = listed or tuple(layer % 4 != 0 for layer in range(layers))
    window = windows.settings(windows.needed(reader, slides, 128), slides)
    return replace(model, softmax_type="learnable", **window, **_bases(reader, model, slides))


def _bases(reader: Reader, model: ModelConfig, slides: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings for `layer_rope_theta`: of each layer a base, or 0 for no RoPE."""
    name, layers = "layer_rope_theta", len(slides)
    if reader.fields.get(name) is None:
        reader.without_effect(name)
        return {}
    bases = reader.numbers(name)
    if not reader.has_each_layer(name, bases, layers):
        return {}
    each = list(zip(bases, slides, strict=True))
    whole, local = (
        {base for base, slide in each if base and slide is has} for has in (False, True)
    )
    works = [[model.rotary_base] * layers]
    stretched = model.use_rope_scaling or model.rope_type != "rope"
    scaled = stretched or model.rotary_seq_len_interpolation_factor is not None
    if not whole | local or max(len(whole), len(local)) > 1:
        why = "layers with a window have one base, and those without have one; not all are 0"
        reader.unsupported(name, list(bases), works, why)
        return {}
    base, other = (*whole, *local)[0], (*local, *whole)[0]
    if other != base and scaled:
        reader.unsupported(name, list(bases), works, "scaled positions have one base")
    without = [not base for base in bases]
    return {
        "rotary_base": base,
        "rotary_base_local": None if other == base else other,
        "no_rope_freq": unrotated_frequency(without) if any(without) else None,
    }


_HYPERCLOVAX = replace(_DENSE, null_head_dim=True, code=True)


def _hyperclovax(reader: Reader) -> ModelConfig:
    """HyperCLOVA X SEED: norms before and after attention and MLP; logits are multiplied."""
    post = reader.flag("use_post_norm", True)
    model = _granite(reader, replace(_HYPERCLOVAX, norms="both" if post else "before"))
    refuse_head_dim(reader, model)
    # Of files that are older than transformers' class, which has no use for these.
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        reader.fixed(name, 0.0)
    reader.without_effect("end_token_id", "summary_first_dropout")
    if "attention_multiplier" not in reader.fields:
        model = replace(model, softmax_scale=None)
    if model.logits_scaling <= 0:
        reader.unsupported("logits_scaling", model.logits_scaling, [1.0])
        return model
    return replace(model, logits_scaling=1.0 / model.logits_scaling)


def _write_hyperclovax(model: ModelConfig) -> Fields:
    return (_write(model) | bias_fields(model)) | {
        "logits_scaling": 1.0 / model.logits_scaling,
        "use_post_norm": model.norm_placement == "both",
    }


def _write(model: ModelConfig) -> Fields:
    factors = {name: getattr(model, name) for name in _FACTORS}
    return _MIXTURE.write(model) | factors | {"attention_multiplier": softmax_scale(model)}


def _write_sinks(model: ModelConfig) -> Fields:
    local = model.rotary_base_local or model.rotary_base
    bases = [
        (model.rotary_base if model.window_of(layer) is None else local) * model.rotates(layer)
        for layer in range(model.num_layers)
    ]
    return windows.fields(model) | {"layer_rope_theta": bases}


def _write_mixture(model: ModelConfig) -> Fields:
    return _write(model) | mixtral_fields(model)


def _write_shared(model: ModelConfig) -> Fields:
    return _write_mixture(model) | {"shared_intermediate_size": model.shared_ffn_size}


_ATTENTION = "attention", "full_attention"
_OF_MAMBA = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)


def _joint(ours: str, theirs: str) -> Names:
    """Gate and up in one linear layer."""
    names = {f".{ours}.{part}_proj.": f".{theirs}.input_linear." for part in ("gate", "up")}
    return names | {f".{ours}.down_proj.": f".{theirs}.output_linear."}


_NAMES: Names = {
    ".mlp.router.": ".block_sparse_moe.router.layer.",
    **_joint("mlp.experts", "block_sparse_moe"),
}
_SHARED: Names = {**_joint("mlp.shared_experts", "shared_mlp"), **_NAMES}
_SHARED_SINKS: Names = {
    **_joint("mlp.shared_experts", "shared_mlp"),
    **TOGETHER,
    ".mlp.": ".block_sparse_moe.",
    **SINKS,
}
FAMILIES = (
    Family(
        "granite", "GraniteForCausalLM", _granite, lambda model: _write(model) | bias_fields(model)
    ),
    Family(
        "hyperclovax",
        "HyperCLOVAXForCausalLM",
        _hyperclovax,
        _write_hyperclovax,
        Tensors(
            {".post_self_attn_layernorm.": ".post_norm1.", ".post_mlp_layernorm.": ".post_norm2."}
        ),
    ),
    Family(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _mixture,
        _write_mixture,
        Tensors(_NAMES, joint_mlp=True, experts="together"),
    ),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        partial(_mixture, shared=True),
        _write_shared,
        Tensors(_SHARED, joint_mlp=True, experts="together"),
    ),
    Family(
        "granite_swa",
        "GraniteSWAForCausalLM",
        _sinks,
        lambda model: _write(model) | bias_fields(model) | _write_sinks(model),
        Tensors(SINKS),
    ),
    Family(
        "granitemoe_swa",
        "GraniteMoeSWAForCausalLM",
        _sinks_mixture,
        lambda model: _write_shared(model) | _write_sinks(model),
        Tensors(_SHARED_SINKS, joint_mlp=True, experts="together"),
    ),
    Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _hybrid,
        None,
        Tensors(_joint("mlp", "shared_mlp"), joint_mlp=True),
    ),
)
