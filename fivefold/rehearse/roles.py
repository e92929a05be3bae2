"""Which ranks of a job are rehearsed, and on which step; torch-free."""

from dataclasses import replace

from fivefold.check import check
from fivefold.counts.state import stages_held
from fivefold.description.kinds import layer_kind
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.rehearse.shortest import enough_to_hold_all

DENSE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def rehearsed_layout(layout: Layout) -> Layout:
    """The layout with a step as short as shows all that a rank ever holds, and even routing.

    What would lie on a disk is in host memory: shapes cannot be read from a file.

    Raises:
        ConfigError: the layout cannot be trained.
    """
    training = layout.config.training
    count = enough_to_hold_all(layout)
    each = training.micro_batch_size * layout.grid.dp
    config = layout.config.with_batch(count * each).with_values(
        compile=False,
        optimizer_offload_path=None,
        param_offload_path=None,
    )
    if config.model.num_experts is not None:
        even = replace(config.experts, moe_router_force_load_balancing=True)
        config = replace(config, experts=even)
    return check(config, layout.grid.world_size)


def roles(layout: Layout, *, every: bool = False) -> list[int]:
    """Ranks that stand for all: the first of each pipeline rank, and for one pipeline rank of each
    kind also the last of every group, whose shards may be short.

    Args:
        layout: layout of the job.
        every: whether to name all ranks.
    """
    grid = layout.grid
    if every:
        return list(range(grid.world_size))
    firsts = grid.group_of(0, ("pp",))
    found = set(firsts)
    kinds = {_kind(layout, pp_rank): rank for pp_rank, rank in reversed([*enumerate(firsts)])}
    for rank in kinds.values():
        found |= {grid.group_of(rank, (axis,))[-1] for axis in DENSE_AXES}
        if layout.config.model.num_experts is not None:
            expert_axes = [axis for axis in EXPERT_AXES if axis != "pp"]
            found |= {grid.group_of(rank, (axis,), EXPERT_AXES)[-1] for axis in expert_axes}
    return sorted(found)


def _kind(layout: Layout, pp_rank: int) -> tuple[object, ...]:
    """What two pipeline ranks have in common whose stages are alike."""
    stages = [layout.split.stages[index] for index in stages_held(layout, pp_rank)]
    model = layout.config.model
    return tuple(
        (s.embedding, s.head, s.mtp, *(layer_kind(model, layer) for layer in s.layers))
        for s in stages
    )
