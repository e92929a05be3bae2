"""Predicts the times of what data-parallel ranks send: gathered parameters, reduced gradients."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fivefold.config.dependents import sums_in_buckets
from fivefold.counts.state import stage_blocks
from fivefold.layout import Layout
from fivefold.mesh.buckets import buckets_of
from fivefold.model.shape import StageParts
from fivefold.predict.cluster import Cluster
from fivefold.predict.communication import GroupSpan, all_reduce, reduce_scatter, span
from fivefold.predict.software import Software
from fivefold.predict.zeropp import gather_seconds, reduction_seconds


@dataclass(frozen=True)
class Moves:
    """What data parallelism sends for one stage.

    Attributes:
        gathered: seconds to gather its parameters once.
        reduced: seconds to reduce its gradients once.
        messages: messages of that reduction.
    """

    gathered: float
    reduced: float
    messages: int


def data_groups(layout: Layout, cluster: Cluster) -> tuple[GroupSpan, GroupSpan, GroupSpan]:
    """The groups of dense shards, of their replicas, and of experts' shards."""
    grid = layout.grid
    shard = span(cluster, grid.dp_shard * grid.cp, grid.tp)
    replica = span(cluster, grid.dp_replicate, grid.tp * grid.cp * grid.dp_shard)
    expert = span(cluster, grid.edp, grid.ep * grid.etp)
    return shard, replica, expert


def moves(layout: Layout, cluster: Cluster, software: Software, spec: StageParts) -> Moves:
    """The transfers of a stage's parameters and gradients, block by block or in buckets."""
    parallel, grid = layout.config.parallel, layout.grid
    shard, replica, expert = data_groups(layout, cluster)
    wire = software.gradient_bytes or (2 if parallel.grad_reduce_in_bf16 else 4)
    if sums_in_buckets(layout.config) and not software.by_tensor:
        buckets = [*_buckets(layout, spec, shard, expert)]
        seconds = sum(all_reduce(cluster, group, size * wire) for group, size in buckets)
        return Moves(0.0, seconds, len(buckets))
    whole = not parallel.sharding.splits_optimizer
    in_pairs = parallel.ddp_reduce_scatter_with_fp32_accumulation
    nodes, expert_nodes = layout.node_sizes
    gathered = reduced = 0.0
    for block in stage_blocks(layout, spec):
        for group, stride, node, shapes in (
            (shard, grid.tp, nodes, block.dense),
            (expert, grid.ep * grid.etp, expert_nodes, block.experts),
        ):
            pieces = [(shape,) for shape in shapes] if software.by_tensor else [shapes]
            for piece in pieces if shapes else []:
                size = sum(map(prod, piece))
                if whole:
                    reduced += block.count * all_reduce(cluster, group, size * wire)
                    continue
                if rate := software.gather_rate:
                    gathered += block.count * size * 2 / rate
                    reduced += block.count * size * wire / rate
                    continue
                once = gather_seconds(layout, cluster, group, stride, node, piece)
                gathered += block.count * once
                scattered = (
                    all_reduce(cluster, group, size * wire)
                    if software.reduces_whole
                    else reduce_scatter(cluster, group, size * wire, in_pairs=in_pairs)
                )
                if parallel.zero_quantized_gradients:
                    scattered = reduction_seconds(cluster, group, stride, node, piece)
                reduced += block.count * scattered
                if group is shard:
                    share = size * wire / shard.size
                    reduced += block.count * all_reduce(cluster, replica, share)
    return Moves(gathered, reduced, len(spec.layers))


def _buckets(
    layout: Layout, spec: StageParts, shard: GroupSpan, expert: GroupSpan
) -> Iterator[tuple[GroupSpan, int]]:
    """The group and the elements of each bucket of a stage's gradients."""
    blocks, limit = stage_blocks(layout, spec), layout.config.parallel.ddp_bucket_size
    dense = [prod(shape) for block in blocks for shape in block.dense * block.count]
    experts = [prod(shape) for block in blocks for shape in block.experts * block.count]
    for group, sizes in ((shard, dense), (expert, experts)):
        for part in buckets_of(sizes, limit):
            yield group, sum(sizes[part])
