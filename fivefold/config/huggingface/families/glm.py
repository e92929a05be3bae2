"""GLM-4 to 4.7, with RoPE in a part of each head; Solar Open, dots.llm1 and Sarvam 30B,
with experts as 4.5."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.families.qwen import qwen_windows
from fivefold.config.huggingface.family import GATE_UP, Family, Fields, Names, Tensors
from fivefold.config.huggingface.grouped_experts import (
    DEEPSEEK_NAMES,
    ONE_GROUP,
    no_predictions,
    predictions,
    read_of_sarvam,
)
from fivefold.config.huggingface.llama_like import LlamaLike, qkv_biases
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import read_rope
from fivefold.config.model import ModelConfig

_GLM = LlamaLike(
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1.5625e-7,
    rotary_share=0.5,
    null_key_value_heads=False,
    biases=qkv_biases(True),
    rope=read_rope,
    padded=True,
)
_GLM4 = replace(_GLM, norms="both")
_GLM45 = replace(
    _GLM, num_key_value_heads=8, head_dim=None, rms_norm_eps=1e-5, biases=qkv_biases(False)
)
_SOLAR = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    null_key_value_heads=False,
    biases=qkv_biases(False),
    dense=False,
)
_GLM45_EXPERTS = replace(ONE_GROUP, scale=1.0)
_SOLAR_EXPERTS = replace(ONE_GROUP, scale=1.0, dense_layers=0, always=True)


def _glm45(reader: Reader) -> ModelConfig:
    """GLM-4.5 to 4.7: DeepSeek-V3's experts and predictions, RoPE in a half of each head."""
    model = _GLM45.read(reader)
    normalises = reader.flag("use_qk_norm", False)
    experts = _GLM45_EXPERTS.read(reader, model.num_layers)
    return replace(model, qk_layernorm=normalises, mtp_num_layers=predictions(reader), **experts)


def _solar(reader: Reader) -> ModelConfig:
    """Solar Open: GLM-4.5's experts in every layer, after Llama's attention."""
    model = _SOLAR.read(reader)
    reader.without_effect("intermediate_size")  # of dense layers, which there are none of
    why = "transformers has experts in every layer, whatever stands here"
    reader.fixed("first_k_dense_replace", 0, why=why)
    reader.fixed("use_qk_norm", False)
    reader.fixed("num_nextn_predict_layers", 0)
    return replace(model, **_SOLAR_EXPERTS.read(reader, model.num_layers))


def _writes(like: LlamaLike) -> Callable[[ModelConfig], Fields]:
    def write(model: ModelConfig) -> Fields:
        share = {"partial_rotary_factor": model.rotary_percent}
        return like.write(model) | share | {"attention_bias": model.add_qkv_bias}

    return write


def _write_glm45(model: ModelConfig) -> Fields:
    more = {"use_qk_norm": model.qk_layernorm, "num_nextn_predict_layers": model.prediction_sets}
    return _writes(_GLM45)(model) | _GLM45_EXPERTS.write(model) | more


def _write_solar(model: ModelConfig) -> Fields:
    fields = _SOLAR.write(model) | {"attention_bias": model.add_qkv_bias}
    fields |= _SOLAR_EXPERTS.write(model)
    del fields["intermediate_size"]  # of dense layers
    return fields


_DOTS = LlamaLike(
    num_key_value_heads=32,
    heads="per_head",
    windows=partial(qwen_windows, first=62, switched=False),
)
_DOTS_EXPERTS = replace(
    ONE_GROUP,
    scale=1.0,
    dense_layers=0,
    shared=None,
    normalised=False,  # as which it cannot be trained here
    scores_also=("noaux_tc",),  # its own files have the method's name there
)


def _dots(reader: Reader) -> ModelConfig:
    model = _DOTS.read(reader)
    return replace(model, **_DOTS_EXPERTS.read(reader, model.num_layers))


def _write_dots(model: ModelConfig) -> Fields:
    return _DOTS.write(model) | _DOTS_EXPERTS.write(model) | windows.fields(model)


_SARVAM = LlamaLike(
    num_key_value_heads=4,
    head_dim=64,
    rope_theta=8e6,
    null_key_value_heads=False,
    biases=qkv_biases(False),
    rope=read_rope,
    code=True,
    padded=True,
)


def _sarvam(reader: Reader) -> ModelConfig:
    """Sarvam 30B: GLM-4.5's layers, under other names."""
    reader.also(n_shared_experts="num_shared_experts", attention_bias="use_qkv_bias")
    model = _SARVAM.read(reader)
    no_predictions(reader)
    read_of_sarvam(reader)
    return replace(
        model,
        init_method_std=reader.number("initializer_range", 0.006),
        qk_layernorm=reader.flag("use_qk_norm", True),
        **ONE_GROUP.read(reader, model.num_layers),
    )


_SARVAM_NAMES: Names = {
    **DEEPSEEK_NAMES,
    "embed_tokens.": "word_embeddings.",
    ".self_attn.q_norm.": ".attention.query_layernorm.",
    ".self_attn.k_norm.": ".attention.key_layernorm.",
    **{f".self_attn.{part}_proj.": ".attention.query_key_value." for part in "qkv"},
    ".self_attn.o_proj.": ".attention.dense.",
    ".mlp.router.expert_bias": ".mlp.gate.expert_bias",
}
_SARVAM_TENSORS = Tensors(_SARVAM_NAMES, renamed=True, joint_qkv="in_turn")
_TENSORS = Tensors(GATE_UP, joint_mlp=True, pairs=True)
_GLM45_TENSORS = Tensors(DEEPSEEK_NAMES, predicts=True)
FAMILIES = (
    Family("glm", "GlmForCausalLM", _GLM.read, _writes(_GLM), _TENSORS),
    Family("glm4", "Glm4ForCausalLM", _GLM4.read, _writes(_GLM4), _TENSORS),
    Family("glm4_moe", "Glm4MoeForCausalLM", _glm45, _write_glm45, _GLM45_TENSORS),
    Family("solar_open", "SolarOpenForCausalLM", _solar, _write_solar, Tensors(DEEPSEEK_NAMES)),
    Family("sarvam_moe", "Glm4MoeForCausalLM", _sarvam, None, _SARVAM_TENSORS),
    Family("dots1", "Dots1ForCausalLM", _dots, _write_dots, Tensors(DEEPSEEK_NAMES)),
)
