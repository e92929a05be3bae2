"""EXAONE 4, OLMo 3 and Gemma 3, whose layers with a window have other positions; Gemma 1 and 2."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.config.huggingface.llama import layer_types, llama_like, window_settings
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, rope_by_layer
from fivefold.config.layer_pattern import unrotated_frequency
from fivefold.config.model import ModelConfig


def exaone4(reader: Reader, kind: str) -> ModelConfig:
    """EXAONE 4: norms after attention and MLP, windows in three of four layers, RoPE in these.

    K-EXAONE has these layers with norms before.
    """
    model = llama_like(reader, kind)
    layers = model.num_layers
    window = reader.optional_size("sliding_window", default=4096, least=2)
    slides = _all_but_every(reader, "sliding_window_pattern", 4, layers)
    if window is None:
        if any(slides) or reader.fields.get("layer_types") is None:
            why = "layer_types has to say that no layer has one"
            reader.unsupported("sliding_window", None, [4096], why)
        return model
    if not any(slides):
        why = f"of num_hidden_layers {layers} none has it, and layers without it have no RoPE"
        reader.unsupported("sliding_window", window, [None], why)
    without = unrotated_frequency([not slide for slide in slides])
    return replace(model, no_rope_freq=without, **window_settings(window, slides))


def windows_with_rope(reader: Reader, layers: int) -> dict[str, Any]:
    """ModelConfig settings for windows in all but every fourth layer, and RoPE where they are."""
    slides = _all_but_every(reader, "sliding_window_pattern", 4, layers)
    window = _window(reader, slides)
    if not any(slides):
        why = f"of num_hidden_layers {layers} none has it, and layers without it have no RoPE"
        reader.unsupported("sliding_window", window, [4096], why)
        return {}
    without = unrotated_frequency([not slide for slide in slides])
    return {"no_rope_freq": without, **window_settings(window, slides)}


def olmo3(reader: Reader, kind: str) -> ModelConfig:
    """OLMo 3: OLMo 2 with windows in three of four layers, whose RoPE is not scaled."""
    model = llama_like(reader, kind)
    slides, usual = layer_types(reader, model.num_layers), 500000.0
    slides = slides or tuple((layer + 1) % 4 != 0 for layer in range(model.num_layers))
    if reader.fields.get("rope_parameters") is None:
        why = f"transformers 5 gives layers with a window {usual:.0f}, whatever stands here"
        reader.fixed("rope_theta", usual, why=why)
    rope, base = rope_by_layer(reader, Rope(usual, 1.0, "default"), usual)
    return replace(model, **_in_layers(reader, slides, rope, base))


def gemma(reader: Reader, kind: str) -> ModelConfig:
    """Gemma: weights of norms that start at 0, and embeddings times the root of their size."""
    model = llama_like(reader, kind)
    reader.without_effect("hidden_activation")
    reader.fixed("use_bidirectional_attention", None, False)
    # In files of the first release gelu means its approximation by tanh.
    function = "gelu_tanh" if model.activation_func == "gelu" else model.activation_func
    return replace(model, activation_func=function, **_gemma_settings(model))


def gemma2(reader: Reader, kind: str) -> ModelConfig:
    """Gemma 2: norms around attention and MLP, windows in every other layer, capped scores and
    logits."""
    model = llama_like(reader, kind)
    reader.without_effect("hidden_act", "cache_implementation", "sliding_window_size")
    reader.fixed("use_bidirectional_attention", None, False)
    slides = layer_types(reader, model.num_layers)
    slides = slides or tuple(layer % 2 == 0 for layer in range(model.num_layers))
    return replace(
        model,
        softmax_scale=_scale(reader, model),
        attn_logit_softcapping=_cap(reader, "attn_logit_softcapping", 50.0),
        final_logit_softcapping=_cap(reader, "final_logit_softcapping", 30.0),
        **_gemma_settings(model),
        **window_settings(_window(reader, slides), slides),
    )


def gemma3(reader: Reader, kind: str) -> ModelConfig:
    """Gemma 3 for text: norms around attention and MLP, windows in five of six layers, in which
    RoPE has another base."""
    model = llama_like(reader, kind)
    # The last is what transformers has made layer_types of.
    reader.without_effect("hidden_act", "cache_implementation", "_sliding_window_pattern")
    reader.fixed("use_bidirectional_attention", False, None)
    why = "transformers caps scores in one of its implementations of attention and not in others"
    reader.fixed("attn_logit_softcapping", None, why=why)
    slides = _all_but_every(reader, "sliding_window_pattern", 6, model.num_layers)
    rope, base = rope_by_layer(
        reader, Rope(1000000.0, 1.0, "default"), 10000.0, local="rope_local_base_freq"
    )
    return replace(
        model,
        softmax_scale=_scale(reader, model),
        final_logit_softcapping=_cap(reader, "final_logit_softcapping", None),
        **_gemma_settings(model),
        **_in_layers(reader, slides, rope, base),
    )


def _gemma_settings(model: ModelConfig) -> dict[str, Any]:
    return {"apply_layernorm_1p": True, "embedding_multiplier": model.hidden_size**0.5}


def _scale(reader: Reader, model: ModelConfig) -> float | None:
    size = reader.size("query_pre_attn_scalar", default=256)
    return None if size == model.head_dim else size**-0.5


def _cap(reader: Reader, name: str, default: float | None) -> float | None:
    """A cap, which null in the file takes away."""
    if name in reader.fields and reader.fields[name] is None:
        reader.without_effect(name)
        return None
    found = reader.optional_number(name)
    return default if found is None else found


def _all_but_every(reader: Reader, name: str, default: int, layers: int) -> Sequence[bool]:
    """Which layers have a window: those that are listed, or all but every Nth of a field."""
    listed = layer_types(reader, layers)
    if listed is not None:
        reader.without_effect(name)
        return listed
    number = reader.size(name, default=default)
    return tuple((layer + 1) % number != 0 for layer in range(layers))


def _window(reader: Reader, slides: Sequence[bool]) -> int | None:
    window = reader.optional_size("sliding_window", default=4096, least=2)
    if window is None and any(slides):
        reader.unsupported("sliding_window", None, [4096], "layer_types has layers with a window")
    return window


def _in_layers(reader: Reader, slides: Sequence[bool], rope: Rope, base: float) -> dict[str, Any]:
    """ModelConfig settings for windows, and RoPE with another base, unscaled, where they are."""
    window = _window(reader, slides)
    found = rope.settings() | window_settings(window, slides)
    other = rope.scaling or base != rope.theta
    return found | {"rotary_base_local": base if other and "window_size" in found else None}
