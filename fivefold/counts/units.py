"""The units in which a stage's state is gathered and offloaded: layers, and the stage's ends."""

from collections.abc import Iterator
from itertools import accumulate

from fivefold.counts.blocks import GatheredBlock, stage_blocks
from fivefold.counts.policy import engine_policy
from fivefold.counts.shards import num_expert_shards, num_shards
from fivefold.description.kinds import layer_kind
from fivefold.description.shape import StageParts
from fivefold.layout import Layout

_ORDER = ("layers", "mtp", "")


def unit_of(name: str) -> str:
    """The unit that a parameter belongs to: "layers.3", "mtp.0", or "" for the ends."""
    kind, _, rest = name.partition(".")
    return f"{kind}.{rest.partition('.')[0]}" if kind in _ORDER[:2] else ""


def units_on_host(layout: Layout, pp_rank: int) -> dict[tuple[int, str], GatheredBlock]:
    """The units of a rank's state that are in host memory, by stage.

    Whole layers, the last ones first, since their gradients come first, and the ends of the stages
    after all of them, until the share is at least `optimizer_offload_fraction`.
    """
    share = engine_policy(layout.config).offloaded
    shards, expert_shards = num_shards(layout), num_expert_shards(layout)
    units = [
        ((index, name), block)
        for index, stage in reversed(layout.stages_of(pp_rank).items())
        for name, block in _stage_units(layout, stage)
    ]
    units.sort(key=lambda unit: _ORDER.index(unit[0][1].partition(".")[0]))
    sizes = [block.sizes[0] / shards + block.sizes[1] / expert_shards for _, block in units]
    before = accumulate(sizes, initial=0.0)
    return {
        unit: block
        for (unit, block), moved in zip(units, before, strict=False)
        if moved < share * sum(sizes)
    }


def _stage_units(layout: Layout, stage: StageParts) -> Iterator[tuple[str, GatheredBlock]]:
    """The blocks of a stage by name prefix, last layers first."""
    ends, *blocks = stage_blocks(layout, stage)
    model = layout.config.model
    if stage.mtp:
        yield from ((f"mtp.{depth}", blocks[0]) for depth in reversed(range(blocks[0].count)))
        blocks = blocks[1:]
    kinds = dict.fromkeys(layer_kind(model, layer) for layer in stage.layers)
    of = dict(zip(kinds, blocks, strict=True))
    for layer in reversed(stage.layers):
        yield f"layers.{layer}", of[layer_kind(model, layer)]
    yield "", ends
