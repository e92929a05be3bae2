"""Chooses the ranks of a job that are rehearsed, and their step; torch-free."""

from dataclasses import replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from fivefold.check import check
from fivefold.counts.state import stages_held
from fivefold.description.kinds import layer_kind
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.predict.memory.liveness import Acts, Moments, moments

DENSE_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


def rehearsed_layout(layout: Layout) -> Layout:
    """The layout with even routing, and a step just long enough to show all that a rank ever holds.

    State for a disk is kept in host memory, since shapes cannot be read from a file.

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
    """Ranks that represent all: the first of each pipeline rank and, for one pipeline rank of each
    kind, the last of every group, whose shards may be short.

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
    """What pipeline ranks with similar stages have in common."""
    stages = [layout.split.stages[index] for index in stages_held(layout, pp_rank)]
    model = layout.config.model
    return tuple(
        (s.embedding, s.head, s.mtp, *(layer_kind(model, layer) for layer in s.layers))
        for s in stages
    )


def enough_to_hold_all(layout: Layout) -> int:
    """The fewest microbatches with which every moment of a full step has a counterpart.

    In a counterpart a rank runs the same action, with at least as many microbatches of each stage
    in flight, and gradients of at least the same stages.
    """
    splits = layout.sends_dx_first
    whole = list(map(_by_action, moments(layout, splits_backward=splits)))
    most = layout.enough_microbatches
    # As many are in flight at once in the full step, and each is counted once for a stage.
    least = max(float(rows.max()) for held in whole for rows in held.values())
    for count in range(max(ceil(least - 1e-9), 1), most):
        try:
            found = moments(layout, splits_backward=splits, num_microbatches=count)
        except ConfigError:
            continue
        if all(map(_has_likes, map(_by_action, found), whole)):
            return count
    return most


def _by_action(found: Moments) -> dict[Acts, NDArray[np.float64]]:
    """For each action, what is held at each moment in which it runs, one row per moment."""
    held = np.hstack([found.kept, found.inputs, found.waiting, -found.unmade])
    return {
        acts: np.unique(held[found.which == which], axis=0)
        for which, acts in enumerate(found.running)
    }


def _has_likes(
    short: dict[Acts, NDArray[np.float64]], whole: dict[Acts, NDArray[np.float64]]
) -> bool:
    """Whether every row of a full step is at most some row of a shorter step, element by
    element."""
    if short.keys() != whole.keys():
        return False
    for acts, rows in whole.items():
        reaches = np.all(rows[:, None] <= short[acts][None] + 1e-9, axis=2)
        if not np.all(np.any(reaches, axis=1)):
            return False
    return True
