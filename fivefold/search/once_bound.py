"""Lower bounds on the times of what is sent once a step (`predict.data_parallel.once`)."""

import numpy as np

from fivefold.predict.cluster import Cluster
from fivefold.search.bound_tables import KINDS, PREDICTION, SHARDING, Cells, Ranks, Values
from fivefold.search.columns import Column
from fivefold.search.data_parallel_bound import DataParallelBound
from fivefold.search.space import Space


class Loads:
    """What modules [W, K] of each partition compute and send, in seconds [N] of each layout.

    Args:
        space: the N layouts.
        cluster: the hardware.
        cells: times of the modules of some layouts.
        run: these layouts.
        of_run: [N] which of them has each layout's times.

    Attributes:
        data: bounds of what some layouts send.
        of_sharded: [N] which of them sends what each layout does.
    """

    def __init__(
        self, space: Space, cluster: Cluster, cells: Cells, run: Space, of_run: Column
    ) -> None:
        self.cells, self.of_run = cells, of_run
        sharded, self.of_sharded = space.distinct(SHARDING)
        self.data = DataParallelBound(sharded, cluster)
        self.partitions = run.columns["partition"], sharded.columns["partition"]

    def work(self, modules: Values, phase: int) -> Values:
        """Their forward (phase 0), dX (1) or dW (2)."""
        return self.cells.weighted(modules[self.partitions[0]], phase * KINDS)[self.of_run]

    def gathered(self, modules: Values) -> Values:
        """To gather their parameters."""
        return self.data.gathered(modules[self.partitions[1]])[self.of_sharded]

    def reduced(self, modules: Values) -> Values:
        """To reduce their gradients."""
        return self.data.reduced(modules[self.partitions[1]])[self.of_sharded]


def beside(cluster: Cluster, work: Values, moved: Values) -> Values:
    """Exposed seconds of `moved` beside `work`, both sums over parts: as `compute.overlapped` is
    convex, at most the sum of the parts' exposed seconds."""
    slowdown = cluster.gpu.overlap_slowdown
    found: Values = np.maximum(0, moved - work) + slowdown * np.minimum(work, moved)
    return found


class OnceBound:
    """Lower bounds on exposed seconds of N layouts.

    Args:
        space: the layouts.
        ranks: the tables of their partitions.
        cluster: the hardware.
        loads: what their modules compute and send.
    """

    def __init__(self, space: Space, ranks: Ranks, cluster: Cluster, loads: Loads) -> None:
        self.space, self.ranks, self.cluster, self.loads = space, ranks, cluster, loads
        self.parallel, self.partition = space.config.parallel, space.columns["partition"]
        self.gathers = ~space.sharded("splits_parameters")

    def before_all(self) -> Values:
        """Seconds by which gathers delay the first forward of the first stage, and all after it."""
        first = self.ranks.first
        moved, layers = self.loads.gathered(first), self._layers(first)
        if self.parallel.overlap_param_gather_with_optimizer_step:  # which may hide the first layer
            moved = beside(self.cluster, self.loads.work(first, 0), moved - moved / layers)
        elif self.parallel.overlap_param_gather:
            moved = self._by_layer(self.loads.work(first, 0), moved, layers)
        return np.where(self.gathers, moved, 0.0)

    def summed(self, stage: Values, reduced: Values) -> Values:
        """Seconds from the last backward of a stage until its gradients are summed.

        Args:
            stage: its modules [W, K] in each partition.
            reduced: seconds to reduce its gradients.
        """
        backward, found = self.loads.work(stage, 1) + self.loads.work(stage, 2), reduced
        if self.parallel.overlap_grad_reduce:
            found = self._by_layer(backward, reduced, self._layers(stage))
        if not self.space.config.gathers_weights("no_shard"):  # the last may be small
            whole = beside(self.cluster, backward, reduced)
            found = np.where(self.space.sharded("splits_optimizer"), found, whole)
        return np.where(self.space.sharded("splits_gradients"), 0.0, found)

    def _by_layer(self, work: Values, moved: Values, layers: Values) -> Values:
        """Exposed seconds of a transfer layer by layer, of which one is never hidden."""
        alone = moved / layers
        return alone + beside(self.cluster, work, moved - alone)

    def _layers(self, modules: Values) -> Values:
        """[N] number of layers among modules [W, K], at least 1."""
        return np.maximum(modules[:, :PREDICTION].sum(axis=1), 1)[self.partition]
