"""Tables shared by the lower bounds on memory and on time, for a million layouts at once.

Each layout is reduced to the pipeline ranks that can be the limit (the first, the last, those with
the most layers), to the number of modules of each kind on these ranks, and to the cost of one such
module under the layout's degrees of parallelism. A cost that depends on few columns is computed
once for each combination of their values and looked up by index; the rest is arithmetic on whole
columns.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.layers import describe
from fivefold.description.shape import StageParts
from fivefold.description.weights import Weight, embedding_weights, head_weights
from fivefold.layout import Layout
from fivefold.mesh.grid import Grid
from fivefold.pipeline.schedules.registry import known_of
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.stages import Split
from fivefold.search.columns import Column, codes
from fivefold.search.partitions import Partition
from fivefold.search.space import Space

Values = NDArray[np.float64]

LAYERS = range(8)
PREDICTION, EMBEDDING, HEAD = range(8, 11)
"""Kinds of modules in a pipeline stage: the model's kinds of layers in order of appearance (at most
eight), an MTP module with all its layers, the embedding, the head."""
KINDS = 11


def module_counts(model: ModelConfig, stages: Sequence[StageParts]) -> NDArray[np.int64]:
    """[stages, K] number of modules of each kind in each of these stages."""
    places = _layer_places(model)
    counts = np.zeros((len(stages), KINDS), np.int64)
    for stage, row in zip(stages, counts, strict=True):
        for place, layers in Counter(places[layer] for layer in stage.layers).items():
            row[place] = layers
        row[PREDICTION], row[EMBEDDING], row[HEAD] = stage.mtp, stage.embedding, stage.head
    return counts


def stage_kinds(counts: NDArray[np.int64]) -> tuple[list[list[int]], list[int]]:
    """The distinct rows of module counts, the first stage's first, and the index of each stage's
    row."""
    each = list(map(tuple, counts.tolist()))
    kinds = {modules: kind for kind, modules in enumerate(dict.fromkeys(each))}
    return [list(modules) for modules in kinds], [kinds[modules] for modules in each]


@lru_cache(maxsize=16)
def _layer_places(model: ModelConfig) -> tuple[int, ...]:
    """For each layer the index of its kind of module."""
    kinds = [layer_kind(model, layer) for layer in range(model.num_layers)]
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    return tuple(map(places.__getitem__, kinds))


@lru_cache(maxsize=16)
def sample_layers(model: ModelConfig) -> Mapping[int, tuple[LayerKind, ...]]:
    """For each kind of module the kinds of its layers: one for LAYERS, those of an MTP
    module for PREDICTION."""
    layers = dict.fromkeys(layer_kind(model, layer) for layer in range(model.num_layers))
    found: dict[int, tuple[LayerKind, ...]] = {place: (kind,) for place, kind in enumerate(layers)}
    further = model.prediction_layers[: model.prediction_size]
    if further:
        found[PREDICTION] = tuple(layer_kind(model, layer) for layer in further)
    return MappingProxyType(found)


@dataclass(frozen=True)
class Ranks:
    """The pipeline ranks that the bounds consider, for every partition.

    Four ranks of each partition: the first one; the last one; the first of those with the most
    layers, which has the most microbatches in flight; and the last of those, for which the others
    wait longest. Shapes: W partitions, 4 ranks, C stages on a rank, K kinds of modules.

    Attributes:
        held: [W, 4, K] modules on the rank, including those of a second copy of the model.
        chunk: [W, 4, C, K] modules of each stage on the rank; 0 where it has fewer than C stages.
        before: [W, 4, K] modules of all stages before the rank's first stage.
        own: [W, 4, K] modules of the rank's first stage.
        first: [W, K] modules of the first stage of the model.
        final: [W, K] modules of the last stage of the model.
        kinds: [W, X, K] modules of each kind of stage, the first one at first.
        thinnest: [W, 4] fewest layers in one stage of the rank.
        index: [W, 4] number of the rank, counted from the nearest rank that holds stage 0.
        chunks: [W] stages on a rank, for one copy of the model.
        copies: [W] copies of the model in the pipeline; they share the microbatches.
        size: [W] pipeline ranks.
        deferred: [W, 4] most weight gradients (dW) of a stage that the schedule defers at once.
        most: [W, 4] most chunks whose activations the rank keeps at once.
        kept: [W, 4, C] microbatches of each stage that the rank keeps at one moment, given enough
            microbatches; 0 where the schedule does not tell.
        drained: [W, 4, 2, C] microbatches of each stage, at one moment of the drain, that are kept
            for their backward, and whose dW is deferred; 0 where the schedule does not tell.
        alone: [W, 4] fewest forwards that run without a paired backward.
        largest: [W, 4, K] most modules of each kind in one stage of the rank.
        ahead: [W, 4, K] modules from each stage of the rank to the end of the model, summed over
            these stages.
        crossings: [W, 4] messages between ranks from each stage of the rank to the end of the
            model, summed over these stages.
    """

    held: Values
    chunk: Values
    before: Values
    own: Values
    first: Values
    final: Values
    kinds: Values
    thinnest: Values
    index: Values
    chunks: Values
    copies: Values
    size: Values
    deferred: Values
    most: Values
    kept: Values
    drained: Values
    alone: Values
    largest: Values
    ahead: Values
    crossings: Values

    @property
    def stages(self) -> Values:
        """[W] stages on a rank, of all copies of the model."""
        return self.chunks * self.copies

    @classmethod
    def of(cls, model: ModelConfig, partitions: Sequence[Partition]) -> "Ranks":
        """The tables of these partitions."""
        most = max(w.split.num_virtual * w.known.num_copies for w in partitions)
        rows = [_ranks_of(model, partition, most) for partition in partitions]
        kinds = _padded([row.pop("kinds") for row in rows])
        tables = {name: np.array([row[name] for row in rows], float) for name in rows[0]}
        return cls(**tables, kinds=kinds, largest=tables["chunk"].max(axis=2))


def _ranks_of(model: ModelConfig, partition: Partition, chunks: int) -> dict[str, Any]:
    split, limits = partition.split, partition.known.limits
    stages = split.stages
    # The second copy lies on the ranks in reverse.
    seen = [
        (rank, partition.pp - 1 - rank)[: partition.known.num_copies]
        for rank in range(partition.pp)
    ]
    on = [[s for of in places for s in split.stages_of(of)] for places in seen]
    counts = module_counts(model, stages)
    of_layers = [len(s.layers) + s.mtp for s in stages]
    layers = [sum(of_layers[s] for s in held) for held in on]
    fullest = [rank for rank in range(partition.pp) if layers[rank] == max(layers)]
    chosen = (0, partition.pp - 1, fullest[0], fullest[-1])
    nearest = [min(seen[rank]) for rank in chosen]
    starts = [split.stages_of(rank)[0] for rank in nearest]
    lies = split.placement
    crossed = [0, *accumulate(a != b for a, b in pairwise(lies))]
    own = [split.stages_of(rank) for rank in chosen]
    ahead = counts[::-1].cumsum(axis=0)[::-1]
    none = np.zeros(KINDS, np.int64)
    return {
        "held": [counts[on[rank]].sum(axis=0) for rank in chosen],
        "chunk": [
            [counts[s] for s in on[rank]] + [none] * (chunks - len(on[rank])) for rank in chosen
        ],
        "before": [ahead[0] - ahead[start] for start in starts],
        "own": [counts[start] for start in starts],
        "first": counts[0],
        "final": counts[-1],
        "kinds": stage_kinds(counts)[0],
        "thinnest": [min(len(stages[s].layers) for s in on[rank]) for rank in chosen],
        "index": nearest,
        "chunks": split.num_virtual,
        "copies": partition.known.num_copies,
        "size": partition.pp,
        "deferred": [limits.deferred(partition.place(rank)) for rank in nearest],
        "most": [limits.in_flight(partition.place(rank)) for rank in nearest],
        "kept": [_filled(limits.kept_at_once(partition.place(rank)), chunks) for rank in chosen],
        "drained": [
            [
                _filled(held, chunks)
                for held in limits.drained(partition.place(rank)) or (None, None)
            ]
            for rank in chosen
        ],
        "alone": [limits.alone(partition.place(rank)) for rank in chosen],
        "ahead": [ahead[list(held)].sum(axis=0) for held in own],
        "crossings": [sum(crossed[-1] - crossed[s] for s in held) for held in own],
    }


def _padded(rows: Sequence[list[list[int]]]) -> Values:
    """Stack lists of vectors into an array; shorter lists are padded by repeating their first
    vector."""
    most = max(map(len, rows))
    filled = [row + row[:1] * (most - len(row)) for row in rows]
    return np.array(filled, float).reshape(-1, most, KINDS)


def _filled(found: list[int] | None, count: int) -> list[int]:
    """The numbers, zero-padded to `count`."""
    return [*(found or []), *[0] * (count - len(found or []))]


Summand = tuple[Sequence[str], Callable[[Config], Sequence[float]]]
"""Names of columns, and a function from a candidate's configuration to numbers that depend on
these columns only."""


FOR_MEMORY, FOR_TIME = (0, 1, 2), (0, 1, 3)
"""Indices of the four ranks of `Ranks` that bound memory, and of those that bound time."""
FIRST, LAST = 0, 1
"""Indices of the first rank and of the last one."""


class Cells:
    """Numbers that depend on few columns, computed once for each combination of their values.

    Args:
        space: the candidates; there may be none.
        count: how many numbers each part computes.
        parts: parts, whose numbers are summed.
    """

    def __init__(self, space: Space, count: int, *parts: Summand) -> None:
        names = dict.fromkeys(name for columns, _ in parts for name in columns)
        few, self.index = space.distinct(tuple(names))
        self.table: Values = np.zeros((len(few), count))
        for columns, compute in parts:
            fewer, of_few = few.distinct(columns)
            values = [compute(fewer.config_of(row)) for row in range(len(fewer))]
            self.table += np.array(values, float).reshape(-1, count)[of_few]

    def column(self, number: int) -> Values:
        """The number at this position for every candidate."""
        found: Values = self.table[self.index, number]
        return found

    def weighted(self, weights: Values, number: int = 0) -> Values:
        """Sum over kinds of module: weights [N, K] times the number of each kind."""
        kinds, start = weights.shape[-1], number * KINDS
        found: Values = np.einsum(
            "nk,nk->n", weights, self.table[self.index, start : start + kinds]
        )
        return found


LARGE = 1e12  # bytes of a large message
SHARDING = ("partition", "tp", "cp", "dp", "ep", "etp", "strategy", "instances")
"""Columns that the memory of weights, gradients and optimizer state depends on."""


def parameter_cells(space: Space) -> tuple[Cells, Cells]:
    """Parameters of one module of each kind on a rank: without experts, then experts only; and the
    trained part of both."""
    degrees = ("tp", "ep", "etp")
    every, trained = (partial(_parameters, trained=only) for only in (False, True))
    return (
        Cells(space, 2 * KINDS, (degrees, every)),
        Cells(space, 2 * KINDS, (degrees, trained)),
    )


def _parameters(config: Config, *, trained: bool) -> list[float]:
    """The numbers of `parameter_cells`; only trained parameters if `trained`."""
    model, parallel = config.model, config.parallel
    weights: dict[int, Sequence[Weight]] = {
        place: [weight for kind in kinds for weight in describe(model, kind).weights]
        for place, kinds in sample_layers(model).items()
    }
    # A tied output weight is the embedding itself where both are on one rank.
    untied = model.untie_embeddings_and_output_weights
    head = [weight for weight in head_weights(model) if untied or not weight.multiplies]
    weights |= {EMBEDDING: embedding_weights(model), HEAD: head}
    sizes = [0.0] * (2 * KINDS)
    for kind, found in weights.items():
        for weight in found:
            if weight.trained < trained:
                continue
            local = weight.local(
                parallel.tensor_model_parallel_size,
                parallel.expert_model_parallel_size,
                parallel.expert_tensor_parallel_size,
            )
            # Predictions with the same weights have a share of them each.
            sets = model.prediction_sets / model.mtp_num_layers if kind == PREDICTION else 1
            sizes[kind + KINDS * weight.of_experts] += prod(local) * sets
    return sizes


def one_stage(config: Config) -> Layout:
    """A layout of the ranks that share one microbatch. A layer's cost depends only on these, on
    whether there is a pipeline, and on whether its schedule defers dW."""
    model, parallel = config.model, config.parallel
    experts = parallel.expert_model_parallel_size * parallel.expert_tensor_parallel_size
    grid = Grid(
        dp_shard=experts,
        cp=parallel.context_parallel_size,
        tp=parallel.tensor_model_parallel_size,
        ep=parallel.expert_model_parallel_size,
        etp=parallel.expert_tensor_parallel_size,
    )
    schedule = "1f1b" if known_of(parallel.pipeline_schedule).fused else "zb_h1"
    return Layout(config, grid, _whole(model), schedule, 1)


@lru_cache(maxsize=16)
def _whole(model: ModelConfig) -> Split:
    """The whole model as one stage."""
    return SplitSettings(model.num_layers, 1, mtp_num_layers=model.mtp_num_layers).split()


def affine(
    seconds: Callable[[int, int, float], float], size: Column, stride: Column
) -> tuple[Values, Values]:
    """Latency of a collective over each group in seconds, and its seconds per byte for large
    messages.

    Args:
        seconds: (ranks, their distance, bytes) -> seconds of the collective in one such group.
        size: ranks of each group.
        stride: distance of these ranks.
    """
    sizes, _ = codes(size)
    strides, more = codes(stride)
    index, groups = codes(sizes * more + strides)
    rows = np.zeros(groups, np.int64)
    rows[index] = np.arange(len(index))
    table = []
    for row in rows:
        group = int(size[row]), int(stride[row])
        empty = seconds(*group, 0.0)
        table.append((empty, (seconds(*group, LARGE) - empty) / LARGE))
    values = np.array(table).reshape(-1, 2)[index]
    return values[:, 0], values[:, 1]
