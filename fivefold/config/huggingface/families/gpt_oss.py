"""OpenAI's gpt-oss: learned sinks in attention, a window in every other layer."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import SINKS, TOGETHER, Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, whole_head_rope
from fivefold.config.huggingface.rope_scalings import yarn_settings
from fivefold.config.model import ModelConfig


def _biases(reader: Reader) -> dict[str, Any]:
    """In attention, router and experts."""
    reader.fixed("attention_bias", True)
    return {"add_bias_linear": True}


def _rope(reader: Reader, default: Rope) -> Rope:
    if reader.fields.get("rope_parameters") != {}:  # {} means no scaling
        scaling = yarn_settings(32.0, 4096, whole_pairs=False)
        default = replace(default, kind="yarn", scaling=scaling)
    return whole_head_rope(reader, default)


_GPT_OSS = LlamaLike(
    num_key_value_heads=8,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    null_head_dim=True,
    biases=_biases,
    windows=None,
    rope=_rope,
    rounded=True,
)


def _read(reader: Reader) -> ModelConfig:
    model = _GPT_OSS.read(reader)
    layers = model.num_layers
    read_balancing(reader)
    reader.without_effect("initial_context_length")
    reader.fixed("swiglu_alpha", 1.702)
    reader.fixed("hidden_act", "silu")
    slides = windows.listed(reader, layers) or [i % 2 == 0 for i in range(layers)]
    return replace(
        model,
        **windows.settings(windows.needed(reader, slides, 128), slides),
        activation_func="quick_gelu",
        glu_linear_offset=1.0,
        activation_func_clamp_value=reader.number("swiglu_limit", 7.0),
        softmax_type="learnable",
        num_experts=reader.size("num_local_experts", "num_experts"),
        moe_router_topk=reader.size("num_experts_per_tok", "experts_per_token"),
    )


def _write(model: ModelConfig) -> Fields:
    unscaled = {"rope_scaling": {"rope_type": "default"}}  # without the table it is YaRN
    return (
        unscaled
        | _GPT_OSS.write(model)
        | {
            "attention_bias": True,
            "intermediate_size": model.expert_ffn_size,
            # transformers asks for a width even where no layer has a window.
            "sliding_window": 128 if model.window_size is None else model.window_size + 1,
            "layer_types": windows.written_types(model),
            "swiglu_limit": model.activation_func_clamp_value,
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
        }
    )


_TENSORS = Tensors(
    {
        **SINKS,
        ".mlp.experts.gate_proj.bias": ".mlp.experts.gate_up_proj_bias",
        ".mlp.experts.up_proj.bias": ".mlp.experts.gate_up_proj_bias",
        ".mlp.experts.down_proj.bias": ".mlp.experts.down_proj_bias",
        **TOGETHER,
    },
    experts="alternating",
)
FAMILIES = (Family("gpt_oss", "GptOssForCausalLM", _read, _write, _TENSORS),)
