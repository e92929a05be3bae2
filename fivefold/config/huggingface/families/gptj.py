"""GPT-J and CodeGen: attention without biases and an MLP with some, side by side after one
LayerNorm, an output layer with a bias, RoPE that turns neighbouring features."""

from dataclasses import replace

from fivefold.config.huggingface.families.gpt import of_gpt2, write_gpt2
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig


def _read(reader: Reader) -> ModelConfig:
    model = of_gpt2(reader, dropout=0.0, tied=False)
    reader.fixed("rotary", True)  # of GPT-J's own file
    turned, most = reader.size("rotary_dim", default=64), max(model.head_dim, 1)
    if turned % 2 or turned > most:
        why = f"it is of pairs of features, of which a head has n_embd / n_head = {most}"
        reader.unsupported("rotary_dim", turned, [most - most % 2], why)
        turned = most
    return replace(
        model,
        position_embedding_type="rope",
        rotary_percent=turned / most,
        add_bias_linear=False,
        mlp_bias=True,
        lm_head_bias=True,
        parallel_residual=True,
        parallel_residual_one_norm=True,
    )


def _codegen(reader: Reader) -> ModelConfig:
    """CodeGen: with queries, keys and values in one projection, by quarters of it."""
    model = _read(reader)
    if model.hidden_size % 4:
        reader.unsupported("n_embd", model.hidden_size, [4 * (model.hidden_size // 4)])
    return model


def _write(model: ModelConfig) -> Fields:
    return write_gpt2(model) | {"rotary_dim": model.rotary_dim}


_GPTJ = Tensors(
    {
        "embed_tokens.": "wte.",
        "layers.": "h.",
        ".input_layernorm.": ".ln_1.",
        ".self_attn.o_proj.": ".attn.out_proj.",
        ".self_attn.": ".attn.",
        ".mlp.up_proj.": ".mlp.fc_in.",
        ".mlp.down_proj.": ".mlp.fc_out.",
    },
    base="transformer.",
    last="ln_f.",
    pairs=True,
    constants=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
)
_CODEGEN = replace(
    _GPTJ,
    names={f".self_attn.{part}_proj.": ".attn.qkv_proj." for part in "qkv"} | {**_GPTJ.names},
    joint_qkv="by_quarter",
)
FAMILIES = (
    Family("gptj", "GPTJForCausalLM", _read, _write, _GPTJ),
    Family("codegen", "CodeGenForCausalLM", _codegen, _write, _CODEGEN),
)
