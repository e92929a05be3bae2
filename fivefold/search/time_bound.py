"""Lower bounds on the step time of a million layouts; `search.bound_tables` has the method."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from fivefold.config.config import Config
from fivefold.pipeline.schedules.registry import Shape
from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.transfers import exposed
from fivefold.predict.program.least import rank_bounds
from fivefold.predict.program.pairs import Paired, hidden
from fivefold.predict.software import Software
from fivefold.predict.times.communication import hop_seconds
from fivefold.predict.times.compute import Phases
from fivefold.predict.times.layer import LayerTimes, TimesCache, message_bytes
from fivefold.predict.times.stage import Times, run_again
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
    affine,
    module_counts,
    one_stage,
    sample_layers,
)
from fivefold.search.columns import Column
from fivefold.search.per_step_bound import Loads
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
    """Lower bounds on the step times; `LayerTimes` describes `times_cache`."""
    run, of_run = space.distinct(TIMING)
    cells = _cells(run, cluster, times_cache)
    loads = Loads(space, ranks, cluster, cells, run, of_run)
    microbatches, partition = _share(space, ranks), space.columns["partition"]
    best = _path(run, ranks, cells)[of_run]
    # Time until stage 0, or any stage, has its last gradients.
    first, any_stage = best, np.zeros(len(space))
    for which in FOR_TIME:
        whole, through, kept = _pipeline(run, ranks, cells, cluster, which)
        held = ranks.held[:, which]
        every = _exposed(space, loads, held, cluster)
        # Gradient sums may run beside the last dX, and beside the dW that produce them.
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
    sums = [loads.summed(stage, moved[:, 1, kind]) for kind, stage in enumerate(stages)]
    begins, after = loads.before_all(), np.minimum.reduce(sums)
    sent = np.maximum(first + sums[0], any_stage + after) + begins
    sent += cluster.straggler_delay(space.world) * best
    slices = space.config.parallel.num_sequence_slices
    added = loads.data.sums(ranks)[loads.of_sharded]
    rest = loads.data.optimizer(ranks)[loads.of_sharded]
    rest += (space.columns["microbatches"] * slices - 1) * added
    moved = np.swapaxes(moved, 1, 2)
    program = best * (1 + cluster.straggler_delay(space.world))
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
        best = np.maximum.reduce([best, *_pipeline(run, ranks, cells, cluster, which)])
    found: Values = (best * (1 + cluster.straggler_delay(space.world)))[of_run]
    return found


TIMING = ("partition", "tp", "sp", "cp", "dp", "ep", "etp", "mbs", "memory", "pairs")
"""Columns that the pipeline program's time depends on, apart from sharding in each microbatch."""


def _pipeline(
    space: Space, ranks: Ranks, cells: Cells, cluster: Cluster, which: int
) -> tuple[Values, Values, Values]:
    """Lower bounds on the program's seconds from the ranks of `rank_bounds`."""
    partition, microbatches = space.columns["partition"], _share(space, ranks)
    chunks, parallel = microbatches * ranks.stages[partition], space.config.parallel
    saved = np.zeros(len(space))
    if space.columns["pairs"].any():
        saved = microbatches * _hidden(cells, ranks.held[partition, which], cluster)
        # No pair hides more than all messages of two stages, and what these wait for the host.
        most = cells.weighted(ranks.largest[partition, which], HIDEABLE)
        pairs = np.maximum(0, chunks - ranks.alone[partition, which])
        saved = space.columns["pairs"] * np.minimum(saved, pairs * most)

    def seconds(part: str, phase: int) -> Values:
        modules = ranks.first if part == "first" else getattr(ranks, part)[:, which]
        return cells.weighted(modules[partition], phase)

    grouped = parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    unknown = grouped & (ranks.chunks[partition] > 1)
    return rank_bounds(
        seconds,
        saved,
        _hop(space, cells, cluster),
        parallel.num_sequence_slices,
        total=microbatches,
        deferred=ranks.deferred[partition, which],
        hops=ranks.index[partition, which],
        crossings=ranks.crossings[partition, which],
        chunks=chunks,
        most=np.where(unknown, np.inf, ranks.most[partition, which]),
    )


def _turned(space: Space, ranks: Ranks, cells: Cells, work: Values) -> Values:
    """Seconds of the first rank if it also holds the last stage (a V); 0 for other schedules.

    A microbatch has to come back to that rank, which meanwhile can only compute as many forwards of
    its first stage as it may keep, and then still has the rest of its `work` to do.
    """
    partition, slices = space.columns["partition"], space.config.parallel.num_sequence_slices
    in_v = space.by_partition(lambda each: each.known.shape is Shape.V)
    there = cells.weighted(_whole(space) - ranks.final[partition]) / slices
    most = np.minimum(ranks.most[partition, FIRST] - 1 / slices, _share(space, ranks))
    found = work + there - most * cells.weighted(ranks.first[partition])
    return np.where(in_v, found, 0.0)


def _hidden(cells: Cells, held: Values, cluster: Cluster) -> Values:
    """Most seconds per microbatch that pairing can hide, for modules [N, K]."""
    layers = held[:, :EMBEDDING]
    each: list[Any] = [cells.weighted(layers, n) for n in range(PAIRED, NUMBERS)]
    work, other, messages, waits = (Phases(*each[at : at + 3]) for at in range(0, 12, 3))
    times = Paired(Times(compute=work, tp=other, ep=messages, host=waits), each[-1])
    found: Any = hidden(cluster.gpu, times, times, delays=True)
    return found


def _exposed(space: Space, loads: Loads, held: Values, cluster: Cluster) -> Values:
    """Exposed seconds of data-parallel communication per microbatch, for modules [W, K]."""
    gradients, parameters = map(space.sharded, ("splits_gradients", "splits_parameters"))
    if not gradients.any():
        return np.zeros(len(space))
    phases: list[Any] = [loads.work(held, phase) for phase in PHASES]
    sent: list[Any] = [np.where(parameters, loads.gathered(held), 0.0), loads.reduced(held)]
    joint, apart = (
        exposed(cluster.gpu, Phases(*phases), *sent, apart=apart).total for apart in (False, True)
    )
    return np.where(gradients, np.where(loads.defers, apart, joint), 0.0)


def _hop(space: Space, cells: Cells, cluster: Cluster) -> Values:
    """Seconds of a message from one pipeline rank to the next."""
    c = space.columns
    stride = c["dp"] * c["cp"] * c["tp"]
    empty, slope = affine(partial(hop_seconds, cluster), c["pp"], stride)
    return empty + cells.column(NUMBERS * KINDS) * slope


def _path(space: Space, ranks: Ranks, cells: Cells) -> Values:
    """Seconds of one microbatch to the last stage and back, plus all others in that stage."""
    partition = space.columns["partition"]
    final = ranks.final[partition]
    before = _whole(space) - final
    there_and_back = sum(cells.weighted(before, phase) for phase in (FORWARD, DX))
    forward, dx, most = (cells.weighted(final, n) for n in (FORWARD, DX, HIDEABLE))
    through = forward + dx - space.columns["pairs"] * most
    update = cells.weighted(ranks.first[partition], DW)
    alone = (there_and_back + update) / space.config.parallel.num_sequence_slices
    found: Values = alone + _share(space, ranks) * through
    return found


def _whole(space: Space) -> Values:
    """[K] modules of each kind in the whole model."""
    counts = module_counts(space.config.model, space.partitions[0].split.stages)
    return counts.sum(axis=0, dtype=float)


def _share(space: Space, ranks: Ranks) -> Values:
    """Microbatches per stage, which the copies of the model share."""
    found: Values = space.columns["microbatches"] / ranks.copies[space.columns["partition"]]
    return found


def _cells(space: Space, cluster: Cluster, times_cache: TimesCache | None) -> Cells:
    """The `_numbers` of each kind of module for one microbatch, the bytes of its message, and
    whether dW is deferred."""
    model, known = space.config.model, {} if times_cache is None else times_cache

    def of_layers(config: Config, times: LayerTimes, experts: bool) -> dict[int, list[float]]:
        memory = config.memory
        again = () if memory.recomputes_first_layers else run_again(memory)  # perhaps of no layer
        numbers = {
            place: [
                _numbers(times.layer(kind, again), times.host(kind))
                for kind in kinds
                if kind.experts == experts
            ]
            for place, kinds in sample_layers(model).items()
        }
        return {
            place: [*map(sum, zip(*each, strict=True))] for place, each in numbers.items() if each
        }

    def times_of(config: Config) -> LayerTimes:
        return LayerTimes(one_stage(config), cluster, Software(), known)

    def plain(config: Config) -> list[float]:
        times = times_of(config)
        ends = {EMBEDDING: _numbers(times.embedding()), HEAD: _numbers(times.head())}
        found = ends | of_layers(config, times, experts=False)
        return _in_order(found, message_bytes(times), times.defers)

    def with_experts(config: Config) -> list[float]:
        return _in_order(of_layers(config, times_of(config), experts=True), 0.0, 0.0)

    space = replace(space, columns=space.columns | {"defers": _defers(space)})
    columns = ("tp", "sp", "cp", "mbs", "memory", "defers")
    parts: list[Summand] = [(columns, plain)]
    if model.num_experts is not None:
        parts.append(((*columns, "ep", "etp"), with_experts))
    return Cells(space, NUMBERS * KINDS + 2, *parts)


def _defers(space: Space) -> Column:
    """0 without a pipeline, 1 with one, 2 if some schedules defer dW."""
    c, pipelined = space.columns, (space.columns["pp"] > 1).astype(np.int32)
    if space.config.parallel.pipeline_dx_first:
        return pipelined
    apart = space.by_partition(lambda partition: not partition.known.fused)
    return pipelined * (1 + (apart | (c["pairs"] * space.delays_weights > 0)))


FORWARD, DX, DW, HIDEABLE, PAIRED = range(5)
"""Numbers of a module, in seconds per microbatch, that the bounds sum: its phases, what any pair
may hide, and from here on what `hidden` takes."""
PHASES = (FORWARD, DX, DW)
NUMBERS = 17


def _numbers(times: Times, host: float = 0.0) -> list[float]:
    """These numbers, in their order; `host`: seconds in which the host issues the forward."""
    total, work, messages, waits = times.total, times.work, times.ep, times.host
    other = total + (work + messages + waits) * -1
    phases = (total, work, other, messages, waits)
    each, *paired = ((p.forward, p.dx, p.dw) for p in phases)
    return [*each, messages.total + waits.total, *chain(*paired), host]


def _in_order(numbers: Mapping[int, Sequence[float]], *further: float) -> list[float]:
    """The numbers, ordered by number and then by kind of module, followed by further ones."""
    nothing = [0.0] * NUMBERS
    each = [numbers.get(kind, nothing) for kind in range(KINDS)]
    return [*chain.from_iterable(zip(*each, strict=True)), *further]
