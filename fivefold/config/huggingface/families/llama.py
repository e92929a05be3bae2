"""Llama (1 to 3), InternLM3, IQuest-Coder and Helium; Arcee, Nemotron and Jais 2, with squared
ReLUs and no gate; StableLM, with LayerNorm."""

from dataclasses import replace
from functools import partial

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import (
    LlamaLike,
    Settings,
    bias_fields,
    both_biases,
    qkv_biases,
    refuse_head_dim,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import read_rope
from fivefold.config.model import ModelConfig

_LLAMA = LlamaLike(null_head_dim=True, biases=both_biases)


def _llama(reader: Reader) -> ModelConfig:
    model = _LLAMA.read(reader)
    # Of published files, and transformers has no use for them.
    reader.without_effect("max_sequence_length", "is_llama_config")
    reader.fixed("rope_interleaved", False)
    return model


def _write_llama(model: ModelConfig) -> Fields:
    return _LLAMA.write(model) | bias_fields(model)


def _equal_biases(reader: Reader) -> Settings:
    """transformers refuses other files: in InternLM3's own code the output of attention has the
    bias of MLPs, in Llama's that of queries, keys and values."""
    settings = both_biases(reader)
    if settings.get("mlp_bias", True) != settings.get("add_qkv_bias", True):
        why = "attention and MLPs of this family have biases together"
        reader.unsupported("mlp_bias", settings["mlp_bias"], [settings["add_qkv_bias"]], why)
    return settings


_INTERNLM3 = replace(
    _LLAMA,
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    code=True,
    biases=_equal_biases,
)
_IQUEST = replace(_LLAMA, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, code=True)


def _internlm3(reader: Reader) -> ModelConfig:
    reader.also(attention_bias="qkv_bias", mlp_bias="bias")
    return _INTERNLM3.read(reader)


def _iquest(reader: Reader) -> ModelConfig:
    model = _IQUEST.read(reader)
    reader.fixed("clip_qkv", None)
    reader.fixed("use_sliding_window", False)
    reader.without_effect("max_window_layers")  # of windows
    return model


_HELIUM = LlamaLike(
    num_key_value_heads=20,
    head_dim=128,
    rms_norm_eps=1e-8,
    rope_theta=1e5,
    null_key_value_heads=False,
    biases=qkv_biases(False),
)


def _helium(reader: Reader) -> ModelConfig:
    """Helium: RoPE that turns neighbouring features."""
    model = _HELIUM.read(reader)
    reader.fixed("mlp_bias", False)
    refuse_head_dim(reader, model)
    return model


_JAIS2 = LlamaLike(
    rms_norm_eps=1e-5,
    activation="relu2",
    null_head_dim=True,
    epsilon="layer_norm_eps",
    biases=partial(both_biases, default=True),
)


def _jais2(reader: Reader) -> ModelConfig:
    """Jais 2: LayerNorm, and biases everywhere."""
    model = _JAIS2.read(reader)
    return replace(model, gated_linear_unit=False, normalization="LayerNorm")


def _write_jais2(model: ModelConfig) -> Fields:
    fields = _JAIS2.write(model) | bias_fields(model)
    return fields | {"layer_norm_eps": fields.pop("rms_norm_eps")}


_ARCEE = LlamaLike(rms_norm_eps=1e-5, activation="relu2", null_head_dim=True, biases=both_biases)
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
    Family("internlm3", "LlamaForCausalLM", _internlm3, None),
    Family("iquestcoder", "LlamaForCausalLM", _iquest, None),
    Family(
        "helium",
        "HeliumForCausalLM",
        _helium,
        lambda model: _HELIUM.write(model) | {"attention_bias": model.qkv_bias},
        Tensors(pairs=True),
    ),
    Family("jais2", "Jais2ForCausalLM", _jais2, _write_jais2),
    Family(
        "arcee", "ArceeForCausalLM", _arcee, lambda model: _ARCEE.write(model) | bias_fields(model)
    ),
    Family("nemotron", "NemotronForCausalLM", _nemotron, _write_nemotron),
    Family("stablelm", "StableLmForCausalLM", _stablelm, _write_stablelm),
)
