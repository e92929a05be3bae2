"""Lower bounds on the step time of a million layouts; `search.bound_tables` has the method."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from fivefold.config.config import Config
from fivefold.pipeline.schedules.registry import Shape
from fivefold.predict.cluster import Cluster
from fivefold.predict.program.pairs import cuts
from fivefold.predict.software import Software
from fivefold.predict.times.layer import LayerTimes, TimesCache
from fivefold.predict.times.stage import Times
from fivefold.search.bound_tables import (
    EMBEDDING,
    FIRST,
    FOR_TIME,
    HEAD,
    KINDS,
    LAST,
    Cells,
    Ranks,
    Summand,
    Values,
    module_counts,
    one_stage,
    sample_layers,
)
from fivefold.search.columns import Column
from fivefold.search.once_bound import Loads, OnceBound, beside
from fivefold.search.space import Space


@dataclass(frozen=True)
class TimeBound:
    """Lower bounds on the step times of N layouts, in seconds.

    Attributes:
        program: [N] seconds of the pipeline program, with the wait for the slowest GPU.
        around: [N] seconds of what is sent once a step, before its first and after its last end.
        sent: [N] seconds of the program with what is sent once, wherever that lengthens it.
        rest: [N] seconds of the optimizer.
        moved: [N, X, 2] seconds to gather the parameters and to reduce the gradients of each kind
            of stage.
    """

    program: Values
    around: Values
    sent: Values
    rest: Values
    moved: Values

    @property
    def seconds(self) -> Values:
        """Lower bounds on the whole step, in seconds."""
        return np.maximum(self.program + self.around, self.sent) + self.rest

    def take(self, rows: Column) -> "TimeBound":
        """The bounds of these layouts."""
        return TimeBound(*(getattr(self, each.name)[rows] for each in fields(self)))


def time_bound(
    space: Space,
    ranks: Ranks,
    cluster: Cluster,
    times_cache: TimesCache | None = None,
) -> TimeBound:
    """Lower bounds on the step times; `LayerTimes` describes `times_cache`.

    A rank cannot begin before one microbatch has passed the stages before its first one. Then it
    has all its work to do, and its last dX still has to travel to stage 0. Only the dW that its
    schedule defers can run during that time.
    """
    run, of_run = space.distinct(TIMING)
    cells = _cells(run, cluster, times_cache)
    loads = Loads(space, cluster, cells, run, of_run)
    once = OnceBound(space, ranks, cluster, loads)
    microbatches, partition = _share(space, ranks), space.columns["partition"]
    best = _path(run, ranks, cells)[of_run]
    # Until stage 0 has its last gradients, or whichever stage has.
    first, any_stage = best, np.zeros(len(space))
    for which in FOR_TIME:
        (whole, through), kept = _pipeline(run, ranks, cells, cluster, which)
        held = ranks.held[:, which]
        every = _exposed(space, loads, held, cluster)
        # Sums of gradients may run beside the last dX, as the dW do that they are of.
        before = np.maximum(0, microbatches - 1 - ranks.deferred[partition, which])
        arrives = through[of_run] + before * every
        own = whole[of_run] + microbatches * every
        best = np.maximum.reduce([best, own, kept[of_run], arrives])
        if which == FIRST:
            turned = _turned(run, ranks, cells, whole)[of_run]
            best = np.maximum(best, turned)
            any_stage = turned
        elif which == LAST:
            first = np.maximum(first, arrives)
            any_stage = np.maximum(any_stage, own)
    stages = [*np.swapaxes(ranks.kinds, 0, 1)]
    moved = np.stack([[m(stage) for m in (loads.gathered, loads.reduced)] for stage in stages]).T
    sums = [once.summed(stage, moved[:, 1, kind]) for kind, stage in enumerate(stages)]
    begins, after = once.before_all(), np.minimum.reduce(sums)
    sent = np.maximum(first + sums[0], any_stage + after) + begins
    sent += cluster.lateness(space.world) * best
    slices = space.config.parallel.num_sequence_slices
    added = loads.data.sums(ranks)[loads.of_sharded]
    rest = loads.data.optimizer(ranks)[loads.of_sharded]
    rest += (space.columns["microbatches"] * slices - 1) * added
    moved = np.swapaxes(moved, 1, 2)
    program = best * (1 + cluster.lateness(space.world))
    return TimeBound(program, begins + after, sent, rest, moved)


def quick_time_bound(
    space: Space,
    ranks: Ranks,
    cluster: Cluster,
    times_cache: TimesCache | None = None,
) -> Values:
    """A faster, looser `time_bound` that ignores data parallelism and recomputation.

    Where paired actions wait for the host, recomputation can shorten a step, by less than 1 %.
    """
    run, of_run = space.distinct(tuple(name for name in TIMING if name != "memory"))
    run.columns["memory"][:] = 0  # the choice that repeats least
    cells = _cells(run, cluster, times_cache)
    best = _path(run, ranks, cells)
    for which in FOR_TIME:
        work, kept = _pipeline(run, ranks, cells, cluster, which)
        best = np.maximum.reduce([best, *work, kept])
    found: Values = (best * (1 + cluster.lateness(space.world)))[of_run]
    return found


TIMING = ("partition", "tp", "sp", "cp", "dp", "ep", "etp", "mbs", "memory", "pairs")
"""Columns that the pipeline program's time depends on, apart from sharding in each microbatch."""


def _pipeline(
    space: Space, ranks: Ranks, cells: Cells, cluster: Cluster, which: int
) -> tuple[tuple[Values, Values], Values]:
    """Lower bounds on the program's seconds.

    The first two follow from the work of one rank, and from that and the way of its last dX; the
    other from the number of chunks that it can keep at once.
    """
    partition, microbatches = space.columns["partition"], _share(space, ranks)
    held, before = ranks.held[partition, which], ranks.before[partition, which]
    forward, dx, dw = (cells.weighted(held, phase * KINDS) for phase in range(3))
    hop = _hop(space, cells, cluster)
    hops = hop * ranks.index[partition, which]
    slices = space.config.parallel.num_sequence_slices  # the first comes soon, the last goes alone
    head, tail = (cells.weighted(before, phase * KINDS) / slices + hops for phase in range(2))
    paired = space.columns["pairs"] * _hidden(cells, held, cluster)
    # No pair hides more than all messages of two stages, and what these wait for the host.
    largest = ranks.largest[partition, which]
    most = (cells.weighted(largest, number * KINDS) for number in (3, 4, 9, 10))
    pairs = np.maximum(0, microbatches * ranks.stages[partition] - ranks.alone[partition, which])
    paired = np.minimum(microbatches * paired, pairs * sum(most))
    work = microbatches * (forward + dx + dw) - paired
    deferred = ranks.deferred[partition, which]
    known = np.where(np.isinf(deferred), 0, deferred)
    later = known * cells.weighted(ranks.own[partition, which], 2 * KINDS)
    later = np.where(np.isinf(deferred), np.inf, later)
    first = cells.weighted(ranks.first[partition], 2 * KINDS) / slices
    through = work - np.minimum(microbatches * dw, later) + tail + first
    kept = head + _kept(space, ranks, cells, hop, which) + tail
    return (head + work, head + through), kept


def _turned(space: Space, ranks: Ranks, cells: Cells, work: Values) -> Values:
    """Seconds of the first rank where it holds the last stage, too: a V; 0 for other schedules.

    A microbatch has to come back to that rank, which meanwhile can only compute as many forwards of
    its first stage as it may keep, and then still has the rest of its `work` to do.
    """
    partition, slices = space.columns["partition"], space.config.parallel.num_sequence_slices
    in_v = space.by_partition(lambda each: each.known.shape is Shape.V)
    there = cells.weighted(_whole(space) - ranks.final[partition]) / slices
    most = np.minimum(ranks.most[partition, FIRST] - 1 / slices, _share(space, ranks))
    found = work + there - most * cells.weighted(ranks.first[partition])
    return np.where(in_v, found, 0.0)


def _kept(space: Space, ranks: Ranks, cells: Cells, hop: Values, which: int) -> Values:
    """Seconds that a rank needs for all chunks, given how many it can keep at once.

    A chunk is kept until it has reached the end of the model and come back. By Little's law (1961)
    the average number kept is the rate of chunks times this residence time.
    """
    partition, parallel = space.columns["partition"], space.config.parallel
    microbatches = _share(space, ranks)
    grouped = parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    most = np.where(grouped & (ranks.chunks[partition] > 1), np.inf, ranks.most[partition, which])
    ahead = ranks.ahead[partition, which]
    there_and_back = sum(cells.weighted(ahead, phase * KINDS) for phase in range(2))
    lasts = there_and_back / parallel.num_sequence_slices
    lasts += 2 * hop * ranks.crossings[partition, which]
    found: Values = microbatches * lasts / np.minimum(most, microbatches * ranks.stages[partition])
    return found


def _hidden(cells: Cells, held: Values, cluster: Cluster) -> Values:
    """Most seconds per microbatch that pairing can hide, as `overlap.hidden` computes them."""
    layers = held[:, :EMBEDDING]
    forward, dx, dw, sent, returned, ahead, back, weights, host, *waits = (
        cells.weighted(layers, number * KINDS) for number in range(len(_NUMBERS))
    )
    beside = np.minimum.reduce(cuts(ahead, back, weights, sent, returned))
    beside *= 1 - cluster.gpu.overlap_slowdown
    beside += sum(waits)
    found: Values = np.maximum(0, np.minimum(beside, forward + dx + dw - 3 * host))
    return found


def _exposed(space: Space, loads: Loads, held: Values, cluster: Cluster) -> Values:
    """Exposed seconds of data-parallel communication per microbatch, of modules [W, K]."""
    gradients, parameters = map(space.sharded, ("splits_gradients", "splits_parameters"))
    if not gradients.any():
        return np.zeros(len(space))
    forward, dx, dw = (loads.work(held, phase) for phase in range(3))
    arriving, reduced = np.where(parameters, loads.gathered(held), 0.0), loads.reduced(held)
    joint = beside(cluster, dx + dw, arriving + reduced)
    apart = beside(cluster, dx, arriving) + beside(cluster, dw, reduced)
    each = beside(cluster, forward, arriving) + np.where(_splits(space), apart, joint)
    return np.where(gradients, each, 0.0)


def _hop(space: Space, cells: Cells, cluster: Cluster) -> Values:
    """Seconds of a message from one pipeline rank to the next."""
    c = space.columns
    near = c["dp"] * c["cp"] * c["tp"] < cluster.gpus_per_node
    size = cells.column(len(_NUMBERS) * KINDS)
    link = [size / link.rate + link.latency for link in (cluster.node_link, cluster.network_link)]
    return np.where(c["pp"] == 1, 0.0, np.where(near, *link))


def _path(space: Space, ranks: Ranks, cells: Cells) -> Values:
    """Seconds of one microbatch to the last stage and back, plus all others in that stage."""
    partition = space.columns["partition"]
    final = ranks.final[partition]
    before = _whole(space) - final
    there_and_back = sum(cells.weighted(before, phase * KINDS) for phase in range(2))
    forward, dx, *hidden = (cells.weighted(final, n * KINDS) for n in (0, 1, 3, 4, 9, 10))
    through = forward + dx - space.columns["pairs"] * sum(hidden)
    update = cells.weighted(ranks.first[partition], 2 * KINDS)
    alone = (there_and_back + update) / space.config.parallel.num_sequence_slices
    found: Values = alone + _share(space, ranks) * through
    return found


def _whole(space: Space) -> Values:
    """The modules of each kind in the whole model."""
    counts = module_counts(space.config.model, space.partitions[0].split.stages)
    return counts.sum(axis=0, dtype=float)


def _share(space: Space, ranks: Ranks) -> Values:
    """Microbatches per stage: the copies of the model share them."""
    found: Values = space.columns["microbatches"] / ranks.copies[space.columns["partition"]]
    return found


def _cells(space: Space, cluster: Cluster, times_cache: TimesCache | None) -> Cells:
    """The `_NUMBERS` of each kind of module for one microbatch, and the bytes of its message."""
    model, known = space.config.model, {} if times_cache is None else times_cache

    def times(config: Config) -> LayerTimes:
        return LayerTimes(one_stage(config), cluster, Software(), known)

    def layers(experts: bool) -> Callable[[Config], list[float]]:
        kinds = {n: kind for n, kind in sample_layers(model).items() if kind.experts == experts}

        def each(config: Config) -> list[float]:
            of, memory = times(config), config.memory
            some = memory.recomputes_first_layers  # perhaps of none
            modules = () if some else memory.remade_modules
            whole = memory.recompute_granularity == "full" and not some
            found = {
                n: _numbers(of.layer(kind, None if whole else modules), of.host(kind))
                for n, kind in kinds.items()
            }
            return _in_order(found, 0.0)

        return each

    def ends(config: Config) -> list[float]:
        of = times(config)
        found = {EMBEDDING: _numbers(of.embedding()), HEAD: _numbers(of.head())}
        return _in_order(found, of.hidden_bytes / of.parts / config.parallel.num_sequence_slices)

    space = replace(space, columns=space.columns | {"defers": _defers(space)})
    columns = ("tp", "sp", "cp", "mbs", "memory", "defers")
    parts: list[Summand] = [(columns, ends), (columns, layers(False))]
    if model.num_experts is not None:
        parts.append(((*columns, "ep", "etp"), layers(True)))
    return Cells(space, len(_NUMBERS) * KINDS + 1, *parts)


def _defers(space: Space) -> Column:
    """0 without a pipeline, else 1, and 2 where dW is computed apart from dX in some schedules."""
    c, pipelined = space.columns, (space.columns["pp"] > 1).astype(np.int32)
    if space.config.parallel.pipeline_dx_first:
        return pipelined
    apart = space.by_partition(lambda partition: not partition.known.fused)
    return pipelined * (1 + (apart | (c["pairs"] * space.delays_weights > 0)))


def _splits(space: Space) -> NDArray[np.bool_]:
    """Whether dW is computed apart from dX."""
    return _defers(space) == (1 if space.config.parallel.pipeline_dx_first else 2)


_NUMBERS = (
    *("forward", "dX", "dW"),
    *("experts' messages in the forward", "in the backward"),
    *("computation of the forward", "of dX", "of dW"),
    "issuing the forward",
    *("waiting for that in the forward", "in the backward"),
)
"""Times of a module, in seconds per microbatch, that the bounds sum."""


def _numbers(times: Times, host: float = 0.0) -> tuple[float, ...]:
    total, work = times.total, times.work
    messages = times.ep.forward, times.ep.dx
    computation = work.forward, work.dx, work.dw
    waits = times.host.forward, times.host.dx + times.host.dw
    return (total.forward, total.dx, total.dw, *messages, *computation, host, *waits)


def _in_order(numbers: Mapping[int, Sequence[float]], message: float) -> list[float]:
    """The numbers, ordered by number and then by kind of module, with the message last."""
    nothing = (0.0,) * len(_NUMBERS)
    each = [numbers.get(kind, nothing) for kind in range(KINDS)]
    return [*chain.from_iterable(zip(*each, strict=True)), message]
