"""DeepSeek-V2 and V3, Kimi-K2, GLM-4.7-Flash: latent attention, dense layers first."""

from typing import Any

from fivefold.config.huggingface.generic import read_stored_weights
from fivefold.config.huggingface.grouped_experts import grouped_experts, predictions
from fivefold.config.huggingface.llama import activation, transformer_sizes
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, read_rope
from fivefold.config.model import ModelConfig

_LATENT_EPSILON = 1e-6
"""With which transformers normalises latents, whatever the file says."""


def deepseek(reader: Reader, kind: str) -> ModelConfig:
    """The model; heads share one rotary key, and adjacent rotary features are paired."""
    second = kind == "deepseek_v2"
    sizes = transformer_sizes(reader)
    read_stored_weights(reader, code=True, rounded=True)
    reader.fixed("attention_bias", False)
    reader.fixed("mlp_bias", False)
    # The order in which weights are stored; the computation is the same. Null is false.
    reader.fixed("rope_interleave", True, False, None)
    lite = kind == "glm4_moe_lite"
    epsilon = reader.number("rms_norm_eps", 1e-5 if lite else 1e-6)
    rope = read_rope(reader, Rope(10000.0, 1.0, "default"), leave_out=True, latents=True)
    if rope.share != 1.0:
        reader.unsupported("partial_rotary_factor", rope.share, [1.0])
    inner = reader.size("intermediate_size")
    latents: dict[str, Any] = {
        "q_lora_rank": reader.optional_size("q_lora_rank", default=768 if lite else 1536),
        "kv_lora_rank": reader.size("kv_lora_rank"),
        "qk_head_dim": reader.size("qk_nope_head_dim"),
        "qk_pos_emb_head_dim": reader.size("qk_rope_head_dim"),
        "v_head_dim": reader.size("v_head_dim"),
    }
    # Derived sizes, which transformers 5 also writes.
    turned = latents["qk_pos_emb_head_dim"]
    heads, default = sizes["num_attention_heads"], None if second else 20 if lite else 128
    key_value_heads = reader.optional_size("num_key_value_heads", default=default)
    if key_value_heads not in (None, heads):
        why = f"each of num_attention_heads {heads} has keys of its own"
        reader.unsupported("num_key_value_heads", key_value_heads, [heads], why)
    reader.fixed("qk_head_dim", latents["qk_head_dim"] + turned)
    reader.fixed("head_dim", turned)
    return ModelConfig(
        **sizes,
        **latents,
        ffn_hidden_size=inner,
        norm_epsilon=epsilon,
        latent_norm_epsilon=None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON,
        activation_func=activation(reader, "hidden_act", "silu"),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        attention_dropout=reader.number("attention_dropout", 0.0),
        multi_latent_attention=True,
        mtp_num_layers=0 if second else predictions(reader),
        **grouped_experts(reader, kind, sizes["num_layers"]),
        **rope.settings(),
    )
