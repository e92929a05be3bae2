"""The chunks in which a recurrence walks through documents, all documents side by side."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.description.linear_attention import CHUNK
from fivefold.mesh.device import without_waiting


@dataclass(frozen=True, eq=False)
class DocumentChunks:
    """The documents of T tokens, each cut into chunks from its own beginning.

    Longer documents come first. Step i takes chunk i of every document that has one, so the
    documents of a step are always the first ones, and the chunks of a step follow those of the step
    before. A document's last chunk is padded with its last token; the padding does not count.

    Attributes:
        active: number of documents in each step.
        take: [N, CHUNK] int64, the token in each place of the N chunks.
        real: [N, CHUNK] bool, whether the place counts; None: all do.
        put: [T] int64, the place of each token among all N * CHUNK.
        position: [T] int64, the tokens of the same document before each.
    """

    active: tuple[int, ...]
    take: Tensor
    real: Tensor | None
    put: Tensor
    position: Tensor

    @classmethod
    def of(cls, starts: Sequence[int], device: torch.device) -> "DocumentChunks":
        """The chunks of documents.

        Args:
            starts: first token of each document, then T.
            device: where the tokens are.
        """
        ends = torch.tensor(starts)
        first, lengths = ends[:-1], ends.diff()
        position = torch.arange(starts[-1]) - first.repeat_interleave(lengths)
        counts = (lengths + CHUNK - 1) // CHUNK
        order = counts.argsort(descending=True, stable=True)
        first, last, counts = first[order], ends[1:][order], counts[order]
        active = [int((counts > step).sum()) for step in range(int(counts[0]))]
        chunks = [(first[:count] + CHUNK * step, last[:count]) for step, count in enumerate(active)]
        begin, end = (torch.cat(each)[:, None] for each in zip(*chunks, strict=True))
        place = begin + torch.arange(CHUNK)
        real = place < end
        put = torch.empty_like(position)
        put[place[real]] = torch.arange(place.numel()).view_as(place)[real]
        take = torch.minimum(place, end - 1)
        counting = None if bool(real.all()) else without_waiting(real, device)
        places = (without_waiting(x, device) for x in (put, position))
        return cls(tuple(active), without_waiting(take, device), counting, *places)
