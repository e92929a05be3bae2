"""What the backward of each layer recomputes; torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fivefold.description.shape import ModelParts, all_layers
from fivefold.layout import Layout


@dataclass(frozen=True)
class LayerRecompute:
    """What the backward of a layer recomputes.

    Attributes:
        whole: whether it is the whole layer.
        ends_group: whether it is the last layer that is recomputed together.
        modules: modules that it is otherwise.
    """

    whole: bool
    ends_group: bool
    modules: tuple[str, ...]


def recomputed_layers(layout: Layout, stage: int) -> Iterator[tuple[int, LayerRecompute]]:
    """The layers of a stage of the program, and what is recomputed of each."""
    memory, model = layout.memory_of(stage), layout.config.model
    parts = layout.split.stages[stage % len(layout.split.stages)]
    for group, again in memory.recomputed_groups(len(parts.layers)):
        for place in group:
            modules = memory.of_layer(place).recomputed_modules
            yield parts.layers[place], LayerRecompute(again, again and place == group[-1], modules)
    # An MTP module ends with a norm.
    whole = memory.recompute_granularity == "full"
    for layer in all_layers(model, ModelParts(mtp=parts.mtp)):
        yield layer, LayerRecompute(whole, False, memory.recomputed_modules)


RECOMPUTED_LINEARS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mla_up_proj": tuple(f"self_attn.{up}_proj." for up in ("q", "q_b", "kv_b")),
        "mlp": tuple(f"mlp.{name}_proj." for name in ("gate", "up", "down")),
        "moe": ("mlp.router.", "mlp.shared_expert", "mlp.fc1_latent_proj.", "mlp.fc2_latent_proj."),
        "shared_experts": ("mlp.shared_experts.",),
        "a2a_overlap_attn": ("self_attn.",),
        "a2a_overlap_post_attn": ("mlp.router.",),
    }
)
"""Recomputed module -> prefixes of the names of its linear layers, without experts."""
