"""Lower bounds on the times of data-parallel communication and of the optimizer."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from fivefold.counts.policy import engine_policy
from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.muon import least_orthogonalising
from fivefold.predict.data_parallel.update import offload_seconds, summing_seconds, update_seconds
from fivefold.predict.data_parallel.zeropp import least_bytes
from fivefold.predict.times.communication import (
    GroupSpan,
    all_reduce,
    gather,
    reduce_scatter,
    span,
)
from fivefold.search.bound_tables import (
    EMBEDDING,
    FOR_TIME,
    KINDS,
    PREDICTION,
    Cells,
    Ranks,
    Values,
    affine,
    parameter_cells,
    sample_layers,
)
from fivefold.search.columns import Column
from fivefold.search.space import Space

Collective = Callable[[Cluster, GroupSpan, float], float]
"""Seconds of a collective for a group and a number of bytes."""


class DataParallelBound:
    """Lower bounds on data-parallel time; the space needs only rows that differ in sharding.

    Args:
        space: the layouts.
        cluster: the hardware.
    """

    def __init__(self, space: Space, cluster: Cluster) -> None:
        c = space.columns
        self.space, self.cluster = space, cluster
        self.sizes, self.trained = parameter_cells(space)
        self.shard, self.expert = space.replicas, space.expert_shards
        parallel = space.config.parallel
        self.wire = float(space.config.sent_gradient_bytes)
        self.copy, narrow = least_bytes(space.config)
        self.scattered = narrow or self.wire
        model, ones = space.config.model, np.ones_like(self.expert)
        modules = sample_layers(model).items()
        self.mixtures = [n for n, kinds in modules if any(kind.experts for kind in kinds)]
        self.in_bf16 = [n for n, kinds in modules if any(kind.wide for kind in kinds)]
        # With hpZ all gathers but one are in a node; that of experts may hold all their shards.
        node, whole = parallel.zero_hpz_partition_size, (self.shard, self.expert)
        near = whole if node == 1 else (np.minimum(self.shard, node), ones)
        strides = c["tp"], c["ep"] * c["etp"]
        replicas = c["instances"], space.edp // self.expert
        further = c["tp"] * self.shard, strides[1] * self.expert
        wide = parallel.ddp_reduce_scatter_with_fp32_accumulation
        two = parallel.zero_qgz_partition_size > 1  # all-to-alls: no bound is known
        in_pairs = partial(reduce_scatter, in_pairs=wide or narrow is not None)
        scatter: Collective = (lambda *_: 0.0) if two else in_pairs
        self._gather, self._reduce, self._scatter, between = (
            [self._affine(move, *each) for each in zip(sizes, apart, strict=True)]
            for move, sizes, apart in (
                (gather, near, strides),
                (all_reduce, whole, strides),
                (scatter, whole, strides),
                (all_reduce, replicas, further),
            )
        )
        self._between = [(at, each / own) for (at, each), own in zip(between, whole, strict=True)]

    def _affine(self, move: Collective, size: Column, stride: Column) -> tuple[Values, Values]:
        def seconds(ranks: int, apart: int, sent: float) -> float:
            return move(self.cluster, span(self.cluster, ranks, apart), sent)

        return affine(seconds, size, stride)

    def gathered(self, held: Values) -> Values:
        """[N] seconds to gather the parameters of modules [N, K]."""
        shards = self.space.sharded("splits_optimizer")
        return np.where(shards, self._seconds(held, self._gather, self.copy, self.sizes), 0.0)

    def reduced(self, held: Values) -> Values:
        """[N] seconds to reduce the gradients of modules [N, K]."""
        between = self._seconds(held, self._between, self.wire, self.trained)
        split = self._seconds(held, self._scatter, self.scattered, self.trained) + between
        most = np.inf if self.space.config.gathers_weights("no_shard") else 1  # perhaps all in one
        whole = self._seconds(held, self._reduce, self.wire, self.trained, most)
        return np.where(self.space.sharded("splits_optimizer"), split, whole)

    def _seconds(
        self,
        held: Values,
        moves: Sequence[tuple[Values, Values]],
        size: float,
        of: Cells,
        most: float = np.inf,
    ) -> Values:
        """Seconds to transfer dense parameters and experts in at most this many messages each."""
        counts = _messages(held, self.mixtures)
        parts = of.weighted(held), of.weighted(held, 1)
        total = np.zeros(len(self.space))
        for count, parameters, (empty, slope) in zip(counts, parts, moves, strict=True):
            total += np.minimum(count, most) * empty + parameters * size * slope
        return total

    def optimizer(self, ranks: Ranks) -> Values:
        """Seconds of the optimizer update on the rank with the most parameters."""
        sharded, policy = self.space.sharded("splits_optimizer"), engine_policy(self.space.config)

        def kept(held: Values) -> Values:
            dense, expert = self.trained.weighted(held), self.trained.weighted(held, 1)
            return np.where(sharded, dense / self.shard + expert / self.expert, dense + expert)

        most = self._most(ranks, kept)
        here = update_seconds(self.cluster, policy, most, kernels=0)
        return here + offload_seconds(self.cluster, policy, most) + self._orthogonalising()

    def _most(self, ranks: Ranks, value: Callable[[Values], Values]) -> Values:
        """Maximum over ranks of a function of their modules."""
        partition = self.space.columns["partition"]
        return np.maximum.reduce([value(ranks.held[partition, which]) for which in FOR_TIME])

    def _orthogonalising(self) -> Values:
        """Seconds for Muon to orthogonalise matrices, averaged over the ranks."""
        c, sharded = self.space.columns, self.space.sharded("splits_optimizer")
        found: Values = np.zeros(len(self.space))
        for ep in np.unique(c["ep"]):
            dense, experts = least_orthogonalising(self.space.config, self.cluster.gpu, int(ep))
            each = dense / (c["tp"] * np.where(sharded, self.shard, 1))
            each = each + experts / (c["etp"] * np.where(sharded, self.expert, 1))
            found = np.where(c["ep"] == ep, each / c["pp"], found)
        return found

    def sums(self, ranks: Ranks) -> Values:
        """`summing_seconds` on the rank with the most parameters, if gradients are kept whole."""

        def apart(held: Values) -> Values:
            layers = held * (np.arange(KINDS) < EMBEDDING)
            narrow = layers * ~np.isin(np.arange(KINDS), self.in_bf16)
            dense, experts = self.trained.weighted(narrow), self.trained.weighted(layers, 1)
            return summing_seconds(self.cluster, self.space.config, dense, experts)

        return np.where(self.space.sharded("splits_gradients"), 0.0, self._most(ranks, apart))


def _messages(held: Values, mixtures: list[int]) -> tuple[Values, Values]:
    """Number of messages per module: of dense parameters (one per layer, one for both ends), and of
    experts."""
    layers = held[:, :PREDICTION].sum(axis=1) + held[:, PREDICTION:].max(axis=1)
    return layers, held[:, mixtures].sum(axis=1)
