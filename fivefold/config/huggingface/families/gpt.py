"""GPT-2, StarCoder, GPT-NeoX (Pythia), StarCoder2 and Falcon: LayerNorm, biases, an ungated MLP."""

from dataclasses import replace

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import (
    activation_name,
    gpt_activation_name,
    rope_fields,
    size_fields,
)
from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.llama_like import (
    LlamaLike,
    activation,
    dropouts,
    transformer_sizes,
)
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope, whole_head_rope
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import ModelConfig


def of_gpt2(reader: Reader, *, dropout: float = 0.1, tied: bool = True) -> ModelConfig:
    """Learned positions, tied embeddings.

    Args:
        reader: reader of the file.
        dropout: the family's default of each dropout.
        tied: its default of tied embeddings.
    """
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
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", tied),
        **dropouts(reader, "resid_pdrop", "embd_pdrop", dropout),
        attention_dropout=reader.number("attn_pdrop", dropout),
        init_method_std=reader.number("initializer_range", 0.02),
    )


def _bigcode(reader: Reader) -> ModelConfig:
    """StarCoder and SantaCoder: GPT-2 whose query heads share one key/value head, or none do."""
    model = of_gpt2(reader)
    shared = reader.flag("multi_query", True)
    heads = 1 if shared else model.num_attention_heads
    reader.fixed("num_key_value_heads", heads)
    # How scores are computed in 16 bits; and of the files of its first code.
    reader.without_effect("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    reader.without_effect("inference_runner", "max_batch_size", "max_sequence_length")
    reader.without_effect("pad_key_length", "pre_allocate_kv_cache", "validate_runner_input")
    return replace(
        model,
        num_query_groups=heads,
        activation_func=activation(reader, "activation_function", "gelu_pytorch_tanh"),
    )


def _gpt_neox(reader: Reader) -> ModelConfig:
    """Rotary positions in part of each head; attention and MLP in parallel."""
    read_stored_weights(reader)
    default = Rope(10000.0, 0.25, "default")
    rope = read_rope(reader, default, theta="rotary_emb_base", share="rotary_pct")
    # Names that transformers 4 writes in addition to the family's own.
    reader.fixed("rope_theta", rope.theta)
    reader.fixed("partial_rotary_factor", rope.share)
    sizes = transformer_sizes(reader)
    turned = int(sizes["hidden_size"] // sizes["num_attention_heads"] * rope.share)
    if rope.share <= 0.0 or rope.share > 1.0 or turned % 2 or not turned:
        why = f"of hidden_size / num_attention_heads it turns {turned} features, which are no pairs"
        reader.unsupported("rotary_pct", rope.share, [1.0], why)
    biased = reader.flag("attention_bias", True)
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
        add_bias_linear=biased,
        mlp_bias=not biased,
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        hidden_dropout=dropout,
        attention_dropout=attention_dropout,
        **rope.settings(),
    )


_STARCODER2_LIKE = LlamaLike(
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    tied=True,
    activation="gelu_pytorch_tanh",
    null_head_dim=True,
    null_key_value_heads=False,
    epsilon="norm_epsilon",
    biases=lambda reader: {"add_bias_linear": reader.flag("use_bias", True)},
    windows=windows.everywhere,
)


def _starcoder2(reader: Reader) -> ModelConfig:
    """Rotary positions, shared key/value heads, a window in all layers or in none."""
    return replace(
        _STARCODER2_LIKE.read(reader),
        normalization="LayerNorm",
        gated_linear_unit=False,
        **dropouts(reader, "residual_dropout", "embedding_dropout", 0.0),
        init_method_std=reader.number("initializer_range", 0.018042),
    )


def write_gpt2(model: ModelConfig) -> Fields:
    """Fields of GPT-2, which those after it have, too."""
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_attention_heads,
        "n_positions": model.max_position_embeddings,
        "n_inner": model.ffn_size,
        "activation_function": gpt_activation_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.embedded_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def _write_bigcode(model: ModelConfig) -> Fields:
    return write_gpt2(model) | {"multi_query": model.num_kv_heads == 1}


def _write_gpt_neox(model: ModelConfig) -> Fields:
    rope = rope_fields(model)
    return {
        **size_fields(model),
        "intermediate_size": model.ffn_size,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": gpt_activation_name(model),
        "attention_bias": model.output_bias,
        "use_parallel_residual": model.parallel_residual,
        "rotary_pct": model.rotary_percent,
        "rotary_emb_base": rope.pop("rope_theta"),
        **rope,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _write_starcoder2(model: ModelConfig) -> Fields:
    return {
        **size_fields(model),
        **rope_fields(model),
        "intermediate_size": model.ffn_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "norm_epsilon": model.norm_epsilon,
        "hidden_act": activation_name(model),
        "use_bias": model.add_bias_linear,
        "residual_dropout": model.hidden_dropout,
        "embedding_dropout": model.embedded_dropout,
        "attention_dropout": model.attention_dropout,
        "sliding_window": windows.written_width(model.widest_window),
    }


_CONSTANTS = ".attn.bias", ".masked_bias", "attention.bias"
_GPT2 = Tensors(
    {
        "embed_tokens.": "wte.",
        "embed_positions.": "wpe.",
        ".input_layernorm.": ".ln_1.",
        ".post_attention_layernorm.": ".ln_2.",
        "layers.": "h.",
        **{f".self_attn.{part}_proj.": ".attn.c_attn." for part in "qkv"},
        ".self_attn.o_proj.": ".attn.c_proj.",
        ".mlp.up_proj.": ".mlp.c_fc.",
        ".mlp.down_proj.": ".mlp.c_proj.",
    },
    base="transformer.",
    last="ln_f.",
    joint_qkv="in_turn",
    transposed=True,
    constants=_CONSTANTS,
)
_BIGCODE = replace(_GPT2, joint_qkv="by_head", transposed=False)
_GPT_NEOX = Tensors(
    {
        "embed_tokens.": "embed_in.",
        "lm_head.": "embed_out.",
        **{f".self_attn.{part}_proj.": ".attention.query_key_value." for part in "qkv"},
        ".self_attn.o_proj.": ".attention.dense.",
        ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
        ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
    },
    base="gpt_neox.",
    last="final_layer_norm.",
    joint_qkv="by_head",
    constants=_CONSTANTS,
)
_STARCODER2 = Tensors({".mlp.up_proj.": ".mlp.c_fc.", ".mlp.down_proj.": ".mlp.c_proj."})


def _falcon(reader: Reader) -> ModelConfig:
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


def _write_falcon(model: ModelConfig) -> Fields:
    """Write Falcon's fields; only its newer layers have several key heads, or two norms side by
    side."""
    one, side_by_side = model.parallel_residual_one_norm, model.parallel_residual
    few = model.num_kv_heads in (1, model.num_attention_heads)
    newer = side_by_side and not (one and few)
    return {
        **size_fields(model),
        **rope_fields(model),
        "num_kv_heads": model.num_kv_heads,
        "multi_query": model.num_kv_heads == 1,
        "new_decoder_architecture": newer,
        "num_ln_in_parallel_attn": (1 if one else 2) if newer else None,
        "parallel_attn": side_by_side,
        "ffn_hidden_size": model.ffn_size,
        "activation": gpt_activation_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "bias": model.add_bias_linear,
        "alibi": False,
        "attention_dropout": model.attention_dropout,
    }


_FALCON = Tensors(
    {
        "embed_tokens.": "word_embeddings.",
        "layers.": "h.",
        **{f".self_attn.{part}_proj.": ".self_attention.query_key_value." for part in "qkv"},
        ".self_attn.o_proj.": ".self_attention.dense.",
        ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
        ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
    },
    base="transformer.",
    last="ln_f.",
    two_norms={".input_layernorm.": ".ln_attn.", ".post_attention_layernorm.": ".ln_mlp."},
    joint_qkv="by_head",
)


FAMILIES = (
    Family("gpt2", "GPT2LMHeadModel", of_gpt2, write_gpt2, _GPT2),
    Family("gpt_bigcode", "GPTBigCodeForCausalLM", _bigcode, _write_bigcode, _BIGCODE),
    Family("starcoder2", "Starcoder2ForCausalLM", _starcoder2, _write_starcoder2, _STARCODER2),
    Family("gpt_neox", "GPTNeoXForCausalLM", _gpt_neox, _write_gpt_neox, _GPT_NEOX),
    Family("falcon", "FalconForCausalLM", _falcon, _write_falcon, _FALCON),
)
