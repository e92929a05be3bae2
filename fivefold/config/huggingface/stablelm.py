"""StableLM: Llama's layers with LayerNorm, and RoPE in a quarter of each head."""

from dataclasses import replace

from fivefold.config.huggingface.llama import llama_like, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def stablelm(reader: Reader, kind: str) -> ModelConfig:
    """Those whose heads are not normalised; attention and MLP may read one norm side by side."""
    model = llama_like(reader, kind)
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
