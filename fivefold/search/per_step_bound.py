"""Lower bounds on the time of communication once a step (`predict.data_parallel.per_step`)."""

import numpy as np
from numpy.typing import NDArray

from fivefold.predict.cluster import Cluster
from fivefold.predict.data_parallel.per_step import UNKNOWN, arrival, delays, hides_gathers
from fivefold.search.bound_tables import PREDICTION, SHARDING, Cells, Ranks, Values
from fivefold.search.columns import Column
from fivefold.search.data_parallel_bound import DataParallelBound
from fivefold.search.space import Space

MANY = 1_000_000  # messages, so that the last one takes no time


class Loads:
    """What modules [W, K] of each partition compute and send, and lower bounds on what of that is
    exposed once a step, in seconds [N] of each layout.

    Args:
        space: the N layouts.
        ranks: the tables of their partitions.
        cluster: the hardware.
        cells: times of the modules of some layouts.
        run: these layouts.
        of_run: [N] which of them has each layout's times.

    Attributes:
        data: bounds of what some layouts send.
        of_sharded: [N] which of them sends what each layout does.
        defers: [N] whether dW is computed apart from dX.
    """

    def __init__(
        self,
        space: Space,
        ranks: Ranks,
        cluster: Cluster,
        cells: Cells,
        run: Space,
        of_run: Column,
    ) -> None:
        self.space, self.ranks, self.cluster = space, ranks, cluster
        self.cells, self.of_run = cells, of_run
        sharded, self.of_sharded = space.distinct(SHARDING)
        self.data = DataParallelBound(sharded, cluster)
        self.defers = cells.column(-1)[of_run] > 0
        self.partitions = run.columns["partition"], sharded.columns["partition"]

    def work(self, modules: Values, phase: int) -> Values:
        """Seconds of forward (phase 0), dX (1) or dW (2) of modules."""
        return self.cells.weighted(modules[self.partitions[0]], phase)[self.of_run]

    def gathered(self, modules: Values) -> Values:
        """Seconds to gather the parameters of modules."""
        return self.data.gathered(modules[self.partitions[1]])[self.of_sharded]

    def reduced(self, modules: Values) -> Values:
        """Seconds to reduce the gradients of modules."""
        return self.data.reduced(modules[self.partitions[1]])[self.of_sharded]

    def before_all(self) -> Values:
        """Seconds by which gathers delay the first stage's first forward, and so everything after
        it."""
        first, parallel = self.ranks.first, self.space.config.parallel
        moved = self.gathered(first)
        if hides_gathers(parallel):
            work, layers = self.work(first, 0), self._layers(first)
            before, beside = delays(self.cluster.gpu, parallel, moved, work, layers, UNKNOWN)
            moved = before + beside
        return np.where(self.space.sharded("splits_parameters"), 0.0, moved)

    def summed(self, stage: Values, reduced: Values) -> Values:
        """Seconds from the last backward of a stage until its gradients are reduced.

        Args:
            stage: its modules [W, K] in each partition.
            reduced: seconds to reduce its gradients.
        """
        found = reduced
        if self.space.config.parallel.overlap_grad_reduce:
            backward = self.work(stage, 1) + self.work(stage, 2)
            alone = reduced / np.where(in_buckets(self.space), MANY, self._layers(stage))
            slowdown = self.cluster.gpu.overlap_slowdown
            found = arrival(-backward, 0 * backward, reduced, alone, slowdown)
        return np.where(self.space.sharded("splits_gradients"), 0.0, found)

    def _layers(self, modules: Values) -> Values:
        """[N] number of layers among modules [W, K], at least 1."""
        layers = modules[:, :PREDICTION].sum(axis=1)
        return np.maximum(layers, 1)[self.space.columns["partition"]]


def in_buckets(space: Space) -> NDArray[np.bool_]:
    """Whether gradients are sent in buckets, of which the last may be small."""
    if space.config.gathers_weights("no_shard"):
        return np.zeros(len(space), bool)
    return ~space.sharded("splits_optimizer")
