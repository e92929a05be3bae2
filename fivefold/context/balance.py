"""Splits tokens over context-parallel ranks: equal numbers, equal attention work; no torch.

Rows of one document are cut zigzag: rank r holds chunks r and 2P-1-r, which balances the causal
mask exactly. Packed documents are cut into equal chunks, assigned by the area of their mask:
largest first, to the rank with the least work so far. Documents are not padded.
"""

from collections.abc import Sequence

from fivefold.model.attention.blocks import DocumentMask, Span
from fivefold.model.shards import Shards

IMBALANCE = 1.05  # of the busiest rank's work to the mean that needs no finer chunks
MOST_CHUNKS = 16  # per rank


def split(rows: int, mask: DocumentMask, parts: int) -> Shards:
    """Split `rows` rows with attention mask `mask` over `parts` ranks.

    Raises:
        ValueError: the length of a row is not a multiple of 2 x parts.
    """
    if mask.starts[-1] % (2 * parts):
        raise ValueError(f"{mask.starts[-1]} tokens cannot be cut into 2 x {parts} equal chunks")
    chunks = zigzag(mask.starts[-1], parts) if len(mask.starts) == 2 else balanced(mask, parts)
    return Shards(rows, mask, chunks)


def zigzag(length: int, parts: int) -> tuple[tuple[Span, ...], ...]:
    """Chunks r and 2P-1-r of 2P equal chunks for each rank r of P = `parts`."""
    size = length // (2 * parts)
    return tuple(
        ((r * size, (r + 1) * size), (length - (r + 1) * size, length - r * size))
        for r in range(parts)
    )


def balanced(mask: DocumentMask, parts: int) -> tuple[tuple[Span, ...], ...]:
    """The coarsest split into equal chunks that balances mask areas within IMBALANCE."""
    length = mask.starts[-1]
    best, least = zigzag(length, parts), float("inf")
    per_rank = 2
    while per_rank <= MOST_CHUNKS and length % (per_rank * parts) == 0:
        size = length // (per_rank * parts)
        chunks = [(start, start + size) for start in range(0, length, size)]
        assigned = _assignment([mask.area(chunk) for chunk in chunks], parts, per_rank)
        areas = [sum(mask.area(chunks[i]) for i in own) for own in assigned]
        excess = max(areas) * parts / sum(areas)
        if excess < least:
            best = tuple(tuple(chunks[i] for i in sorted(own)) for own in assigned)
            least = excess
        if excess <= IMBALANCE:
            break
        per_rank *= 2
    return best


def _assignment(areas: Sequence[int], parts: int, each: int) -> list[list[int]]:
    """Assign `each` areas to every part: largest first, to the part with the least area so far."""
    assigned: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(areas)), key=lambda i: (-areas[i], i)):
        open_parts = [part for part in range(parts) if len(assigned[part]) < each]
        part = min(open_parts, key=lambda p: (sums[p], p))
        assigned[part].append(index)
        sums[part] += areas[index]
    return assigned
