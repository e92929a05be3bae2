"""Cohere's Command R: attention and MLP read one LayerNorm without a bias, side by side."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike, refuse_head_dim
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig

_COHERE2 = LlamaLike(
    rms_norm_eps=1e-5, tied=True, epsilon="layer_norm_eps", windows=None, padded=True
)
_COHERE = replace(_COHERE2, rope_theta=500000.0, windows=windows.none)


def _cohere(reader: Reader) -> ModelConfig:
    """Command R, of which those that normalise heads give each head weights of its own."""
    reader.fixed("use_qk_norm", False, None, why="each head would have weights of its own")
    return _side_by_side(reader, _COHERE)


def _cohere2(reader: Reader) -> ModelConfig:
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
    model = _side_by_side(reader, _COHERE2)
    slides = windows.all_but_every(reader, 4, model.num_layers)
    window = windows.needed(reader, slides)
    return replace(model, **windows.with_rope(reader, window, slides, 4096))


def _side_by_side(reader: Reader, like: LlamaLike) -> ModelConfig:
    model = like.read(reader)
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


def _write(model: ModelConfig) -> Fields:
    fields = _COHERE.write(model)
    fields["layer_norm_eps"] = fields.pop("rms_norm_eps")
    fields["logit_scale"] = 1.0 / model.logits_scaling
    del fields["head_dim"]  # hidden_size / num_attention_heads
    return fields


_TENSORS = Tensors(pairs=True)
FAMILIES = (
    Family("cohere", "CohereForCausalLM", _cohere, _write, _TENSORS),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        _cohere2,
        lambda model: _write(model) | windows.fields(model),
        _TENSORS,
    ),
)
