"""What bounds on memory and time have in common, for a million layouts at once.

Every candidate is reduced to the ranks of its pipeline that matter (the first, the last, the one
with the most work), to how many layers of each kind they hold, and to what one such layer costs
under its degrees. What depends on few columns is computed once for each of their combinations and
gathered by index; the rest is arithmetic on whole columns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.model.description import (
    LayerKind,
    describe,
    embedding_weights,
    head_weights,
    layer_kind,
    layer_kinds,
)
from fivefold.model.operations import Weight
from fivefold.model.shape import StageParts
from fivefold.search.columns import Column
from fivefold.search.partitions import Way
from fivefold.search.space import Space

Values = NDArray[np.float64]

DENSE, EXPERTS, PREDICTION, EMBEDDING, HEAD = range(5)
"""Kinds of blocks that stages are made of."""
KINDS = 5


def block_counts(model: ModelConfig, stages: Iterable[StageParts]) -> list[int]:
    """How many blocks of each kind some stages hold."""
    counts = [0] * KINDS
    for stage in stages:
        for layer in stage.layers:
            counts[_place(layer_kind(model, layer))] += 1
        counts[PREDICTION] += stage.mtp
        counts[EMBEDDING] += stage.embedding
        counts[HEAD] += stage.head
    return counts


def _place(kind: LayerKind) -> int:
    return PREDICTION if kind.predicts else EXPERTS if kind.experts else DENSE


@lru_cache(maxsize=16)
def sample_layers(model: ModelConfig) -> Mapping[int, LayerKind]:
    """The kinds of layers that a model has, by the kinds of their blocks."""
    return MappingProxyType({_place(kind): kind for kind in layer_kinds(model)})


@dataclass(frozen=True)
class Ranks:
    """The pipeline ranks that bounds look at, for every way; W ways, 4 ranks, K kinds of blocks.

    The first, the last, and of those with the most layers the first, which has the most in flight,
    and the last, for which the others wait longest.

    Attributes:
        held: [W, 4, K] blocks on the rank, those of a second copy of the model with them.
        chunk: [W, 4, C, K] blocks of each of its stages; none where it has fewer than C.
        before: [W, 4, K] blocks of the stages that lead to the rank's first one.
        own: [W, 4, K] blocks of the rank's first stage.
        first: [W, K] blocks of stage 0.
        final: [W, K] blocks of the last stage.
        thinnest: [W, 4] fewest layers in a stage of the rank.
        index: [W, 4] which ranks they are, counted from the nearest stage 0.
        chunks: [W] stages a rank, of one copy.
        copies: [W] of the model: each has its share of the microbatches.
        size: [W] pipeline ranks.
        deferred: [W, 4] dW of a stage that the rank leaves for later, at most.
        most: [W, 4] chunks that it keeps at once for their backwards, at most.
        kept: [W, 4, C] microbatches of each of its stages that it keeps at some time, if there are
            enough; 0: not known.
        drained: [W, 4, 2, C] those that it keeps, and whose dW waits, in the end; 0: not known.
        alone: [W, 4] forwards that are in no pair, at least.
        largest: [W, 4, K] most blocks of a kind in one of its stages.
        ahead: [W, 4, K] blocks from each of its stages to the end of the model, added up.
        crossings: [W, 4] messages on these ways.
    """

    held: Values
    chunk: Values
    before: Values
    own: Values
    first: Values
    final: Values
    thinnest: Values
    index: Column
    chunks: Column
    copies: Column
    size: Column
    deferred: Values
    most: Values
    kept: Values
    drained: Values
    alone: Values
    largest: Values
    ahead: Values
    crossings: Values

    @classmethod
    def of(cls, model: ModelConfig, ways: Sequence[Way]) -> "Ranks":
        """The ranks of some ways."""
        most = max((way.split.num_virtual * way.known.num_copies for way in ways), default=1)
        rows = [_ranks_of(model, way, most) for way in ways]
        each = zip(ways, rows, strict=True)

        def column(name: str) -> Any:
            return np.array([row[name] for row in rows])

        return cls(
            held=column("held").astype(float),
            chunk=column("chunk").astype(float),
            before=column("before").astype(float),
            own=column("own").astype(float),
            first=column("first").astype(float),
            final=column("final").astype(float),
            thinnest=column("thinnest").astype(float),
            index=column("index"),
            chunks=np.array([way.split.num_virtual for way in ways]),
            copies=np.array([way.known.num_copies for way in ways]),
            size=np.array([way.pp for way in ways]),
            deferred=np.array(
                [[w.known.limits.deferred(w.place(r)) for r in row["index"]] for w, row in each]
            ),
            kept=column("kept").astype(float),
            drained=column("drained").astype(float),
            alone=column("alone").astype(float),
            largest=column("chunk").astype(float).max(axis=2),
            most=np.array(
                [
                    [w.known.limits.in_flight(w.place(r)) for r in row["index"]]
                    for w, row in zip(ways, rows, strict=True)
                ]
            ),
            ahead=column("ahead").astype(float),
            crossings=column("crossings").astype(float),
        )


def _ranks_of(model: ModelConfig, way: Way, chunks: int) -> dict[str, Any]:
    split, limits = way.split, way.known.limits
    stages = split.stages
    # The second copy lies on the ranks in reverse.
    seen = [(rank, way.pp - 1 - rank)[: way.known.num_copies] for rank in range(way.pp)]
    on = [[stages[s] for of in places for s in split.stages_of(of)] for places in seen]
    layers = [sum(len(s.layers) + s.mtp for s in held) for held in on]
    fullest = [rank for rank in range(way.pp) if layers[rank] == max(layers)]
    chosen = (0, way.pp - 1, fullest[0], fullest[-1])
    nearest = [min(seen[rank]) for rank in chosen]
    starts = [split.stages_of(rank)[0] for rank in nearest]
    lies = split.placement
    crossed = [0, *accumulate(a != b for a, b in pairwise(lies))]
    own = [split.stages_of(rank) for rank in chosen]
    return {
        "held": [block_counts(model, on[rank]) for rank in chosen],
        "chunk": [
            [block_counts(model, on[rank][c : c + 1]) for c in range(chunks)] for rank in chosen
        ],
        "before": [block_counts(model, stages[:start]) for start in starts],
        "own": [block_counts(model, stages[start : start + 1]) for start in starts],
        "first": block_counts(model, stages[:1]),
        "final": block_counts(model, stages[-1:]),
        "thinnest": [min(len(s.layers) for s in on[rank]) for rank in chosen],
        "index": nearest,
        "kept": [_filled(limits.kept_at_once(way.place(rank)), chunks) for rank in chosen],
        "drained": [
            [_filled(held, chunks) for held in limits.drained(way.place(rank)) or (None, None)]
            for rank in chosen
        ],
        "alone": [limits.alone(way.place(rank)) for rank in chosen],
        "ahead": [block_counts(model, chain(*(stages[s:] for s in held))) for held in own],
        "crossings": [sum(crossed[-1] - crossed[s] for s in held) for held in own],
    }


def _filled(found: list[int] | None, count: int) -> list[int]:
    """So many numbers, the last of which are 0."""
    return [*(found or []), *[0] * (count - len(found or []))]


Summand = tuple[Sequence[str], Callable[[Config], Sequence[float]]]
"""Columns, and what depends on no others: the configuration of a candidate -> numbers."""


FOR_MEMORY, FOR_TIME = (0, 1, 2), (0, 1, 3)
"""Of the ranks, those whose memory, and whose time, is bounded."""


class Cells:
    """What depends on few columns, computed once for each of their combinations.

    Args:
        space: the candidates, of which there may be none.
        count: numbers of each part.
        parts: parts whose numbers are added up.
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


SHARDING = ("way", "tp", "cp", "dp", "ep", "etp", "strategy", "instances")
"""The columns that model state depends on."""


def block_parameters(config: Config) -> list[float]:
    """Parameters of a block of each kind on one rank, without experts; then those of experts."""
    model, parallel = config.model, config.parallel
    weights: dict[int, Sequence[Weight]] = {
        place: describe(model, kind).weights for place, kind in sample_layers(model).items()
    }
    # A tied output weight is the embedding itself where both are on one rank.
    untied = model.untie_embeddings_and_output_weights
    head = [weight for weight in head_weights(model) if untied or not weight.multiplies]
    weights |= {EMBEDDING: embedding_weights(model), HEAD: head}
    sizes = [0.0] * (2 * KINDS)
    for kind, found in weights.items():
        for weight in found:
            local = weight.local(
                parallel.tensor_model_parallel_size,
                parallel.expert_model_parallel_size,
                parallel.expert_tensor_parallel_size,
            )
            sizes[kind + KINDS * weight.of_experts] += prod(local)
    return sizes
