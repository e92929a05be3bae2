"""Falcon: attention and an ungated MLP side by side, after one LayerNorm or two."""

from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.llama import activation
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, whole_head_rope
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import ModelConfig


def falcon(reader: Reader, kind: str) -> ModelConfig:
    """7B with one norm and one key head; 40B, 180B (two norms) and 11B with several key heads."""
    read_stored_weights(reader)
    reader.fixed("alibi", False, why="there are no biases of scores by distance here")
    reader.fixed("hidden_dropout", 0.0, why="it is of the sum of attention and MLP")
    hidden, heads = reader.size("hidden_size"), reader.size("num_attention_heads")
    newer = reader.flag("new_decoder_architecture", False)
    parallel = reader.flag("parallel_attn", True)
    shared, norms = reader.flag("multi_query", True), 1
    groups = reader.optional_size("num_kv_heads", default=None) or heads
    if newer:
        norms = reader.optional_size("num_ln_in_parallel_attn", default=None) or 2
        if norms > 2:
            reader.unsupported("num_ln_in_parallel_attn", norms, [1, 2])
        if not parallel:
            why = "with new_decoder_architecture attention and MLP are side by side"
            reader.unsupported("parallel_attn", parallel, [True], why)
    else:
        reader.fixed("num_ln_in_parallel_attn", None, 1, why="that is of new_decoder_architecture")
        if not shared and groups != heads:
            why = "without new_decoder_architecture there is one, or one for each query head"
            reader.unsupported("num_kv_heads", groups, [heads], why)
        groups = 1 if shared else heads
    dropout = reader.number("attention_dropout", 0.0)
    if dropout and not parallel:
        reader.unsupported("attention_dropout", dropout, [0.0], "it also drops what attention adds")
    return ModelConfig(
        num_layers=reader.size("num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=groups,
        ffn_hidden_size=reader.optional_size("ffn_hidden_size", default=None) or 4 * hidden,
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("max_position_embeddings", default=2048),
        normalization="LayerNorm",
        norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        activation_func=activation(reader, "activation", "gelu"),
        gated_linear_unit=False,
        add_bias_linear=reader.flag("bias", False),
        parallel_residual=parallel,
        parallel_residual_one_norm=parallel and norms == 1,
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", True),
        attention_dropout=dropout,
        init_method_std=reader.number("initializer_range", 0.02),
        **whole_head_rope(reader, Rope(10000.0, 1.0, "default")).settings(),
    )
