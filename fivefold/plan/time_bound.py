"""A lower bound on the step time of a million layouts at once: `plan.blocks` says how."""

from collections.abc import Callable
from math import log, sqrt

import numpy as np

from fivefold.check import Layout
from fivefold.config.config import Config
from fivefold.mesh.grid import Grid
from fivefold.pipeline.layout import split_layers
from fivefold.plan.blocks import (
    EMBEDDING,
    HEAD,
    KINDS,
    PREDICTION,
    SHARDING,
    Cells,
    Ranks,
    Values,
    block_counts,
    block_parameters,
    sample_layers,
)
from fivefold.plan.cluster import Cluster
from fivefold.plan.communication import Span, all_reduce, gather, span
from fivefold.plan.compute import Phases, elementwise
from fivefold.plan.layer import LayerTimes
from fivefold.plan.pairs import cuts
from fivefold.plan.software import Software
from fivefold.plan.space import Column, Space, codes
from fivefold.plan.times import Times


def time_bound(space: Space, ranks: Ranks, cluster: Cluster, software: Software) -> Values:
    """Seconds of a step that no order of the acts can get below.

    A rank cannot begin before one microbatch has come through the stages before its first, then has
    all its work to do, and its last dX still has to come down to stage 0; only as many dW as its
    schedule leaves for later may run beside that.
    """
    run, of_run = space.distinct(_TIMING)
    sharded, of_sharded = space.distinct(SHARDING)
    names = ("tp", "sp", "cp", "ep", "etp", "mbs", "memory", "pairs")
    known: dict[tuple[object, ...], dict[str, Times]] = {}
    cells = Cells(run, names, lambda config: _seconds(config, cluster, software, known))
    data = _DataParallel(sharded, cluster)
    strategy, microbatches = space.columns["strategy"], space.columns["microbatches"]
    best = _path(run, ranks, cells)[of_run]
    around = np.zeros(len(space))
    for which in range(3):
        pipeline, forward, backward = _pipeline(run, ranks, cells, cluster, which)
        gathered, reduced = (move[of_sharded] for move in data.moves(ranks, which))
        every, once = _exposed(
            strategy, forward[of_run], backward[of_run], gathered, reduced, cluster
        )
        best = np.maximum(best, pipeline[of_run] + microbatches * every)
        around = np.maximum(around, once)
    waits = 1 + cluster.jitter * sqrt(2 * log(space.world))
    return best * waits + around + data.optimizer(ranks)[of_sharded]


_TIMING = ("way", "tp", "sp", "cp", "dp", "ep", "etp", "mbs", "memory")
"""The columns that the pipeline's time depends on, sharding in every microbatch apart."""


def _pipeline(
    space: Space, ranks: Ranks, cells: Cells, cluster: Cluster, which: int
) -> tuple[Values, Values, Values]:
    """Seconds of the program as one rank bounds it, and of its forwards and backwards."""
    way, microbatches = space.columns["way"], space.columns["microbatches"]
    held, before = ranks.held[way, which], ranks.before[way, which]
    forward, dx, dw = (cells.weighted(held, phase * KINDS) for phase in range(3))
    hops = _hop(space, cells, cluster) * ranks.index[way, which]
    head, tail = (cells.weighted(before, phase * KINDS) + hops for phase in range(2))
    paired = _hidden(cells, held, forward, dx, dw, cluster)
    work = microbatches * (forward + dx + dw - paired)
    later = ranks.deferred[way, which] * cells.weighted(ranks.own[way, which], 2 * KINDS)
    first = cells.weighted(ranks.first[way], 2 * KINDS)
    through = work - np.minimum(microbatches * dw, later) + tail + first
    return head + np.maximum(work, through), forward, dx + dw


def _hidden(
    cells: Cells, held: Values, forward: Values, dx: Values, dw: Values, cluster: Cluster
) -> Values:
    """Seconds of a microbatch that pairs hide at most, as `pairs.hidden` counts them."""
    sent, returned = (cells.weighted(held, number * KINDS) for number in (3, 4))
    beside = np.minimum.reduce(cuts(forward - sent, dx - returned, dw, sent, returned))
    found: Values = (1 - cluster.gpu.overlap_slowdown) * beside
    return found


def _exposed(
    strategy: Column,
    forward: Values,
    backward: Values,
    gathered: Values,
    reduced: Values,
    cluster: Cluster,
) -> tuple[Values, Values]:
    """What data parallelism leaves exposed in every microbatch, and once a step."""
    slowdown = cluster.gpu.overlap_slowdown

    def hidden(work: Values, moved: Values) -> Values:
        """As `compute.overlapped`, which is convex: less for a sum than for its parts."""
        found: Values = np.maximum(0, moved - work) + slowdown * np.minimum(work, moved)
        return found

    gathering, reducing = hidden(forward, gathered), hidden(backward, reduced)
    both = gathering + hidden(backward, gathered + reduced)
    often = np.select([strategy == 2, strategy == 3], [reducing, both], 0.0)
    once = np.select([strategy <= 1, strategy == 2], [gathering + reducing, gathering], 0.0)
    return often, once


def _hop(space: Space, cells: Cells, cluster: Cluster) -> Values:
    """Seconds of a message from one pipeline rank to the next."""
    c = space.columns
    near = c["dp"] * c["cp"] * c["tp"] < cluster.gpus_per_node
    size = cells.column(5 * KINDS)
    link = [size / link.rate + link.latency for link in (cluster.node_link, cluster.network_link)]
    return np.where(c["pp"] == 1, 0.0, np.where(near, *link))


def _path(space: Space, ranks: Ranks, cells: Cells) -> Values:
    """One microbatch's way to the last stage and back, and all others through that stage."""
    way = space.columns["way"]
    whole = np.array(block_counts(space.config.model, space.ways[0].split.stages), float)
    final = ranks.final[way]
    before = whole - final
    there_and_back = sum(cells.weighted(before, phase * KINDS) for phase in range(2))
    forward, dx, _, sent, returned = (cells.weighted(final, n * KINDS) for n in range(5))
    through = forward - sent + dx - returned
    update = cells.weighted(ranks.first[way], 2 * KINDS)
    found: Values = there_and_back + space.columns["microbatches"] * through + update
    return found


def _seconds(
    config: Config,
    cluster: Cluster,
    software: Software,
    known: dict[tuple[object, ...], dict[str, Times]],
) -> list[float]:
    """Seconds of a microbatch in a block of each kind, and bytes of its message.

    Forwards, dX, dW; and of these, what pairs may hide in forwards and backwards.
    """
    model = config.model
    times = LayerTimes(one_stage(config), cluster, software, known)
    full = config.memory.recompute_granularity == "full"
    found = {
        kind: times.layer(model.is_moe(layer), full and kind != PREDICTION)
        for kind, layer in sample_layers(model).items()
    }
    hides = config.parallel.overlap_moe_expert_parallel_comm
    moved = [found[k].ep if hides and k in found else Phases() for k in range(KINDS)]
    found |= {EMBEDDING: times.embedding(), HEAD: times.head()}
    phases = [found.get(kind, Times()).total for kind in range(KINDS)]
    return [
        *(phase.forward for phase in phases),
        *(phase.dx for phase in phases),
        *(phase.dw for phase in phases),
        *(ep.forward for ep in moved),
        *(ep.dx for ep in moved),
        times.hidden_bytes / times.parts,
    ]


def one_stage(config: Config) -> Layout:
    """The ranks that split one microbatch's layers: what a layer costs depends on no others."""
    parallel, model = config.parallel, config.model
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    grid = Grid(
        dp_shard=experts,
        cp=parallel.context_parallel_size,
        tp=parallel.tensor_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
    )
    split = split_layers(model.num_layers, 1, mtp_num_layers=model.mtp_num_layers)
    return Layout(config, grid, split, "1f1b", 1)


class _DataParallel:
    """What sharding, reducing and updating cost at least."""

    def __init__(self, space: Space, cluster: Cluster) -> None:
        c = space.columns
        self.space, self.cluster = space, cluster
        self.sizes = Cells(space, ("tp", "ep", "etp"), block_parameters)
        self.shard = c["dp"] // c["instances"] * c["cp"]
        self.expert = c["dp"] * c["cp"] * c["tp"] // (c["ep"] * c["etp"])
        wire = 2 if space.config.parallel.grad_reduce_in_bf16 else 4
        self.copy, self.wire = 2.0, float(wire)
        self.dense_gather = self._affine(gather, self.shard, c["tp"])
        self.dense_reduce = self._affine(all_reduce, self.shard, c["tp"])
        self.expert_gather = self._affine(gather, self.expert, c["ep"] * c["etp"])
        self.expert_reduce = self._affine(all_reduce, self.expert, c["ep"] * c["etp"])

    def _affine(
        self, collective: Callable[[Cluster, Span, float], float], size: Column, stride: Column
    ) -> tuple[Values, Values]:
        """Seconds of an empty collective over each group, and seconds a byte of large ones."""
        sizes, _ = codes(size)
        strides, more = codes(stride)
        index, groups = codes(sizes * more + strides)
        rows = np.zeros(groups, np.int64)
        rows[index] = np.arange(len(index))
        table = []
        for row in rows:
            group = span(self.cluster, int(size[row]), int(stride[row]))
            empty = collective(self.cluster, group, 0.0)
            table.append((empty, (collective(self.cluster, group, 1e12) - empty) / 1e12))
        values = np.array(table).reshape(-1, 2)[index]
        return values[:, 0], values[:, 1]

    def moves(self, ranks: Ranks, which: int) -> tuple[Values, Values]:
        """Seconds to gather the parameters of one of the ranks, and to reduce its gradients."""
        held = ranks.held[self.space.columns["way"], which]
        dense, expert = self.sizes.weighted(held), self.sizes.weighted(held, KINDS)

        def seconds(kind: str, size: float) -> Values:
            total: Values = sum(
                (parameters > 0) * empty + parameters * size * slope
                for parameters, (empty, slope) in (
                    (dense, getattr(self, f"dense_{kind}")),
                    (expert, getattr(self, f"expert_{kind}")),
                )
            )
            return total

        whole = self.space.columns["strategy"] == 0
        gathered = np.where(whole, 0.0, seconds("gather", self.copy))
        reduced = np.where(whole, seconds("reduce", self.wire), seconds("gather", self.wire))
        return gathered, reduced

    def optimizer(self, ranks: Ranks) -> Values:
        """Seconds of the update on the rank with the most parameters."""
        way, sharded = self.space.columns["way"], self.space.columns["strategy"] > 0
        most = np.zeros(len(self.space))
        for which in range(3):
            held = ranks.held[way, which]
            dense, expert = self.sizes.weighted(held), self.sizes.weighted(held, KINDS)
            own = np.where(sharded, dense / self.shard + expert / self.expert, dense + expert)
            most = np.maximum(most, own)
        gpu = self.cluster.gpu
        each = elementwise(gpu, OPTIMIZER_TRAFFIC, 0)
        return most * each


OPTIMIZER_TRAFFIC = 34.0
"""Bytes a parameter that AdamW reads and writes, as `plan.step` counts them."""
