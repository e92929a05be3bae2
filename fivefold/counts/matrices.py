"""Which rank orthogonalises which matrix (Muon), and the bytes that this sends; torch-free.

Muon needs each matrix whole. Where several ranks hold the parts of one (tensor parallelism, ZeRO),
the matrices are shared out among them: each is put together on one rank and goes back in parts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapreplace
from math import prod

from fivefold.counts.parameters import ParameterRecord
from fivefold.counts.shards import num_expert_shards, num_shards
from fivefold.data_parallel.blocks import shard_dim
from fivefold.layout import Layout

ROUND = 1 << 24
"""Elements of the matrices that are whole on a rank at once, unless a single one has more."""
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer, or the same one of several experts, and the ranks that hold its parts.

    The ranks are numbered by shard, then by part.

    Attributes:
        name: global name.
        part: shape of what tensor parallelism leaves on a rank: [rows, columns], or [experts of
            these ranks, rows, columns].
        split_dim: dim that tensor-parallel ranks split; None: each has the whole.
        parts: number of these ranks.
        shards: number of ranks that share what it leaves.
    """

    name: str
    part: tuple[int, ...]
    split_dim: int | None = None
    parts: int = 1
    shards: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole."""
        return tuple(
            size * (self.parts if axis == self.split_dim else 1)
            for axis, size in enumerate(self.part)
        )

    def box(self, rank: int) -> Box:
        """Shape of a rank's part: tensor parallelism splits first, then FSDP2."""
        shard, part = divmod(rank, self.parts)
        found, sharded = [], shard_dim(self.part, self.shards)
        for axis, size in enumerate(self.part):
            first, start, each = part * size * (axis == self.split_dim), 0, size
            if axis == sharded:
                each = -(-size // self.shards)
                start = min(shard * each, size)
            found.append(slice(first + start, first + min(start + each, size)))
        return tuple(found)

    def size(self, rank: int) -> int:
        """Elements of a rank's part."""
        return prod(part.stop - part.start for part in self.box(rank))

    def sends(self, rank: int) -> bool:
        """Whether a rank sends its part: of ranks with the same part only the first does."""
        return self.split_dim is not None or rank % self.parts == 0

    @property
    def is_split(self) -> bool:
        """Whether a rank lacks rows or columns."""
        between_experts = len(self.part) > 2 and shard_dim(self.part, self.shards) == 0
        tensor_parallel = self.parts > 1 and self.split_dim is not None
        return tensor_parallel or (self.shards > 1 and not between_experts)

    @property
    def work(self) -> int:
        """Multiplications of one iteration: two products of the short side, one with the whole."""
        short, long = sorted(self.shape[-2:])
        return prod(self.shape[:-2]) * short * short * (2 * long + short)


@dataclass(frozen=True)
class MatrixAssignment:
    """Matrices in rounds, each assigned to the rank that orthogonalises it.

    Attributes:
        ranks: ranks of the group.
        rounds: what is sent together.
    """

    ranks: int
    rounds: tuple[tuple[tuple[Matrix, int], ...], ...]

    @classmethod
    def of(cls, matrices: Iterable[Matrix], ranks: int) -> "MatrixAssignment":
        """Assign the split matrices, those with the most work first, each to the rank with the
        least work so far.

        A round ends where the next matrix would be more than `ROUND` elements for each rank.
        """
        split = sorted((m for m in matrices if m.is_split), key=lambda m: (-m.work, m.name))
        next_ones = [(0, 0, rank) for rank in range(ranks)]  # elements of this round, work, rank
        rounds: list[list[tuple[Matrix, int]]] = []
        for matrix in split:
            held, work, owner = next_ones[0]
            size = prod(matrix.shape)
            if not rounds or (held and held + size > ROUND):
                rounds.append([])
                next_ones = sorted((0, work, rank) for _, work, rank in next_ones)
                held, work, owner = next_ones[0]
            rounds[-1].append((matrix, owner))
            heapreplace(next_ones, (held + size, work + matrix.work, owner))
        return cls(ranks, tuple(map(tuple, rounds)))

    def gathered(self, rank: int) -> int:
        """Elements that a rank sends in a step: its parts of matrices assigned to other ranks."""
        every = (each for assigned in self.rounds for each in assigned)
        return sum(m.size(rank) * m.sends(rank) for m, owner in every if owner != rank)

    def returned(self, rank: int) -> int:
        """Elements that a rank sends back: the other ranks' parts of its own matrices."""
        own = (m for assigned in self.rounds for m, owner in assigned if owner == rank)
        copies = ((m, m.parts if m.split_dim is None else 1) for m in own)
        return sum(each * prod(m.shape) - m.size(rank) for m, each in copies)


def parts_and_shards(layout: Layout) -> tuple[tuple[int, int], tuple[int, int]]:
    """Numbers of ranks that split a matrix (tensor parallelism) and that shard the parts, for dense
    matrices and for experts'."""
    grid = layout.grid
    return (grid.tp, num_shards(layout)), (grid.etp, num_expert_shards(layout))


def layer_matrices(
    layout: Layout, records: Iterable[ParameterRecord]
) -> dict[bool, tuple[int, list[Matrix]]]:
    """A rank's matrices that Muon updates: experts' under True, all others under False.

    Each with the number of ranks that hold their parts.
    """
    found, every = {}, [record for record in records if record.orthogonal]
    for experts, (parts, shards) in zip((False, True), parts_and_shards(layout), strict=True):
        matrices = [
            Matrix(each.name, each.shape, each.split_dim, parts, shards)
            for each in every
            if each.experts == experts
        ]
        found[experts] = parts * shards, matrices
    return found
