"""Fewer layers for verification, in stages of the same structure. No torch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fivefold.config.by_layer import IN_BF16
from fivefold.config.config import Config
from fivefold.config.layer_pattern import (
    Mixer,
    layer_frequency,
    unrotated_frequency,
    window_frequency,
)
from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.layout import Layout
from fivefold.pipeline.ir import v_placement
from fivefold.pipeline.split.stages import StageSpec, layout_string

_SPLIT_FLAGS: dict[str, Any] = {
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}


def shallower(layout: Layout, config: Config) -> Config:
    """Keep few layers per stage, with the stages' structure.

    A stage keeps one layer, or two if it has more than the smallest stage; empty stages stay empty;
    stages with and without experts keep one more, and so do those that recompute some of theirs.
    """
    model, stages = config.model, layout.split.stages
    counts = [len(stage.layers) for stage in stages]
    if len(counts) == 1:
        kinds = len({_kind_of(model, layer) for layer in stages[0].layers})
        few = max(2, len(set(config.parallel.cp_comm_type)), kinds)
        taken = _taken(model, stages[0].layers, few)
        return _with_layers(_recomputing_fewer(config, counts, [len(taken)]), taken)
    fewest = min(count for count in counts if count)
    kinds = max(len({_kind_of(model, layer) for layer in stage.layers}) for stage in stages)
    least = min(fewest, max(kinds, 1 + _recomputes_some(config.memory, counts)))
    kept: list[StageSpec] = []
    taken = []
    for stage, count in zip(stages, counts, strict=True):
        chosen = _taken(model, stage.layers, least if count == fewest else least + 1)
        kept.append(replace(stage, layers=tuple(range(len(taken), len(taken) + len(chosen)))))
        taken += chosen
    placement = layout.split.placement
    is_v = placement == v_placement(layout.grid.pp, len(counts)) and len(counts) > layout.grid.pp
    text = ("v:" if is_v else "") + layout_string(kept)
    config = config.with_values(pipeline_model_parallel_layout=text, **_SPLIT_FLAGS)
    config = _recomputing_fewer(config, counts, [len(stage.layers) for stage in kept])
    return _with_layers(config, taken)


def _recomputes_some(memory: MemoryConfig, counts: Sequence[int]) -> bool:
    """Whether a stage recomputes only some of its layers, or all in more than one group."""
    again = memory.recomputes_first_layers or memory.recompute_granularity == "full"
    numbers = memory.recompute_num_layers
    each = numbers * len(counts) if len(numbers) == 1 else numbers
    return again and any(0 < n < count for n, count in zip(each, counts, strict=True))


def _recomputing_fewer(config: Config, counts: Sequence[int], left: Sequence[int]) -> Config:
    """The same kind of recomputation for the remaining layers: none, some or all of each stage."""
    numbers = config.memory.recompute_num_layers
    if len(numbers) == 1:  # one number for every stage; the largest stage keeps its like
        counts, left = [max(counts)], [max(left)]
    if len(numbers) != len(counts):
        return config
    fewer = tuple(map(_fewer_recomputed, numbers, counts, left))
    return config.with_values(recompute_num_layers=fewer)


def _fewer_recomputed(number: int, count: int, left: int) -> int:
    """Number of recomputed layers of a stage, or of a group: none, some or all of the remaining
    ones."""
    if number >= count:
        return left or number
    return min(number, max(left - 1, 1))


def _taken(model: ModelConfig, layers: Sequence[int], count: int) -> list[int]:
    """At most `count` of these layers: with and without experts, of each mixer, and from both bf16
    ends, if there were such."""
    firsts = {_kind_of(model, layer): layer for layer in reversed(layers)}
    others = [layer for layer in layers if layer not in firsts.values()]
    return sorted([*sorted(firsts.values(), key=model.is_wide), *others][:count])


def _with_layers(config: Config, layers: Sequence[int]) -> Config:
    """Keep only these layers, which alternate between the cp_comm_types in use."""
    model, kinds = config.model, tuple(dict.fromkeys(config.parallel.cp_comm_type))
    if len(kinds) > 1:
        kinds = tuple(kinds[place % len(kinds)] for place in range(len(layers)))
    if model.hybrid_override_pattern is not None:
        config = config.with_values(hybrid_override_pattern=_few_mixers(model, layers))
    elif model.num_experts is not None:
        config = config.with_values(moe_layer_freq=layer_frequency([*map(model.is_moe, layers)]))
    if model.window_attn_skip_freq is not None:
        has = _some_of([model.window_of(n) is not None for n in range(model.num_layers)], layers)
        config = config.with_values(window_attn_skip_freq=window_frequency(has))
    if model.linear_attention_freq is not None:
        has = _some_of([*map(model.is_linear, range(model.num_layers))], layers)
        config = config.with_values(linear_attention_freq=window_frequency(has))
    if model.no_rope_freq is not None:
        has = _some_of([not model.rotates(n) for n in range(model.num_layers)], layers)
        config = config.with_values(no_rope_freq=unrotated_frequency(has))
    config = config.with_values(**_few_in_bf16(model, layers))
    return config.with_values(num_layers=len(layers), cp_comm_type=kinds)


def _few_in_bf16(model: ModelConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Number of these layers that stay in bf16; the setting's default if there are none."""
    first = sum(_end_of(model, layer) == 1 for layer in layers)
    last = sum(_end_of(model, layer) == 2 for layer in layers)
    few = (True, first, last) if first + last else (getattr(ModelConfig, name) for name in IN_BF16)
    return dict(zip(IN_BF16, few, strict=True))


def _end_of(model: ModelConfig, layer: int) -> int:
    """1 for a bf16 layer at the start, 2 for one at the end, 0 for others."""
    return model.is_wide(layer) * (1 if layer < model.num_layers_at_start_in_bf16 else 2)


def _some_of(has: Sequence[bool], layers: Sequence[int]) -> list[bool]:
    """Which of the kept layers have a property: one with it and one without, if there were both."""
    few = [has[layer] for layer in layers]
    few[0] |= any(has) and not any(few)
    few[-1] &= all(has) or not all(few)
    return few


def _kind_of(model: ModelConfig, layer: int) -> tuple[Mixer | None, bool, int]:
    """The properties of a layer that a shrunk model keeps: mixer, experts, and bf16."""
    return model.mixer_of(layer), model.is_moe(layer), _end_of(model, layer)


def _few_mixers(model: ModelConfig, layers: Sequence[int]) -> str:
    """The mixers of these layers, with at least one that has a state and one with experts, if there
    were any."""
    few = [str(model.mixer_of(layer)) for layer in layers]
    few[0] = few[0] if "M" in few else "M"
    if model.num_experts is not None and "E" not in few:
        few[-1] = "E"
    return "".join(few)
