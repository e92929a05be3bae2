"""Llama (1 to 3); Arcee and Nemotron, with squared ReLUs and no gate; StableLM, with LayerNorm."""

from dataclasses import replace

from fivefold.config.huggingface.family import Family, Fields
from fivefold.config.huggingface.llama_like import (
    LlamaLike,
    bias_fields,
    equal_biases,
    refuse_head_dim,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import read_rope
from fivefold.config.model import ModelConfig

_LLAMA = LlamaLike(null_head_dim=True, biases=equal_biases)


def _llama(reader: Reader) -> ModelConfig:
    model = _LLAMA.read(reader)
    # Of published files, and transformers has no use for them.
    reader.without_effect("max_sequence_length", "is_llama_config")
    reader.fixed("rope_interleaved", False)
    return model


def _write_llama(model: ModelConfig) -> Fields:
    return _LLAMA.write(model) | bias_fields(model)


_ARCEE = LlamaLike(rms_norm_eps=1e-5, activation="relu2", null_head_dim=True, biases=equal_biases)
_NEMOTRON = replace(
    _ARCEE,
    rotary_share=0.5,
    null_key_value_heads=False,
    epsilon="norm_eps",
    rope=read_rope,
    padded=True,
)


def _arcee(reader: Reader) -> ModelConfig:
    """Arcee (AFM): with RMSNorm."""
    return replace(_ARCEE.read(reader), gated_linear_unit=False)


def _nemotron(reader: Reader) -> ModelConfig:
    """Nemotron and Minitron: with LayerNorm, whose weights start at 0, and RoPE in a half of each
    head."""
    model = _NEMOTRON.read(reader)
    reader.size("num_key_value_heads")  # which transformers has no value for
    return replace(
        model,
        gated_linear_unit=False,
        normalization="LayerNorm",
        apply_layernorm_1p=True,
        init_method_std=reader.number("initializer_range", 0.0134),
    )


def _write_nemotron(model: ModelConfig) -> Fields:
    fields = _NEMOTRON.write(model) | {"partial_rotary_factor": model.rotary_percent}
    fields |= bias_fields(model)
    return fields | {"norm_eps": fields.pop("rms_norm_eps")}


_STABLELM = LlamaLike(
    num_key_value_heads=32,
    rms_norm_eps=1e-5,
    rotary_share=0.25,
    null_head_dim=True,
    null_key_value_heads=False,
    epsilon="layer_norm_eps",
    rope=read_rope,
)


def _stablelm(reader: Reader) -> ModelConfig:
    """Those whose heads are not normalised; attention and MLP may read one norm side by side."""
    model = _STABLELM.read(reader)
    refuse_head_dim(reader, model)
    parallel = reader.flag("use_parallel_residual", False)
    reader.fixed("qk_layernorm", False, why="each head would have a norm of its own")
    reader.fixed("hidden_dropout", 0.0, why="it is of MLPs alone")
    return replace(
        model,
        normalization="LayerNorm",
        parallel_residual=parallel,
        parallel_residual_one_norm=parallel,
        add_qkv_bias=reader.flag("use_qkv_bias", False),
    )


def _write_stablelm(model: ModelConfig) -> Fields:
    fields = _STABLELM.write(model) | {"partial_rotary_factor": model.rotary_percent}
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    fields["use_qkv_bias"] = model.qkv_bias
    fields["use_parallel_residual"] = model.parallel_residual
    del fields["head_dim"]  # hidden_size / num_attention_heads
    return fields


FAMILIES = (
    Family("llama", "LlamaForCausalLM", _llama, _write_llama),
    Family(
        "arcee", "ArceeForCausalLM", _arcee, lambda model: _ARCEE.write(model) | bias_fields(model)
    ),
    Family("nemotron", "NemotronForCausalLM", _nemotron, _write_nemotron),
    Family("stablelm", "StableLmForCausalLM", _stablelm, _write_stablelm),
)
