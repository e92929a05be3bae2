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
        to_host: bytes to the host: gradients, each time that they are reduced, and state that
            the device updates.
        to_device: bytes to the device: sums of gradients to which more is added, and updated
            weights, or all that the device needs to update them.
        weights: bytes to the device: weights that are there for their gathers only.
    """

    to_host: float
    to_device: float
    weights: float


def host_traffic(layout: Layout, rank: int) -> HostTraffic:
    """The bytes that a step copies for the optimizer of a rank; 0 without offloading."""
    units = units_on_host(layout, layout.grid.coordinates(rank)["pp"])
    policy = engine_policy(layout.config)
    state = policy.master + policy.moments
    at, first = ShardPlace.of(layout, rank), ShardPlace.first(layout)
    to_host = to_device = weights = 0.0
    gathers = ShardedVolumes(layout, rank).gathers()
    for record in parameter_records(layout, rank):
        if (record.stage, unit_of(record.name)) in units:
            size = at.part(record.shape, experts=record.experts)
            times = 1 if len(record.sums) > 1 else times_reduced(layout, experts=record.experts)
            to_host += size * times * policy.gradient
            to_device += size * (times - 1) * policy.gradient
            if policy.updates_on_device:
                kept = size * state + beyond(record.shape, size, policy)
                to_host += kept + size * (policy.compute if policy.offloads_weights else 0)
                to_device += kept + size * policy.gradient
            if policy.offloads_weights:
                padded = first.part(record.shape, experts=record.experts)
                weights += padded * policy.compute * gathers[record.stage]
            elif not policy.updates_on_device:
                to_device += size * policy.compute
    return HostTraffic(to_host, to_device, weights)


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
