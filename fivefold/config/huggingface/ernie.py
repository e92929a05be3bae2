"""ERNIE 4.5: Llama's layers with RoPE in pairs of neighbours."""

from dataclasses import replace

from fivefold.config.huggingface.llama import llama_like
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def ernie4_5(reader: Reader, kind: str) -> ModelConfig:
    """The dense model, whose linear layers all have biases, or none."""
    model = llama_like(reader, kind)
    reader.fixed("attention_dropout", 0.0, why="transformers has none in this family")
    return replace(model, add_bias_linear=reader.flag("use_bias", False))
