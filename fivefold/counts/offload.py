"""Bytes that a step copies between the device and the host for an optimizer in host memory."""

from dataclasses import dataclass

from fivefold.counts.parameters import parameter_records
from fivefold.counts.policy import engine_policy
from fivefold.counts.sharded import ShardedVolumes
from fivefold.counts.shards import ShardPlace, num_expert_shards
from fivefold.counts.state import beyond
from fivefold.counts.units import unit_of, units_on_host
from fivefold.layout import Layout


@dataclass(frozen=True)
class HostTraffic:
    """Bytes copied in a step.

    Attributes:
        out: bytes to the host: gradients, each time that they are reduced, and what the device
            updates.
        back: bytes to the device: sums of gradients to which more is added, and updated weights,
            or all that the device needs to update them.
        brought: bytes to the device: weights that are there for their gathers only.
    """

    out: float
    back: float
    brought: float


def host_traffic(layout: Layout, rank: int) -> HostTraffic:
    """The bytes that a step copies for the optimizer of a rank; 0 without offloading."""
    units = units_on_host(layout, layout.grid.coordinates(rank)["pp"])
    policy = engine_policy(layout.config)
    state = policy.master + policy.moments
    at, first = ShardPlace.of(layout, rank), ShardPlace.first(layout)
    out = back = brought = 0.0
    often = ShardedVolumes(layout, rank).gathers()
    for record in parameter_records(layout, rank):
        if (record.stage, unit_of(record.name)) in units:
            size = at.part(record.shape, experts=record.experts)
            times = 1 if len(record.sums) > 1 else times_reduced(layout, experts=record.experts)
            out += size * times * policy.gradient
            back += size * (times - 1) * policy.gradient
            if policy.visits:
                kept = size * state + beyond(record.shape, size, policy)
                out += kept + size * (policy.compute if policy.away else 0)
                back += kept + size * policy.gradient
            if policy.away:
                padded = first.part(record.shape, experts=record.experts)
                brought += padded * policy.compute * often[record.stage]
            elif not policy.visits:
                back += size * policy.compute
    return HostTraffic(out, back, brought)


def times_reduced(layout: Layout, *, experts: bool) -> int:
    """How often in a step a gradient is complete over the ranks that share its parameter's state.

    Replicas of shards are summed once, at the end, and what is not reduced in every microbatch too.
    """
    grid, parallel = layout.grid, layout.config.parallel
    replicas = grid.edp // num_expert_shards(layout) if experts else grid.dp_replicate
    if replicas > 1:
        return 1
    backwards = layout.num_microbatches // layout.num_copies * parallel.num_sequence_slices
    return parallel.sharding.reductions(backwards)
