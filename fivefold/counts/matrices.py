"""Which rank orthogonalises which matrix of the layers, and what is sent for it; torch-free.

Muon needs each matrix whole. Where several ranks hold the parts of one (tensor parallelism, ZeRO),
the matrices are dealt out among them: each is put together on one rank and goes back in parts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fivefold.counts.parameters import ParameterRecord
from fivefold.counts.state import num_expert_shards, num_shards
from fivefold.data_parallel.blocks import shard_dim
from fivefold.layout import Layout

ROUND = 1 << 24
"""Elements of the matrices that are whole on a rank at once, unless a single one has more."""
Box = tuple[slice, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a layer, or the same one of several experts.

    Attributes:
        name: global name.
        shape: [rows, columns], or [experts of these ranks, rows, columns].
        boxes: the part of each rank that holds one, in the order of their group.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each rank's part."""
        return tuple(prod(part.stop - part.start for part in box) for box in self.boxes)

    @cached_property
    def senders(self) -> tuple[int, ...]:
        """The ranks whose parts make it up: of equal parts the first."""
        parts = zip(self.boxes, self.sizes, strict=True)
        first = {str(box): rank for rank, (box, size) in reversed([*enumerate(parts)]) if size}
        return tuple(sorted(first.values()))

    @property
    def is_split(self) -> bool:
        """Whether a rank has no whole rows and columns."""
        whole = tuple(slice(0, size) for size in self.shape[-2:])
        return any(
            size and box[-2:] != whole for box, size in zip(self.boxes, self.sizes, strict=True)
        )

    @property
    def work(self) -> int:
        """Multiplications of one iteration: two products of the short side, one with the whole."""
        short, long = sorted(self.shape[-2:])
        return prod(self.shape[:-2]) * short * short * (2 * long + short)


@dataclass(frozen=True)
class MatrixDeal:
    """Matrices in rounds, each with the rank that puts it together.

    Attributes:
        ranks: ranks of the group.
        rounds: what is sent together.
    """

    ranks: int
    rounds: tuple[tuple[tuple[Matrix, int], ...], ...]

    @classmethod
    def of(cls, matrices: Iterable[Matrix], ranks: int) -> "MatrixDeal":
        """MatrixDeal out the matrices that are split, those with most work first, to whom has least.

        A round ends where the next matrix would be more than `ROUND` elements for each rank.
        """
        split = sorted((m for m in matrices if m.is_split), key=lambda m: (-m.work, m.name))
        total, held = [0] * ranks, [0] * ranks
        rounds: list[list[tuple[Matrix, int]]] = []
        for matrix in split:
            owner = min(range(ranks), key=lambda rank: (held[rank], total[rank]))
            size = prod(matrix.shape)
            if not rounds or (held[owner] and held[owner] + size > ROUND):
                rounds.append([])
                held = [0] * ranks
                owner = min(range(ranks), key=total.__getitem__)
            rounds[-1].append((matrix, owner))
            held[owner] += size
            total[owner] += matrix.work
        return cls(ranks, tuple(map(tuple, rounds)))

    def gathered(self, rank: int) -> int:
        """Elements that a rank sends to those who put matrices together."""
        every = (each for dealt in self.rounds for each in dealt)
        return sum(m.sizes[rank] for m, owner in every if owner != rank and rank in m.senders)

    def returned(self, rank: int) -> int:
        """Elements that it sends back to the others."""
        own = (m for dealt in self.rounds for m, owner in dealt if owner == rank)
        return sum(sum(m.sizes) - m.sizes[rank] for m in own)


def layer_matrices(
    layout: Layout, records: Iterable[ParameterRecord]
) -> dict[bool, tuple[int, list[Matrix]]]:
    """A rank's matrices of layers: those of experts under True, the rest under False.

    Each with the number of ranks that hold their parts, which are ordered by shard, then by part.
    """
    grid, found = layout.grid, {}
    every = [record for record in records if record.orthogonal]
    for experts, parts, shards in (
        (False, grid.tp, num_shards(layout)),
        (True, grid.etp, num_expert_shards(layout)),
    ):
        matrices = [_matrix(each, parts, shards) for each in every if each.experts == experts]
        found[experts] = parts * shards, matrices
    return found


def _matrix(record: ParameterRecord, parts: int, shards: int) -> Matrix:
    here, dim = record.shape, record.split_dim
    whole = tuple(size * (parts if axis == dim else 1) for axis, size in enumerate(here))
    boxes = tuple(
        tuple(_box(here, dim, part, shards, shard))
        for shard in range(shards)
        for part in range(parts)
    )
    return Matrix(record.name, whole, boxes)


def _box(
    here: Sequence[int], dim: int | None, part: int, shards: int, shard: int
) -> Iterator[slice]:
    """The part of a rank: tensor parallelism splits first, and FSDP2 what it leaves."""
    sharded = shard_dim(here, shards)
    for axis, size in enumerate(here):
        first = part * size if axis == dim else 0
        if axis == sharded:
            each = -(-size // shards)
            start = min(shard * each, size)
            yield slice(first + start, first + min(start + each, size))
        else:
            yield slice(first, first + size)
