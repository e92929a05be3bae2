"""Cohere's Command R: attention and MLP read one LayerNorm without a bias, side by side."""

from dataclasses import replace

from fivefold.config.huggingface.layered import windows_with_rope
from fivefold.config.huggingface.llama import llama_like, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def cohere(reader: Reader, kind: str) -> ModelConfig:
    """Command R, of which those that normalise heads give each head weights of its own."""
    reader.fixed("use_qk_norm", False, None, why="each head would have weights of its own")
    return _side_by_side(reader, kind)


def cohere2(reader: Reader, kind: str) -> ModelConfig:
    """Command R7B and Command A: windows in three of four layers, and RoPE in these alone."""
    # Of files that are older than transformers' class, which has no use for these.
    reader.fixed("position_embedding_type", "rope_gptj")
    reader.fixed("order_of_interleaved_layers", "local_attn_first")
    reader.fixed("layer_switch", reader.fields.get("sliding_window_pattern", 4))
    reader.fixed("rotary_pct", 1.0)
    for name in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block"):
        reader.fixed(name, True)
    reader.fixed("use_parallel_embedding", False)
    reader.without_effect("cache_implementation")
    model = _side_by_side(reader, kind)
    return replace(model, **windows_with_rope(reader, model.num_layers))


def _side_by_side(reader: Reader, kind: str) -> ModelConfig:
    model = llama_like(reader, kind)
    reader.without_effect("model_max_length")  # of the tokenizer
    refuse_head_dim(reader, model)
    scale = reader.number("logit_scale", 0.0625)
    if scale <= 0:
        reader.unsupported("logit_scale", scale, [0.0625])
        scale = 1.0
    return replace(
        model,
        normalization="LayerNorm",
        layernorm_bias=False,
        parallel_residual=True,
        parallel_residual_one_norm=True,
        logits_scaling=1.0 / scale,
    )
