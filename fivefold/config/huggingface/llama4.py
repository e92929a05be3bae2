"""Llama 4 for text: experts that read weighted tokens, attention in chunks, layers without RoPE."""

from typing import Any

from fivefold.config.huggingface.generic import read_balancing, read_stored_weights
from fivefold.config.huggingface.llama import activation, transformer_sizes, unrotated_layers
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, whole_head_rope
from fivefold.config.layer_pattern import layer_frequency, unrotated_frequency
from fivefold.config.model import ModelConfig


def llama4(reader: Reader, kind: str) -> ModelConfig:
    """Adjacent rotary features are paired; heads are normalised after RoPE, without weights."""
    sizes = transformer_sizes(reader)
    layers = sizes["num_layers"]
    read_stored_weights(reader)
    reader.fixed("attention_bias", False)
    reader.fixed("for_llm_compressor", False)
    reader.without_effect("cache_implementation", "router_jitter_noise")
    rope = whole_head_rope(reader, Rope(500000.0, 1.0, "default"))
    unrotated = unrotated_layers(reader, layers)
    return ModelConfig(
        **sizes,
        num_query_groups=reader.optional_size("num_key_value_heads", default=8),
        kv_channels=reader.optional_size("head_dim", default=128),
        ffn_hidden_size=reader.size("intermediate_size_mlp", default=16384),
        norm_epsilon=reader.number("rms_norm_eps", 1e-5),
        activation_func=activation(reader, "hidden_act", "silu"),
        qk_l2_norm=reader.flag("use_qk_norm", True),
        untie_embeddings_and_output_weights=not reader.flag("tie_word_embeddings", False),
        attention_dropout=reader.number("attention_dropout", 0.0),
        no_rope_freq=unrotated_frequency(unrotated),
        attention_chunk_size=_chunks(reader, unrotated),
        **_temperature(reader, unrotated),
        **_experts(reader, layers),
        **rope.settings(),
    )


def _chunks(reader: Reader, unrotated: tuple[bool, ...]) -> int | None:
    """Tokens of a chunk; a list of which layers have chunks has to say those with RoPE."""
    if (entries := len(reader.sizes("no_rope_layers"))) > len(unrotated):  # as layer_types
        sizes = f"{entries} entries, {len(unrotated)} layers"
        reader.mistakes.add(f"no_rope_layers must have one entry a layer: {sizes}")
    size = reader.optional_size("attention_chunk_size", default=8192)
    kinds = ("full_attention", "chunked_attention")
    listed = reader.texts("layer_types", kinds)
    usual = [kinds[size is not None and not without] for without in unrotated]
    if listed is not None and listed != usual:
        why = "chunks are of the layers with RoPE (no_rope_layers), if attention_chunk_size is one"
        reader.unsupported("layer_types", listed, [usual], why)
    return size


def _temperature(reader: Reader, unrotated: tuple[bool, ...]) -> dict[str, Any]:
    """ModelConfig settings of layers without RoPE, if there are any."""
    tuned = reader.fields.get("attn_temperature_tuning")
    if type(tuned) is int:  # as it was published: 4
        reader.without_effect("attn_temperature_tuning")
    else:
        tuned = reader.flag("attn_temperature_tuning", True)
    steps, growth = reader.size("floor_scale", default=8192), reader.number("attn_scale", 0.1)
    if not tuned or not growth or not any(unrotated):
        return {}
    return {"attn_temperature_tuning": True, "floor_scale": steps, "attn_scale": growth}


def _experts(reader: Reader, layers: int) -> dict[str, Any]:
    """ModelConfig settings of experts, one for each token beside one that all tokens have."""
    read_balancing(reader)
    inner = reader.size("intermediate_size")
    experts = reader.size("num_local_experts", "num_experts", default=16)
    reader.fixed("num_experts_per_tok", 1, why="tokens are weighted before their only expert")
    step = reader.size("interleave_moe_layer_step", default=1)
    sparse = {*range(step - 1, layers, step)}
    if reader.fields.get("moe_layers") is not None:
        sparse = {*reader.sizes("moe_layers")}
    else:
        reader.without_effect("moe_layers")
    if sparse.isdisjoint(range(layers)):
        return {}
    return {
        "num_experts": experts,
        "moe_router_topk": 1,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_ffn_hidden_size": inner,
        "moe_shared_expert_intermediate_size": inner,
        "moe_layer_freq": layer_frequency([layer in sparse for layer in range(layers)]),
    }
