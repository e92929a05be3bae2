"""The data-parallel shards of the optimizer state: who shares it, and what each rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fivefold.counts.blocks import GatheredBlock
from fivefold.data_parallel.blocks import shard_dim
from fivefold.layout import Layout
from fivefold.mesh.grid import EXPERT_AXES


def num_shards(layout: Layout) -> int:
    """Number of ranks that share the optimizer state of a dense parameter."""
    shared = layout.config.parallel.sharding.splits_optimizer
    return layout.grid.dp_shard * layout.grid.cp if shared else 1


def num_expert_shards(layout: Layout) -> int:
    """Number of ranks that share the optimizer state of an expert's parameter."""
    return 1 if num_shards(layout) == 1 else layout.grid.expert_shards


def held(shape: tuple[int, ...], shards: int, shard: int = 0) -> int:
    """Elements of a parameter in one shard, which FSDP2 cuts along one dim.

    Rows may not divide evenly, so that the last shards are shorter.
    """
    if shard_dim(shape, shards):
        return prod(shape) // shards
    each = -(-shape[0] // shards)
    return min(max(shape[0] - shard * each, 0), each) * prod(shape[1:])


@dataclass(frozen=True)
class ShardPlace:
    """A rank's place among those that share the state of dense parameters, and of experts.

    Attributes:
        shards: number of ranks that share the state of a dense parameter.
        shard: index of the rank among these; the first one keeps the most.
        expert_shards: number of ranks that share the state of an expert's parameter.
        expert_shard: index of the rank among these.
    """

    shards: int = 1
    shard: int = 0
    expert_shards: int = 1
    expert_shard: int = 0

    @classmethod
    def of(cls, layout: Layout, rank: int) -> "ShardPlace":
        """The place of a rank."""
        at, grid = layout.grid.coordinates(rank), layout.grid
        shards, expert_shards = num_shards(layout), num_expert_shards(layout)
        shard = at["dp_shard"] * grid.cp + at["cp"] if shards > 1 else 0
        expert_at = grid.coordinates(rank, EXPERT_AXES)["edp"]
        return cls(shards, shard, expert_shards, expert_at % expert_shards)

    @classmethod
    def first(cls, layout: Layout) -> "ShardPlace":
        """The place of the first rank, which holds the most."""
        return cls(shards=num_shards(layout), expert_shards=num_expert_shards(layout))

    def part(self, shape: tuple[int, ...], *, experts: bool) -> int:
        """Elements that the rank keeps of a parameter, whose shape is that before sharding."""
        if experts:
            return held(shape, self.expert_shards, self.expert_shard)
        return held(shape, self.shards, self.shard)

    def parts(self, block: GatheredBlock) -> Iterator[tuple[tuple[int, ...], int]]:
        """The shape of each parameter of a block, and the elements that the rank keeps."""
        for shape in block.dense:
            yield shape, self.part(shape, experts=False)
        for shape in block.experts:
            yield shape, self.part(shape, experts=True)

    def rearranged(self, block: GatheredBlock) -> list[int]:
        """Elements of each parameter of a block that is cut along another dim than its first, of
        all ranks. FSDP2 sends by first dims, so it copies these before a reduction and after a
        gather."""
        each = [(shape, self.shards) for shape in block.dense]
        each += [(shape, self.expert_shards) for shape in block.experts]
        return [prod(shape) for shape, shards in each if shards > 1 and shard_dim(shape, shards)]

    def held(self, block: GatheredBlock) -> int:
        """Elements of one block that the rank keeps."""
        return _elements(self, block)

    def largest(self, block: GatheredBlock) -> int:
        """Elements of the rank's shard of the parameter of which it holds most."""
        return max((size for _, size in self.parts(block)), default=0)


@lru_cache(maxsize=4096)
def _elements(at: ShardPlace, block: GatheredBlock) -> int:
    """`ShardPlace.held`, cached, since a search needs it often for few blocks."""
    return sum(size for _, size in at.parts(block))
