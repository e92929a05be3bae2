"""Attention to chosen tokens takes some queries at a time: which ones."""

from collections.abc import Iterable, Iterator

SCORES = 1 << 26
"""Most numbers of a kind that are held at once, such as scores of all heads."""
_MOST = 512
"""Most queries of a row."""


def of_all(heads: int, index_heads: int, keys: int) -> int:
    """Numbers of a query that are held at once where a mask hides keys: scores of attention's heads
    of a rank, or of an indexer's."""
    return max(heads, index_heads) * keys


def of_chosen(heads: int, features: int, index_heads: int, topk: int, keys: int) -> int:
    """The same where each query takes the latents of its chosen tokens: scores of an indexer, or of
    attention's heads with these, or their features."""
    return max(index_heads * keys, max(heads, features) * min(topk, keys))


def queries_at_once(rows: int, numbers: int) -> int:
    """Queries of each row that are taken at once, of each of which so many numbers are held."""
    return max(1, min(_MOST, SCORES // (rows * numbers)))


def pieces(
    rows: int, numbers: int, queries: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(start, stop) of the queries that are taken at once, of those at these positions of a row."""
    step = queries_at_once(rows, numbers)
    for first, last in queries:
        for start in range(first, last, step):
            yield start, min(start + step, last)
