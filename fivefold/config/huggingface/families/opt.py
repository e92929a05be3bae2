"""OPT and GPT-Neo: GPT-2's layers with ReLUs and positions from the third row of their table, or
with windows in every second layer and scores that are not scaled."""

from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.fields import gpt_activation_name, size_fields
from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.llama_like import activation, dropouts
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import MAX_LAYERS
from fivefold.config.model import ModelConfig

_MOST_REPEATS = 10_000


def _sizes(reader: Reader, layers: str, heads: str) -> dict[str, Any]:
    """Sizes of OPT and GPT-Neo; `layers`, `heads`: names of the fields in which they differ."""
    read_stored_weights(reader)
    return {
        "num_layers": reader.size(layers, "num_hidden_layers", most=MAX_LAYERS),
        "hidden_size": reader.size("hidden_size"),
        "num_attention_heads": reader.size(heads, "num_attention_heads"),
        "vocab_size": reader.size("vocab_size"),
        "max_position_embeddings": reader.size("max_position_embeddings"),
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "gated_linear_unit": False,
        "untie_embeddings_and_output_weights": not reader.flag("tie_word_embeddings", True),
        "attention_dropout": reader.number("attention_dropout", 0.0),
    }


def _opt(reader: Reader) -> ModelConfig:
    """All but 350M, whose norms follow sums, and whose embeddings are narrower."""
    sizes = _sizes(reader, "num_hidden_layers", "num_attention_heads")
    reader.fixed("do_layer_norm_before", True, why="norms precede attention and MLP here")
    reader.fixed("_remove_final_layer_norm", False)
    reader.fixed("activation_dropout", 0.0)  # of published files; transformers takes no notice
    reader.fixed("layerdrop", 0.0, why="no layer is left out at random here")
    reader.fixed("word_embed_proj_dim", sizes["hidden_size"], None)
    dropout = reader.number("dropout", 0.1)
    return ModelConfig(
        **sizes,
        ffn_hidden_size=reader.size("ffn_dim"),
        norm_elementwise_affine=reader.flag("layer_norm_elementwise_affine", True),
        position_embedding_offset=2,
        activation_func=activation(reader, "activation_function", "relu"),
        add_bias_linear=reader.flag("enable_bias", True),
        hidden_dropout=dropout,
        embedding_dropout=0.0 if dropout else None,
        init_method_std=reader.number("init_std", 0.02),
    )


def _write_opt(model: ModelConfig) -> Fields:
    fields = size_fields(model)
    return fields | {
        "init_std": fields.pop("initializer_range"),
        "ffn_dim": model.ffn_size,
        "word_embed_proj_dim": model.hidden_size,
        "pad_token_id": None,
        "activation_function": gpt_activation_name(model),
        "enable_bias": model.add_bias_linear,
        "layer_norm_elementwise_affine": model.norm_elementwise_affine,
        "dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
    }


def _gpt_neo(reader: Reader) -> ModelConfig:
    """GPT-Neo: attention has a bias in its output alone."""
    sizes = _sizes(reader, "num_layers", "num_heads")
    reader.without_effect(
        *("summary_type", "summary_use_proj"),
        *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    )
    slides = _local(reader, sizes["num_layers"])
    return ModelConfig(
        **sizes,
        ffn_hidden_size=reader.optional_size("intermediate_size", default=None),
        norm_epsilon=reader.number("layer_norm_epsilon", 1e-5),
        softmax_scale=1.0,
        activation_func=activation(reader, "activation_function", "gelu_new"),
        attention_out_bias=True,
        mlp_bias=True,
        init_method_std=reader.number("initializer_range", 0.02),
        **dropouts(reader, "resid_dropout", "embed_dropout", 0.0),
        **windows.settings(reader.size("window_size", default=256, least=2), slides),
    )


def _local(reader: Reader, layers: int) -> list[bool]:
    """Which layers have a window: `attention_types` says it in a pattern, `attention_layers` of
    each; transformers takes the first."""
    pattern = reader.fields.get("attention_types", [[["global", "local"], 12]])
    reader.without_effect("attention_types")
    kinds: list[Any] = []
    try:
        for kind, times in pattern:
            if type(times) is int and 0 < times <= _MOST_REPEATS:
                kinds += kind * times if isinstance(kind, list) else [None]
    except (TypeError, ValueError):
        kinds = [None]
    if len(kinds) != layers or not set(kinds) <= {"global", "local"}:
        works = [[["global", "local"], layers // 2]] if layers % 2 == 0 else [[["global"], layers]]
        why = f"of global and local, one for each of num_layers {layers}"
        reader.unsupported("attention_types", pattern, [works], why)
        return [False] * layers
    reader.fixed("attention_layers", kinds, why="attention_types says so")
    return [kind == "local" for kind in kinds]


def _write_gpt_neo(model: ModelConfig) -> Fields:
    kinds = ["global" if model.window_of(n) is None else "local" for n in range(model.num_layers)]
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "intermediate_size": model.ffn_size,
        "attention_types": [[[kind], 1] for kind in kinds],
        "attention_layers": kinds,
        "window_size": windows.written_width(model.window_size) or 256,
        "activation_function": gpt_activation_name(model),
        "layer_norm_epsilon": model.norm_epsilon,
        "initializer_range": model.init_method_std,
        "resid_dropout": model.hidden_dropout,
        "embed_dropout": model.embedded_dropout,
        "attention_dropout": model.attention_dropout,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


_OPT = Tensors(
    {
        ".self_attn.o_proj.": ".self_attn.out_proj.",
        ".input_layernorm.": ".self_attn_layer_norm.",
        ".post_attention_layernorm.": ".final_layer_norm.",
        ".mlp.up_proj.": ".fc1.",
        ".mlp.down_proj.": ".fc2.",
    },
    base="model.decoder.",
    last="final_layer_norm.",
)
_GPT_NEO = Tensors(
    {
        "embed_tokens.": "wte.",
        "embed_positions.": "wpe.",
        "layers.": "h.",
        ".input_layernorm.": ".ln_1.",
        ".post_attention_layernorm.": ".ln_2.",
        ".self_attn.o_proj.": ".attn.attention.out_proj.",
        ".self_attn.": ".attn.attention.",
        ".mlp.up_proj.": ".mlp.c_fc.",
        ".mlp.down_proj.": ".mlp.c_proj.",
    },
    base="transformer.",
    last="ln_f.",
    constants=(".attn.attention.bias", ".attn.attention.masked_bias"),
)
FAMILIES = (
    Family("opt", "OPTForCausalLM", _opt, _write_opt, _OPT),
    Family("gpt_neo", "GPTNeoForCausalLM", _gpt_neo, _write_gpt_neo, _GPT_NEO),
)
