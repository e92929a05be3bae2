"""Llama 4 for text: experts that read weighted tokens, attention in chunks, layers without RoPE."""

from dataclasses import replace
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.family import Family, Fields, Tensors
from fivefold.config.huggingface.generic import read_balancing
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.layer_pattern import layer_frequency, unrotated_frequency
from fivefold.config.model import ModelConfig


def _biases(reader: Reader) -> dict[str, Any]:
    reader.fixed("attention_bias", False)
    return {}


_LLAMA4 = LlamaLike(
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    null_head_dim=True,
    dense=False,
    biases=_biases,
    windows=None,
)


def _read(reader: Reader) -> ModelConfig:
    """Adjacent rotary features are paired; heads are normalised after RoPE, without weights."""
    model = _LLAMA4.read(reader)
    reader.fixed("for_llm_compressor", False)
    reader.without_effect("cache_implementation", "router_jitter_noise")
    unrotated = windows.unrotated(reader, model.num_layers)
    return replace(
        model,
        ffn_hidden_size=reader.size("intermediate_size_mlp", default=16384),
        qk_l2_norm=reader.flag("use_qk_norm", True),
        no_rope_freq=unrotated_frequency(unrotated),
        attention_chunk_size=_chunks(reader, unrotated),
        **_temperature(reader, unrotated),
        **_experts(reader, model.num_layers),
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


def _write(model: ModelConfig) -> Fields:
    rotates = [model.rotates(layer) for layer in range(model.num_layers)]
    chunks, types = model.attention_chunk_size, ("full_attention", "chunked_attention")
    return _LLAMA4.write(model) | {
        "intermediate_size": model.expert_ffn_size,
        "intermediate_size_mlp": model.ffn_size,
        "num_local_experts": model.num_experts or 1,  # of no layer, but transformers wants a number
        "num_experts_per_tok": 1,
        "moe_layers": [layer for layer in range(model.num_layers) if model.is_moe(layer)],
        "use_qk_norm": model.qk_l2_norm,
        "no_rope_layers": [int(turns) for turns in rotates],
        "attention_chunk_size": chunks,
        "layer_types": [types[chunks is not None and turns] for turns in rotates],
        "attn_temperature_tuning": model.attn_temperature_tuning,
        "floor_scale": model.floor_scale,
        "attn_scale": model.attn_scale,
    }


_TENSORS = Tensors(
    {
        ".mlp.shared_experts.": ".feed_forward.shared_expert.",
        ".mlp.experts.gate_proj.weight": ".feed_forward.experts.gate_up_proj",
        ".mlp.experts.up_proj.weight": ".feed_forward.experts.gate_up_proj",
        ".mlp.experts.down_proj.weight": ".feed_forward.experts.down_proj",
        ".mlp.": ".feed_forward.",
    },
    experts="transposed",
    pairs=True,
)
FAMILIES = (Family("llama4_text", "Llama4ForCausalLM", _read, _write, _TENSORS),)
