"""GPT-2, GPT-NeoX (Pythia) and StarCoder2: LayerNorm, biases, an ungated MLP."""

from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.llama import (
    activation,
    equal_dropouts,
    transformer_sizes,
    window_settings,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope, whole_head_rope
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import ModelConfig


def gpt2(reader: Reader, kind: str) -> ModelConfig:
    """Learned positions, tied embeddings."""
    read_stored_weights(reader)
    reader.without_effect(
        *("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"),
        *("summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    )
    reader.fixed("scale_attn_by_inverse_layer_idx", False)
    reader.fixed("scale_attn_weights", True)
    return ModelConfig(
        num_layers=reader.size("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=reader.size("n_embd", "hidden_size"),
        num_attention_heads=reader.size("n_head", "num_attention_heads"),
        ffn_hidden_size=reader.optional_size("n_inner", default=None),
        vocab_size=reader.size("vocab_size"),
        max_position_embeddings=reader.size("n_positions", "max_position_embeddings"),
        normalization="LayerNorm",
        norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        position_embedding_type="learned_absolute",
        activation_func=activation(reader, "activation_function", "gelu_new"),
        gated_linear_unit=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", True),
        hidden_dropout=equal_dropouts(reader, ("resid_pdrop", "embd_pdrop"), 0.1),
        attention_dropout=reader.number("attn_pdrop", 0.1),
        init_method_std=reader.number("initializer_range", 0.02),
    )


def gpt_neox(reader: Reader, kind: str) -> ModelConfig:
    """Rotary positions in part of each head; attention and MLP in parallel."""
    read_stored_weights(reader)
    default = Rope(10000.0, 0.25, "default")
    rope = read_rope(reader, default, theta="rotary_emb_base", share="rotary_pct", leave_out=True)
    # Names that transformers 4 writes in addition to the family's own.
    reader.fixed("rope_theta", rope.theta)
    reader.fixed("partial_rotary_factor", rope.share)
    sizes = transformer_sizes(reader)
    turned = int(sizes["hidden_size"] // sizes["num_attention_heads"] * rope.share)
    if rope.share <= 0.0 or rope.share > 1.0 or turned % 2 or not turned:
        why = f"of hidden_size / num_attention_heads it turns {turned} features, which are no pairs"
        reader.unsupported("rotary_pct", rope.share, [1.0], why)
    reader.fixed("attention_bias", True)
    dropout = reader.number("hidden_dropout", 0.0)
    attention_dropout = reader.number("attention_dropout", 0.0)
    # BERT's names, in the file of GPT-NeoX-20B; transformers ignores them.
    reader.fixed("hidden_dropout_prob", dropout)
    reader.fixed("attention_probs_dropout_prob", attention_dropout)
    return ModelConfig(
        **sizes,
        ffn_hidden_size=reader.size("intermediate_size"),
        normalization="LayerNorm",
        parallel_residual=reader.flag("use_parallel_residual", True),
        norm_epsilon=reader.number("layer_norm_eps", 1e-5),
        activation_func=activation(reader, "hidden_act", "gelu"),
        gated_linear_unit=False,
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        hidden_dropout=dropout,
        attention_dropout=attention_dropout,
        **rope.settings(),
    )


def starcoder2(reader: Reader, kind: str) -> ModelConfig:
    """Rotary positions, shared key/value heads, a window in all layers or in none."""
    read_stored_weights(reader)
    sizes = transformer_sizes(reader)
    window = reader.optional_size("sliding_window", default=None, least=2)
    return ModelConfig(
        **sizes | {"init_method_std": reader.number("initializer_range", 0.018042)},
        ffn_hidden_size=reader.size("intermediate_size"),
        num_query_groups=reader.size("num_key_value_heads", default=2),
        kv_channels=reader.optional_size("head_dim", default=None),
        normalization="LayerNorm",
        norm_epsilon=reader.number("norm_epsilon", 1e-5),
        activation_func=activation(reader, "hidden_act", "gelu_pytorch_tanh"),
        gated_linear_unit=False,
        add_bias_linear=reader.flag("use_bias", True),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", True),
        hidden_dropout=equal_dropouts(reader, ("residual_dropout", "embedding_dropout"), 0.0),
        attention_dropout=reader.number("attention_dropout", 0.0),
        **window_settings(window, (window is not None,) * sizes["num_layers"]),
        **whole_head_rope(reader, Rope(10000.0, 1.0, "default")).settings(),
    )
