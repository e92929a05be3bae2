"""Seed-OSS: Llama's layers with biases of queries, keys and values."""

from dataclasses import replace

from fivefold.config.huggingface.llama import llama_like
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def seed_oss(reader: Reader, kind: str) -> ModelConfig:
    """Biases of queries, keys and values, of all linear layers, or of none."""
    model = llama_like(reader, kind)
    output, mlp = reader.flag("attention_out_bias", False), reader.flag("mlp_bias", False)
    if output != mlp:
        reader.unsupported("mlp_bias", mlp, [output], "attention_out_bias has to be the same")
    if output and mlp and not model.add_qkv_bias:
        reader.unsupported("attention_bias", False, [True], "all other linear layers have biases")
    dropout = reader.number("residual_dropout", 0.1)
    if dropout:
        why = "it leaves embeddings out, which are dropped here, too"
        reader.unsupported("residual_dropout", dropout, [0.0], why)
    return replace(
        model,
        add_bias_linear=output and mlp,
        add_qkv_bias=model.add_qkv_bias and not output,
        attention_dropout=reader.number("attention_dropout", 0.1),
    )
