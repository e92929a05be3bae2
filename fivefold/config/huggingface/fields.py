"""Fields of a config.json that most families write in the same way: sizes, RoPE, activation."""

from fivefold.config.huggingface.family import Fields
from fivefold.config.huggingface.rope import LLAMA3
from fivefold.config.model import ModelConfig


def size_fields(model: ModelConfig) -> Fields:
    """Sizes that most families give by the same names."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.max_position_embeddings,
        "initializer_range": model.init_method_std,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
    }


def rope_fields(model: ModelConfig) -> Fields:
    """rope_theta and rope_scaling, under the names that transformers 4 and 5 both read."""
    fields: Fields = {"rope_theta": model.rotary_base}
    if model.use_rope_scaling:
        scaling = {theirs: getattr(model, ours) for ours, theirs in LLAMA3.items()}
        fields["rope_scaling"] = {"rope_type": "llama3", **scaling}
    if model.rotary_seq_len_interpolation_factor is not None:
        factor = model.rotary_seq_len_interpolation_factor
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if model.rope_type == "proportional":
        scaling = fields.get("rope_scaling", {}) | {"rope_type": "proportional"}
        fields["rope_scaling"] = scaling | {"partial_rotary_factor": model.rotary_percent}
    if model.rope_type == "yarn":
        fields["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": model.rotary_scaling_factor,
            "original_max_position_embeddings": model.original_max_position_embeddings,
            "beta_fast": model.beta_fast,
            "beta_slow": model.beta_slow,
            "truncate": model.yarn_correction_range_round_to_int,
        }
        if model.mscale_all_dim:
            scales = {"mscale": model.mscale, "mscale_all_dim": model.mscale_all_dim}
            fields["rope_scaling"] |= scales
        if not model.mscale:
            fields["rope_scaling"] |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if model.rope_type == "dynamic":  # the original length is max_position_embeddings
        factor = model.rotary_scaling_factor
        fields["rope_scaling"] = {"rope_type": "dynamic", "factor": factor}
    if model.rope_type == "longrope":
        fields["rope_scaling"] = {
            "rope_type": "longrope",
            "short_factor": [*model.longrope_short_factor],
            "long_factor": [*model.longrope_long_factor],
            "original_max_position_embeddings": model.original_max_position_embeddings,
        }
        if model.longrope_attention_factor is not None:
            fields["rope_scaling"]["attention_factor"] = model.longrope_attention_factor
    return fields


def activation_name(model: ModelConfig) -> str:
    """The MLP's activation function, as most families name it."""
    names = {"gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "silu", "squared_relu": "relu2"}
    return names.get(model.activation_func, model.activation_func)


def gpt_activation_name(model: ModelConfig) -> str:
    """The same, as families name it that come after GPT-2."""
    names = {"gelu_tanh": "gelu_new", "squared_relu": "relu2"}
    return names.get(model.activation_func, model.activation_func)
