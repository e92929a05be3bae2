"""Apertus: heads that are normalised, and an MLP without a gate whose activation learns (xIELU)."""

from dataclasses import replace

from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike, bias_fields
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, llama3_settings, whole_head_rope
from fivefold.config.model import ModelConfig

_BASE = 12e6
"""Of RoPE, unless a file says another."""


def _rope(reader: Reader, default: Rope) -> Rope:
    """transformers scales positions as Llama 3.1 does unless a file has a table, be it empty."""
    tables = reader.fields.get("rope_parameters"), reader.fields.get("rope_scaling")
    if tables[0] is None:
        default = replace(default, kind="llama3", scaling=llama3_settings(8.0, 1.0, 4.0, 8192))
        if not tables[1]:
            why = "without rope_scaling transformers takes 12000000.0, whatever stands here"
            reader.fixed("rope_theta", _BASE, why=why)
    return whole_head_rope(reader, default)


_APERTUS = LlamaLike(
    rms_norm_eps=1e-5,
    rope_theta=_BASE,
    activation="xielu",
    own_activations=("xielu",),
    heads="per_head",
    null_head_dim=True,
    rope=_rope,
    padded=True,
)


def _apertus(reader: Reader) -> ModelConfig:
    model = _APERTUS.read(reader)
    reader.fixed("post_norm", False)  # of published files, as is the next
    reader.fixed("qk_norm", True)
    return replace(model, gated_linear_unit=False)


def _write(model: ModelConfig) -> Fields:
    """Without a table transformers would scale positions."""
    fields = {"rope_scaling": {"rope_type": "default"}, **_APERTUS.write(model)}
    return fields | bias_fields(model)


FAMILIES = (
    Family(
        "apertus",
        "ApertusForCausalLM",
        _apertus,
        _write,
        Tensors(
            {
                ".input_layernorm.": ".attention_layernorm.",
                ".post_attention_layernorm.": ".feedforward_layernorm.",
            },
            numbers={
                "act_fn.beta": ("act_fn.alpha_p", 0.5),
                "act_fn.eps": ("act_fn.alpha_p", -1e-6),
            },
        ),
    ),
)
