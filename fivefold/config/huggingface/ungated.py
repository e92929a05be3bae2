"""Arcee and Nemotron: Llama's layers with a squared ReLU and no gate."""

from dataclasses import replace

from fivefold.config.huggingface.llama import llama_like
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def arcee(reader: Reader, kind: str) -> ModelConfig:
    """Arcee (AFM): with RMSNorm."""
    return replace(llama_like(reader, kind), gated_linear_unit=False)


def nemotron(reader: Reader, kind: str) -> ModelConfig:
    """Nemotron and Minitron: with LayerNorm, whose weights start at 0, and RoPE in a half of each
    head."""
    model = llama_like(reader, kind)
    reader.size("num_key_value_heads")  # which transformers has no value for
    return replace(
        model,
        gated_linear_unit=False,
        normalization="LayerNorm",
        apply_layernorm_1p=True,
        init_method_std=reader.number("initializer_range", 0.0134),
    )
