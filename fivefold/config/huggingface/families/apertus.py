"""Apertus, whose activation (xIELU) learns; and CWM, which like it has RoPE scaled as in Llama 3.1
where a file says nothing."""

from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike, bias_fields
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, llama3_settings, whole_head_rope
from fivefold.config.model import ModelConfig


def _rope(reader: Reader, default: Rope, *, factor: float) -> Rope:
    """transformers scales positions by `factor` unless a file has a table, be it empty."""
    tables = reader.fields.get("rope_parameters"), reader.fields.get("rope_scaling")
    if tables[0] is None:
        default = replace(default, kind="llama3", scaling=llama3_settings(factor, 1.0, 4.0, 8192))
        if not tables[1]:
            why = f"without rope_scaling transformers takes {default.theta}, whatever stands here"
            reader.fixed("rope_theta", default.theta, why=why)
    return whole_head_rope(reader, default)


_APERTUS = LlamaLike(
    rms_norm_eps=1e-5,
    rope_theta=12e6,
    activation="xielu",
    own_activations=("xielu",),
    heads="per_head",
    rope=partial(_rope, factor=8.0),
    padded=True,
)


def _apertus(reader: Reader) -> ModelConfig:
    """Heads that are normalised, and an MLP without a gate."""
    model = _APERTUS.read(reader)
    # Of published files, and transformers has no use for them.
    reader.fixed("post_norm", False)
    reader.fixed("qk_norm", True)
    reader.fixed("hidden_dropout", 0.0)
    return replace(model, gated_linear_unit=False)


def _cwm_windows(reader: Reader, layers: int) -> dict[str, Any]:
    """In the layers that are listed, or in three of four, from the second on."""
    listed = windows.listed(reader, layers)
    slides = listed or tuple(layer % 4 != 0 for layer in range(layers))
    return windows.settings(windows.needed(reader, slides, 8192), slides)


_CWM = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
    windows=_cwm_windows,
    rope=partial(_rope, factor=16.0),
)


def _write(model: ModelConfig) -> Fields:
    """Without a table transformers would scale positions."""
    fields = {"rope_scaling": {"rope_type": "default"}, **_APERTUS.write(model)}
    return fields | bias_fields(model)


_LEARNED = "act_fn.alpha_p"
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
            numbers={"act_fn.beta": (_LEARNED, 0.5), "act_fn.eps": (_LEARNED, -1e-6)},
        ),
    ),
    Family("cwm", "CwmForCausalLM", _CWM.read, None),
)
