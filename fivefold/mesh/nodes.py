"""Sizes of ZeRO++'s node groups within a sharding group; torch-free."""

from dataclasses import dataclass
from typing import Self

from fivefold.config.parallel import ParallelConfig
from fivefold.mesh.grid import Grid


@dataclass(frozen=True)
class NodeSizes:
    """Number of consecutive ranks of a sharding group that are in one node; 1: undivided.

    Attributes:
        hpz: ranks that keep a second copy of weights together.
        qgz: ranks that sum gradients before they send to other nodes.
    """

    hpz: int = 1
    qgz: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Self:
        """The sizes for dense parameters."""
        return cls(parallel.zero_hpz_partition_size, parallel.zero_qgz_partition_size)

    @classmethod
    def of_experts(cls, parallel: ParallelConfig, grid: Grid) -> Self:
        """The sizes for experts, which have fewer shards that are farther apart."""
        dense = cls.of(parallel)
        return cls(experts_within(dense.hpz, grid), experts_within(dense.qgz, grid))


def experts_within(size: int, grid: Grid) -> int:
    """Shards of an expert in a node that holds `size` dense shards; 1, too, if it holds all.

    A size of 1 divides nothing, also where experts have more shards than dense parameters.
    """
    if size == 1:
        return 1
    within = max(1, size * grid.tp // (grid.ep * grid.etp))
    return 1 if within >= grid.expert_shards else within


def parts_of(
    ranks: tuple[int, ...], rank: int, size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of a rank's node, and the ranks in its place in every node."""
    node, place = divmod(ranks.index(rank), size)
    return ranks[node * size : (node + 1) * size], ranks[place::size]
