"""Sliding windows, in all layers or in some, and layers without RoPE."""

from collections.abc import Sequence
from typing import Any

from fivefold.config.huggingface.family import Fields
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope
from fivefold.config.layer_pattern import unrotated_frequency, window_frequency
from fivefold.config.model import ModelConfig


def none(reader: Reader, layers: int) -> dict[str, Any]:
    """For families without windows."""
    reader.fixed("sliding_window", None)
    return {}


def everywhere(reader: Reader, layers: int, default: int | None = None) -> dict[str, Any]:
    """One window in all layers, or none.

    A window counts even if it is as long as `max_position_embeddings`, which limits no sequence.
    """
    width = width_of(reader, default)
    return settings(width, (width is not None,) * layers)


def width_of(reader: Reader, default: int | None = 4096, *, least: int = 2) -> int | None:
    """Tokens in a window, including the token itself; None: there is none."""
    width = reader.optional_size("sliding_window", default=default, least=least) or None
    if width == 1:
        reader.unsupported("sliding_window", width, [2])
    return width


def settings(width: int | None, slides: Sequence[bool]) -> dict[str, Any]:
    """ModelConfig settings for a sliding window in some layers.

    Args:
        width: tokens in the window; Hugging Face's width includes the token itself, Megatron-LM's
            does not.
        slides: whether each layer has the window.
    """
    if width is None or not any(slides):
        return {}
    skip = None if all(slides) else window_frequency(slides)
    return {"window_size": width - 1, "window_attn_skip_freq": skip}


def listed(reader: Reader, layers: int) -> tuple[bool, ...] | None:
    """Whether each layer has a window, if the config.json lists it; else None."""
    types = reader.texts("layer_types", ("full_attention", "sliding_attention"))
    if types is None:
        return None
    if not reader.has_each_layer("layer_types", types, layers):
        return (False,) * layers
    return tuple(kind == "sliding_attention" for kind in types)


def all_but_every(reader: Reader, default: int, layers: int) -> Sequence[bool]:
    """Which layers have a window: those that are listed, or all but every Nth."""
    slides = listed(reader, layers)
    if slides is not None:
        reader.without_effect("sliding_window_pattern")
        return slides
    number = reader.size("sliding_window_pattern", default=default)
    return tuple((layer + 1) % number != 0 for layer in range(layers))


def needed(reader: Reader, slides: Sequence[bool], default: int = 4096) -> int | None:
    """The width of a window that some layers have."""
    window = reader.optional_size("sliding_window", default=default, least=2)
    if window is None and any(slides):
        why = "layer_types has layers with a window"
        reader.unsupported("sliding_window", None, [default], why)
    return window


def with_rope(
    reader: Reader, window: int | None, slides: Sequence[bool], works: int | None
) -> dict[str, Any]:
    """ModelConfig settings for windows, with RoPE only in the layers that have one."""
    if not any(slides):
        why = f"of num_hidden_layers {len(slides)} none has it, and layers without it have no RoPE"
        reader.unsupported("sliding_window", window, [works], why)
    without = unrotated_frequency([not slide for slide in slides])
    return {"no_rope_freq": without, **settings(window, slides)}


def beside_rope(reader: Reader, slides: Sequence[bool], rope: Rope, base: float) -> dict[str, Any]:
    """ModelConfig settings for windows, and RoPE with another base, unscaled, where they are."""
    found = rope.settings() | settings(needed(reader, slides), slides)
    other = rope.scaling or base != rope.theta
    return found | {"rotary_base_local": base if other and "window_size" in found else None}


def unrotated(reader: Reader, layers: int, *, may_be_empty: bool = True) -> tuple[bool, ...]:
    """Which layers of SmolLM3 and Llama 4 have no RoPE: 0 in a list, or every fourth.

    Args:
        reader: reader of the file.
        layers: number of layers.
        may_be_empty: whether an empty list says nothing, as in Llama 4.
    """
    interval = reader.size("no_rope_layer_interval", default=4)
    listed = reader.sizes("no_rope_layers")
    if not listed and (may_be_empty or reader.fields.get("no_rope_layers") is None):
        return tuple((layer + 1) % interval == 0 for layer in range(layers))
    if len(listed) < layers:
        sizes = f"{len(listed)} entries, {layers} layers"
        reader.mistakes.add(f"no_rope_layers must have one entry a layer: {sizes}")
        return (False,) * layers
    return tuple(not turns for turns in listed[:layers])


def written_width(window: int | None) -> int | None:
    """A window's width in the file, which includes the token itself."""
    return None if window is None else window + 1


def written_types(model: ModelConfig) -> list[str]:
    """Whether each layer has a window."""
    limited = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    return [f"{'sliding' if has else 'full'}_attention" for has in limited]


def fields(model: ModelConfig) -> Fields:
    """Fields of a window, and of the layers that have it, one by one."""
    width = written_width(model.window_size)
    return {"sliding_window": width, "layer_types": written_types(model)}
