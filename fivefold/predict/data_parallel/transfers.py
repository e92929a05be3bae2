"""Predicts the times of data-parallel communication: gathering parameters, reducing gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod

from fivefold.counts.blocks import stage_blocks
from fivefold.counts.shards import num_expert_shards
from fivefold.description.shape import StageParts
from fivefold.hardware import Gpu
from fivefold.layout import Layout
from fivefold.mesh.buckets import buckets_of
from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.zeropp import SharedMessage, gather_seconds, reduction_seconds
from fivefold.predict.software import Software
from fivefold.predict.times.communication import (
    GroupSpan,
    all_reduce,
    broadcasts,
    reduce_scatter,
    span,
)
from fivefold.predict.times.compute import Phases, elementwise, overlapped

COPIED = 6.0
"""Elements read and written for each of a bucket: copied into it, divided, and copied back."""


@dataclass(frozen=True)
class StageTransfers:
    """Data-parallel communication of one stage.

    Attributes:
        gathered: seconds to gather its parameters once.
        reduced: seconds to reduce its gradients once.
        messages: messages of that reduction.
        first: seconds to gather the embedding, and what is gathered with it, of `gathered`.
        last: seconds to reduce their gradients, of `reduced`.
    """

    gathered: float
    reduced: float
    messages: int
    first: float = 0.0
    last: float = 0.0


def exposed(
    gpu: Gpu, work: Phases, gathered: float, reduced: float, *, apart: bool, again: int = 1
) -> Phases:
    """Exposed seconds of the communication of each microbatch: gathers for its forward and `again`
    times for its backward, and the reduction of gradients, whose dW may be computed `apart` from
    dX."""
    forward, arriving = overlapped(gpu, work.forward, gathered), again * gathered
    if apart:
        dx, dw = overlapped(gpu, work.dx, arriving), overlapped(gpu, work.dw, reduced)
        return Phases(forward, dx, dw)
    return Phases(forward, overlapped(gpu, work.dx + work.dw, arriving + reduced))


def data_groups(layout: Layout, cluster: Cluster) -> tuple[GroupSpan, GroupSpan]:
    """The groups of ranks that share the state of dense parameters, and of experts."""
    grid = layout.grid
    shard = span(cluster, grid.dp_shard * grid.cp, grid.tp)
    return shard, span(cluster, _together_for_experts(layout), grid.ep * grid.etp)


def _replicas(layout: Layout, cluster: Cluster) -> tuple[GroupSpan, GroupSpan]:
    """The groups of ranks that hold replicas of the state of dense parameters, and of experts."""
    grid, shards = layout.grid, _together_for_experts(layout)
    replica = span(cluster, grid.dp_replicate, grid.tp * grid.cp * grid.dp_shard)
    return replica, span(cluster, grid.edp // shards, grid.ep * grid.etp * shards)


def _together_for_experts(layout: Layout) -> int:
    """Number of ranks that share the state of experts, or that sum their gradients if none do."""
    shared = layout.config.parallel.sharding.splits_optimizer
    return num_expert_shards(layout) if shared else layout.grid.edp


def moves(layout: Layout, cluster: Cluster, software: Software, spec: StageParts) -> StageTransfers:
    """The communication of a stage's parameters and gradients, block by block or in buckets."""
    parallel = layout.config.parallel
    shard, expert = data_groups(layout, cluster)
    wire = software.gradient_bytes or layout.config.sent_gradient_bytes
    if not layout.config.gathers_weights() and not software.by_tensor:
        buckets = [*_buckets(layout, spec, shard, expert)]
        seconds = sum(all_reduce(cluster, group, size * wire) for group, size in buckets)
        return StageTransfers(0.0, seconds, len(buckets))
    whole = not parallel.sharding.splits_optimizer
    grid = layout.grid
    every = (
        span(cluster, grid.dp_shard * grid.cp * grid.dp_replicate, grid.tp),
        span(cluster, grid.edp, grid.ep * grid.etp),
    )
    replicas = _replicas(layout, cluster)
    in_pairs = parallel.ddp_reduce_scatter_with_fp32_accumulation
    rate = software.gather_rate

    def gathered(each: SharedMessage) -> float:
        if rate:
            return each.size * 2 / rate
        return gather_seconds(layout, cluster, each)

    def reduced(each: SharedMessage) -> float:
        sent = each.size * wire
        if whole:
            return all_reduce(cluster, each.group, sent)
        if rate:
            return sent / rate
        if software.reduces_whole:
            return all_reduce(cluster, every[each.experts], sent)
        scattered = reduce_scatter(cluster, each.group, sent, in_pairs=in_pairs)
        if parallel.zero_quantized_gradients:
            scattered = reduction_seconds(cluster, each)
        between = all_reduce(cluster, replicas[each.experts], sent / each.group.size)
        return scattered + between

    ends = spec.embedding and software.waits_for_ends and not whole

    def total(
        seconds: Callable[[SharedMessage], float], *, trained: bool, first: bool = False
    ) -> float:
        sent = _together(layout, spec, (shard, expert), software, trained=trained)
        return sum(each.count * seconds(each) for each in sent if each.ends or not first)

    arriving = 0.0 if whole else total(gathered, trained=False)
    if software.broadcasts_updates and not whole:
        arriving = _broadcast(layout, cluster, spec, (shard, expert), software)
    messages, copied = len(spec.layers), 0.0
    if software.bucket and parallel.sharding.splits_optimizer:
        elements = total(lambda each: float(each.size), trained=True)
        messages = ceil(elements / software.bucket)
        copied = elementwise(cluster.gpu, elements * COPIED * wire, 3 * messages)
    return StageTransfers(
        arriving,
        total(reduced, trained=True) + copied,
        messages,
        total(gathered, trained=False, first=True) if ends else 0.0,
        total(reduced, trained=True, first=True) if ends else 0.0,
    )


def _broadcast(
    layout: Layout,
    cluster: Cluster,
    spec: StageParts,
    groups: tuple[GroupSpan, GroupSpan],
    software: Software,
) -> float:
    """Seconds for ranks to broadcast the stage's parameters that they have updated."""
    seconds, each_alone = 0.0, replace(software, by_tensor=True)
    for group in dict.fromkeys(groups):
        own = [
            each
            for each in _together(layout, spec, groups, each_alone, trained=True)
            if each.group == group
        ]
        size = 2.0 * sum(each.size * each.count for each in own)
        messages = min(group.size, sum(each.count for each in own))
        seconds += broadcasts(cluster, group, size, messages)
    return seconds


def _together(
    layout: Layout,
    spec: StageParts,
    groups: tuple[GroupSpan, GroupSpan],
    software: Software,
    *,
    trained: bool,
) -> Iterator[SharedMessage]:
    """What a stage sends at once: each block's parameters, or each parameter.

    `groups`: those of dense parameters and of experts; `trained`: only of what is trained.
    """
    grid, (nodes, expert_nodes) = layout.grid, layout.node_sizes
    by_tensor, whole = software.by_tensor, software.whole_embedding
    narrows = layout.config.training.fp8_param_gather and not by_tensor
    blocks = stage_blocks(layout, spec, trained=trained, whole_embedding=whole)
    for place, block in enumerate(blocks):
        narrow = block.narrow if narrows else (0, 0)
        kinds = (
            (groups[0], grid.tp, nodes, block.dense, narrow[0]),
            (groups[1], grid.ep * grid.etp, expert_nodes, block.experts, narrow[1]),
        )
        for experts, (group, stride, node, shapes, few) in enumerate(kinds):
            for piece in [(shape,) for shape in shapes] if by_tensor else [shapes]:
                if piece:
                    alike = block.count, place == 0, bool(experts)
                    yield SharedMessage(group, stride, node, piece, few, *alike)


def _buckets(
    layout: Layout, spec: StageParts, shard: GroupSpan, expert: GroupSpan
) -> Iterator[tuple[GroupSpan, int]]:
    """The group and the number of elements of each bucket of a stage's gradients."""
    blocks, limit = stage_blocks(layout, spec, trained=True), layout.config.parallel.ddp_bucket_size
    dense = [prod(shape) for block in blocks for shape in block.dense * block.count]
    experts = [prod(shape) for block in blocks for shape in block.experts * block.count]
    for group, sizes in ((shard, dense), (expert, experts)):
        for part in buckets_of(sizes, limit):
            yield group, sum(sizes[part])
