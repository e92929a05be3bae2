"""Lower bounds on memory and step time, for a million layouts at once.

Every candidate is reduced to the ranks of its pipeline that matter (the first, the last, the one
with the most work), to how many layers of each kind they hold, and to what one such layer costs
under its degrees. What depends on few columns is computed once for each of their combinations and
gathered by index; the rest is arithmetic on whole columns.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf, log, prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.check import Layout
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.mesh.grid import Grid
from fivefold.model.activations import (
    Running,
    Saved,
    embedding_bytes,
    loss_bytes,
    saved_activations,
    total,
)
from fivefold.model.shape import (
    Shapes,
    StageParts,
    embedding_shapes,
    head_shapes,
    is_expert,
    layer_shapes,
    local_shape,
    prediction_shapes,
)
from fivefold.pipeline.layout import split_layers
from fivefold.plan.cluster import Cluster
from fivefold.plan.communication import Span, all_reduce, gather, span
from fivefold.plan.compute import Phases, elementwise
from fivefold.plan.layer import LayerTimes
from fivefold.plan.memory import waiting_bytes
from fivefold.plan.software import Software
from fivefold.plan.space import STRATEGIES, Column, Space, codes
from fivefold.plan.times import Times
from fivefold.plan.ways import FUSED, Way
from fivefold.state import engine_policy

Values = NDArray[np.float64]

DENSE, EXPERTS, PREDICTION, EMBEDDING, HEAD = range(5)
"""Kinds of blocks that stages are made of."""
KINDS = 5


def block_counts(model: ModelConfig, stages: Iterable[StageParts]) -> list[int]:
    """How many blocks of each kind some stages hold."""
    counts = [0] * KINDS
    for stage in stages:
        for layer in stage.layers:
            counts[EXPERTS if model.is_moe(layer) else DENSE] += 1
        counts[PREDICTION] += stage.mtp
        counts[EMBEDDING] += stage.embedding
        counts[HEAD] += stage.head
    return counts


def sample_layers(model: ModelConfig) -> dict[int, int]:
    """Kind -> the number of a layer of that kind."""
    samples = {EXPERTS if model.is_moe(n) else DENSE: n for n in range(model.num_layers)}
    if model.mtp_num_layers:
        samples[PREDICTION] = model.num_layers
    return samples


@dataclass(frozen=True)
class Ranks:
    """The pipeline ranks that bounds look at, for every way; W ways, 3 ranks, K kinds of blocks.

    Attributes:
        held: [W, 3, K] blocks on the rank.
        before: [W, 3, K] blocks of the stages that lead to the rank's first one.
        own: [W, 3, K] blocks of the rank's first stage.
        first: [W, K] blocks of stage 0.
        final: [W, K] blocks of the last stage.
        thinnest: [W, 3] fewest layers in a stage of the rank.
        index: [W, 3] which ranks they are.
        chunks: [W] stages a rank.
        size: [W] pipeline ranks.
        deferred: [W, 3] dW of a stage that the rank leaves for later, at most.
    """

    held: Values
    before: Values
    own: Values
    first: Values
    final: Values
    thinnest: Values
    index: Column
    chunks: Column
    size: Column
    deferred: Values

    @classmethod
    def of(cls, model: ModelConfig, ways: Sequence[Way]) -> "Ranks":
        """The ranks of some ways."""
        rows = [_ranks_of(model, way) for way in ways]
        each = zip(ways, rows, strict=True)

        def column(name: str) -> Any:
            return np.array([row[name] for row in rows])

        return cls(
            held=column("held").astype(float),
            before=column("before").astype(float),
            own=column("own").astype(float),
            first=column("first").astype(float),
            final=column("final").astype(float),
            thinnest=column("thinnest").astype(float),
            index=column("index"),
            chunks=np.array([way.split.num_virtual for way in ways]),
            size=np.array([way.pp for way in ways]),
            deferred=np.array(
                [[_deferred(w.schedule, r) for r in row["index"]] for w, row in each]
            ),
        )


def _ranks_of(model: ModelConfig, way: Way) -> dict[str, Any]:
    split = way.split
    stages = split.stages
    on = [[stages[s] for s in split.stages_of(rank)] for rank in range(way.pp)]
    layers = [sum(len(s.layers) + s.mtp for s in held) for held in on]
    fullest = max(range(way.pp), key=layers.__getitem__)
    chosen = (0, way.pp - 1, fullest)
    starts = [split.stages_of(rank)[0] for rank in chosen]
    return {
        "held": [block_counts(model, on[rank]) for rank in chosen],
        "before": [block_counts(model, stages[:start]) for start in starts],
        "own": [block_counts(model, stages[start : start + 1]) for start in starts],
        "first": block_counts(model, stages[:1]),
        "final": block_counts(model, stages[-1:]),
        "thinnest": [min(len(s.layers) for s in on[rank]) for rank in chosen],
        "index": chosen,
    }


def _deferred(schedule: str, rank: int) -> float:
    """How many dW of its stages a rank has not computed yet at most, when its last dX leaves."""
    if schedule in FUSED:
        return 1
    return {"zb_h1": rank + 1, "interleaved_zb": rank + 1, "zb_h2": 2 * rank + 1}.get(schedule, inf)


class Cells:
    """What depends on few columns, computed once for each of their combinations.

    Args:
        space: the candidates.
        names: the columns.
        compute: (the configuration of a candidate with this combination, its row) -> numbers.
    """

    def __init__(
        self, space: Space, names: Sequence[str], compute: Callable[[Config], Sequence[float]]
    ) -> None:
        few, self.index = space.distinct(names)
        values = [compute(few.config_of(row)) for row in range(len(few))]
        self.table: Values = np.array(values, float)

    def column(self, number: int) -> Values:
        """One of the numbers, for every candidate."""
        found: Values = self.table[self.index, number]
        return found

    def weighted(self, weights: Values, start: int = 0) -> Values:
        """Sum over kinds of weights [N, K] times the numbers from `start` on."""
        kinds = weights.shape[-1]
        found: Values = np.einsum(
            "nk,nk->n", weights, self.table[self.index, start : start + kinds]
        )
        return found


@dataclass(frozen=True)
class MemoryBound:
    """Bytes that a layout needs at least.

    Attributes:
        bytes: [N] on the rank that needs the most.
        state: [N] of them weights, gradients and optimizer state.
        activations: [N] of them kept for backwards.
    """

    bytes: Values
    state: Values
    activations: Values


def memory_bound(space: Space, ranks: Ranks) -> MemoryBound:
    """What no placement of tensors in time can get below.

    The state of the blocks on a rank, with the larger of what is in flight when its warm-up ends,
    and of what is there while the gradients of a layer's weights arrive: one chunk less, what its
    schedule leaves waiting for dW, and those gradients.
    """
    sharded, of_sharded = space.distinct(_SHARDING)
    run, of_run = space.distinct(_RUNNING)
    state, kept = _State(sharded), _Kept(run)
    best = MemoryBound(*(np.zeros(len(space)) for _ in range(3)))
    for which in range(3):
        flying = kept.flying(ranks, which)[of_run]
        behind = kept.less_one(ranks, which) + kept.waiting(ranks, which)
        arriving = behind[of_run] + state.arriving(ranks, which)[of_sharded]
        own, held = state.on(ranks, which)[of_sharded], np.maximum(flying, arriving)
        more = own + held > best.bytes
        best = MemoryBound(
            np.where(more, own + held, best.bytes),
            np.where(more, own, best.state),
            np.where(more, held, best.activations),
        )
    return best


_SHARDING = ("way", "tp", "cp", "dp", "ep", "etp", "strategy", "instances")
"""The columns that model state depends on."""
_RUNNING = ("way", "tp", "sp", "cp", "etp", "mbs", "microbatches", "memory")
"""The columns that activations depend on."""


class _State:
    """Bytes of weights, gradients and optimizer state."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.sizes = Cells(space, ("tp", "ep", "etp"), _parameters)
        c = space.columns
        experts = c["dp"] * c["cp"] * c["tp"] // (c["ep"] * c["etp"])
        inside = experts // c["instances"]
        self.shards = {
            "dense": space.shards,
            "expert": np.where(space.shards == 1, 1, np.maximum(inside, 1)),
        }

    def on(self, ranks: Ranks, which: int) -> Values:
        """Of one of the ranks."""
        held = ranks.held[self.space.columns["way"], which]
        dense = self.sizes.weighted(held)
        expert = self.sizes.weighted(held, KINDS)
        return dense * self._per_parameter("dense") + expert * self._per_parameter("expert")

    def arriving(self, ranks: Ranks, which: int) -> Values:
        """Gradients of a layer's weights, fresh and being reduced, where shards are summed."""
        way = self.space.columns["way"]
        config = self.space.config
        parallel = config.with_values(data_parallel_sharding_strategy="optim").parallel
        reducing = engine_policy(parallel, config.training.precision).reducing
        held = ranks.held[way, which]
        smallest = np.full(len(self.space), np.inf)
        for kind in (DENSE, EXPERTS):
            size = self.sizes.column(kind) + self.sizes.column(KINDS + kind)
            smallest = np.where(held[:, kind] > 0, np.minimum(smallest, size), smallest)
        several = (ranks.thinnest[way, which] > 1) & (self.space.columns["strategy"] > 0)
        return np.where(several, smallest * reducing, 0.0)

    def _per_parameter(self, kind: str) -> Values:
        config, shards = self.space.config, self.shards[kind]
        each = np.zeros(len(STRATEGIES)), np.zeros(len(STRATEGIES))
        for number, strategy in enumerate(STRATEGIES):
            parallel = config.with_values(data_parallel_sharding_strategy=strategy).parallel
            policy = engine_policy(parallel, config.training.precision)
            whole = 0.0 if policy.splits_copy else policy.copy
            split = (policy.master + policy.moments) if policy.splits_optimizer else 0.0
            whole += 0.0 if policy.splits_optimizer else policy.master + policy.moments
            split += policy.gradient if policy.splits_gradient else 0.0
            whole += 0.0 if policy.splits_gradient else policy.gradient
            each[0][number], each[1][number] = whole, split
        strategy_column = self.space.columns["strategy"]
        found: Values = each[0][strategy_column] + each[1][strategy_column] / shards
        return found


def _parameters(config: Config) -> list[float]:
    """Parameters of a block of each kind on one rank, without experts; then those of experts."""
    model, parallel = config.model, config.parallel
    shapes: dict[int, Shapes] = {
        kind: prediction_shapes(model) if kind == PREDICTION else layer_shapes(model, layer)
        for kind, layer in sample_layers(model).items()
    }
    # A tied output weight is the embedding itself where both are on one rank.
    untied = model.untie_embeddings_and_output_weights
    head = {name: shape for name, shape in head_shapes(model).items() if untied or "norm" in name}
    shapes |= {EMBEDDING: embedding_shapes(model), HEAD: head}
    sizes = [0.0] * (2 * KINDS)
    for kind, named in shapes.items():
        for name, shape in named.items():
            local = local_shape(
                model,
                name,
                shape,
                tp=parallel.tensor_model_parallel_size,
                ep=parallel.expert_model_parallel_size,
                etp=parallel.expert_tensor_parallel_size,
            )
            sizes[kind + KINDS * is_expert(name)] += prod(local)
    return sizes


class _Kept:
    """Bytes kept between forward and backward."""

    def __init__(self, space: Space) -> None:
        self.space = space
        names = ("tp", "sp", "etp", "memory")
        self.per_token = Cells(space, names, _saved)
        c = space.columns
        self.tokens = c["mbs"] * (space.config.training.seq_length / c["cp"])

    def _share(self, ranks: Ranks, which: int, chunks: Values) -> Values:
        """The part of a rank's layers in so many chunks, at least: all may be the thinnest."""
        way = self.space.columns["way"]
        layers = ranks.held[way, which][:, : PREDICTION + 1].sum(axis=1)
        thinnest = ranks.thinnest[way, which]
        found: Values = np.minimum(
            chunks * thinnest / np.maximum(layers, 1), chunks / ranks.chunks[way]
        )
        return found

    def _of_layers(self, ranks: Ranks, which: int, start: int) -> Values:
        held = ranks.held[self.space.columns["way"], which][:, : PREDICTION + 1]
        return self.per_token.weighted(held, start) * self.tokens

    def flying(self, ranks: Ranks, which: int) -> Values:
        """All chunks in flight on one of the ranks."""
        held = ranks.held[self.space.columns["way"], which]
        share = self._share(ranks, which, in_flight(self.space, ranks, which))
        loss = self.per_token.column(HEAD) * held[:, HEAD] * self.tokens
        return self._of_layers(ranks, which, 0) * share + loss

    def less_one(self, ranks: Ranks, which: int) -> Values:
        """The same without the chunk whose backward runs."""
        chunks = np.maximum(in_flight(self.space, ranks, which) - 1, 0)
        return self._of_layers(ranks, which, 0) * self._share(ranks, which, chunks)

    def waiting(self, ranks: Ranks, which: int) -> Values:
        """What waits for its dW."""
        chunks = waiting_chunks(self.space, ranks, which)
        return self._of_layers(ranks, which, KINDS) * self._share(ranks, which, chunks)


def _saved(config: Config) -> list[float]:
    """Bytes per token that a block of each kind keeps, then those that wait for its dW."""
    model, running = config.model, Running.of(config)
    saved: dict[int, Saved] = {
        kind: total(saved_activations(model, layer, running))
        for kind, layer in sample_layers(model).items()
    }
    saved |= {
        EMBEDDING: total(embedding_bytes(model, running)),
        HEAD: total(loss_bytes(model, running)),
    }
    kept = [saved[kind].kept if kind in saved else 0.0 for kind in range(KINDS)]
    waiting = [0.0] * KINDS
    for kind, layer in sample_layers(model).items():
        if kind != PREDICTION:
            waiting[kind] = waiting_bytes(model, running, model.is_moe(layer))
    return kept + waiting


def in_flight(space: Space, ranks: Ranks, which: int) -> Values:
    """Chunks that one of the ranks holds at once, at least, at the end of its warm-up."""
    way, count = space.columns["way"], space.columns["microbatches"]
    p, v, r = ranks.size[way], ranks.chunks[way], ranks.index[way, which]

    def in_a_v(peak: Column) -> Column:
        """The first rank fills with its first stage, the last with both; others only in the end."""
        both = 2 * np.minimum(count, peak // 2)
        some = np.where(r == 0, np.minimum(count, peak), np.where(count >= 2 * p, peak, 1))
        return np.where(r == p - 1, both, some)

    peaks = {
        "1f1b": np.minimum(count, p - r),
        "zb_h1": np.minimum(count, p - r),
        "zb_h2": np.minimum(count, 2 * (p - r) - 1),
        "interleaved_1f1b": np.minimum(count * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        "interleaved_zb": np.minimum(count * v, p - r + (v - 1) * p),
        "zb_v": in_a_v(2 * p),
        "dualpipe_v": in_a_v(2 * p),
        "v_half": in_a_v(p),
        "v_min": in_a_v(2 * p // 3),
    }
    names = np.array([w.schedule for w in space.ways])[way]
    flying = np.ones(len(space))
    for name, peak in peaks.items():
        flying = np.where(names == name, np.maximum(peak, 1), flying)
    return flying


def waiting_chunks(space: Space, ranks: Ranks, which: int) -> Values:
    """Chunks of one of the ranks that wait for dW, at least, beside one less than `in_flight`."""
    way, count = space.columns["way"], space.columns["microbatches"]
    p, r = ranks.size[way], ranks.index[way, which]
    late = {"zb_h1": r, "interleaved_zb": r, "zb_h2": 2 * r}
    names = np.array([w.schedule for w in space.ways])[way]
    waiting = np.zeros(len(space))
    for name, chunks in late.items():
        waiting = np.where((names == name) & (count >= 2 * p), chunks, waiting)
    return waiting


def time_bound(space: Space, ranks: Ranks, cluster: Cluster, software: Software) -> Values:
    """Seconds of a step that no order of the acts can get below.

    A rank cannot begin before one microbatch has come through the stages before its first, then has
    all its work to do, and its last dX still has to come down to stage 0; only as many dW as its
    schedule leaves for later may run beside that.
    """
    run, of_run = space.distinct(_TIMING)
    sharded, of_sharded = space.distinct(_SHARDING)
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
    work = microbatches * (forward + dx + dw)
    later = ranks.deferred[way, which] * cells.weighted(ranks.own[way, which], 2 * KINDS)
    first = cells.weighted(ranks.first[way], 2 * KINDS)
    through = work - np.minimum(microbatches * dw, later) + tail + first
    return head + np.maximum(work, through), forward, dx + dw


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
    size = cells.column(3 * KINDS)
    link = [size / link.rate + link.latency for link in (cluster.node_link, cluster.network_link)]
    return np.where(c["pp"] == 1, 0.0, np.where(near, *link))


def _path(space: Space, ranks: Ranks, cells: Cells) -> Values:
    """One microbatch's way to the last stage and back, and all others through that stage."""
    way = space.columns["way"]
    whole = np.array(block_counts(space.config.model, space.ways[0].split.stages), float)
    final = ranks.final[way]
    before = whole - final
    there_and_back = sum(cells.weighted(before, phase * KINDS) for phase in range(2))
    through = sum(cells.weighted(final, phase * KINDS) for phase in range(2))
    update = cells.weighted(ranks.first[way], 2 * KINDS)
    found: Values = there_and_back + space.columns["microbatches"] * through + update
    return found


def _seconds(
    config: Config,
    cluster: Cluster,
    software: Software,
    known: dict[tuple[object, ...], dict[str, Times]],
) -> list[float]:
    """Seconds of a microbatch in a block of each kind: forwards, dX, dW; bytes of its message."""
    model = config.model
    times = LayerTimes(one_stage(config), cluster, software, known)
    full = config.memory.recompute_granularity == "full"
    found = {
        kind: times.layer(model.is_moe(layer), full and kind != PREDICTION).total
        for kind, layer in sample_layers(model).items()
    }
    found |= {EMBEDDING: times.embedding().total, HEAD: times.head().total}
    phases = [found.get(kind, Phases()) for kind in range(KINDS)]
    return [
        *(phase.forward for phase in phases),
        *(phase.dx for phase in phases),
        *(phase.dw for phase in phases),
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
        self.sizes = Cells(space, ("tp", "ep", "etp"), _parameters)
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
