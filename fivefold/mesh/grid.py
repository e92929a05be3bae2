"""Rank arithmetic of the attention mesh and the expert mesh.

One world is read in two ways (parallel folding). Attention and dense layers see
`[pp, dp_replicate, dp_shard, cp, tp]`, expert layers see `[pp, edp, ep, etp]`; both have the same
pipeline groups. The rightmost axis varies fastest, which is Megatron-LM's order tp-cp-ep-dp-pp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

ATTENTION_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")


@dataclass(frozen=True)
class Grid:
    """Sizes of every mesh axis; `edp` follows from the rest.

    Raises:
        ValueError: the expert axes do not divide the ranks of a pipeline stage (`check` reports
            this to users earlier).
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.ranks_per_stage % (self.ep * self.etp):
            raise ValueError(f"ep*etp = {self.ep * self.etp} must divide {self.ranks_per_stage}")

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks in one pipeline rank."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.pp * self.ranks_per_stage

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, which read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same expert weights."""
        return self.ranks_per_stage // (self.ep * self.etp)

    @property
    def expert_shards(self) -> int:
        """Number of ranks that share the state of an expert's parameter, if state is sharded."""
        return self.edp // gcd(self.edp, self.dp_replicate)

    def size(self, axis: str) -> int:
        """Number of ranks along one axis of either mesh.

        Raises:
            KeyError: there is no such axis.
        """
        if axis not in ATTENTION_AXES + EXPERT_AXES:
            raise KeyError(axis)
        return int(getattr(self, axis))

    def coordinates(self, rank: int, axes: Sequence[str] = ATTENTION_AXES) -> dict[str, int]:
        """The coordinates of a rank on the attention mesh, or on the mesh of `axes`."""
        found: dict[str, int] = {}
        for axis in reversed(axes):
            rank, found[axis] = divmod(rank, self.size(axis))
        return {axis: found[axis] for axis in axes}

    def rank(self, coordinates: dict[str, int], axes: Sequence[str] = ATTENTION_AXES) -> int:
        """The inverse of `coordinates`; an axis left out counts as 0."""
        rank = 0
        for axis in axes:
            rank = rank * self.size(axis) + coordinates.get(axis, 0)
        return rank

    def groups(
        self, over: Sequence[str], axes: Sequence[str] = ATTENTION_AXES
    ) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only along the axes `over`; they partition the world.

        Args:
            over: axes that vary inside a group, such as ("dp_shard", "cp").
            axes: the mesh to which they belong.
        """
        fixed: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank, axes)
            fixed.setdefault(tuple(at[a] for a in axes if a not in over), []).append(rank)
        return tuple(tuple(ranks) for ranks in fixed.values())

    def group_of(
        self, rank: int, over: Sequence[str], axes: Sequence[str] = ATTENTION_AXES
    ) -> tuple[int, ...]:
        """The group of `groups(over)` to which a rank belongs, without building the others."""
        at = self.coordinates(rank, axes)
        varied = [a for a in axes if a in over]
        sizes = [self.size(a) for a in varied]
        members = []
        for index in range(prod(sizes)):
            rest = index
            for axis, size in zip(reversed(varied), reversed(sizes), strict=True):
                rest, at[axis] = divmod(rest, size)
            members.append(self.rank(at, axes))
        return tuple(members)

    def holders(self, rank: int, *, sharded: bool) -> tuple[int, ...]:
        """The ranks that hold parts of the same dense matrices and, if `sharded`, of their state:
        by shard, then by part."""
        return self.group_of(rank, ("dp_shard", "cp", "tp") if sharded else ("tp",))

    def expert_shard_ranks(self, rank: int, shards: int) -> tuple[int, ...]:
        """The ranks that share the state of a rank's experts."""
        ranks = self.group_of(rank, ("edp",), EXPERT_AXES)
        block = ranks.index(rank) // shards
        return ranks[block * shards : (block + 1) * shards]

    def expert_holders(self, rank: int, shards: int) -> tuple[int, ...]:
        """The ranks that hold parts of the same experts and of their state: by shard, then by
        part."""
        return tuple(
            holder
            for sharing in self.expert_shard_ranks(rank, shards)
            for holder in self.group_of(sharing, ("etp",), EXPERT_AXES)
        )

    def dp_rank(self, rank: int) -> int:
        """Index among the `dp` ranks that read different samples."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def name(self, rank: int) -> str:
        """The coordinates of a rank as text: 'PP(1) DP(0) CP(0) TP(1)'."""
        at = self.coordinates(rank)
        name = f"PP({at['pp']}) DP({self.dp_rank(rank)}) CP({at['cp']}) TP({at['tp']})"
        if self.ep > 1:
            name += f" EP({self.coordinates(rank, EXPERT_AXES)['ep']})"
        return name

    def describe(self) -> list[str]:
        """The mesh as text, with a line for each axis: size, stride and the first group."""
        lines = []
        for axis in ATTENTION_AXES:
            stride = self.rank({axis: 1}) if self.size(axis) > 1 else 1
            group = range(0, self.size(axis) * stride, stride)
            shown = ", ".join(map(str, group[:4])) + (", ..." if len(group) > 4 else "")
            lines.append(f"{axis:<13}{self.size(axis):>6}  stride {stride:<6} ranks {shown}")
        return lines
