"""Attention to chosen tokens takes some queries at a time: which ones."""

from collections.abc import Iterable, Iterator

SCORES = 1 << 26
"""Most scores that are held at once, of all heads."""
_MOST = 512
"""Most queries of a row."""


def queries_at_once(rows: int, heads: int, keys: int) -> int:
    """Queries of each row whose scores are held at once: one at least."""
    return max(1, min(_MOST, keys, SCORES // (rows * heads * keys)))


def pieces(
    rows: int, heads: int, queries: Iterable[tuple[int, int]], keys: int
) -> Iterator[tuple[int, int]]:
    """(start, stop) of the queries that are taken at once, of those at these positions of a row."""
    step = queries_at_once(rows, heads, keys)
    for first, last in queries:
        for start in range(first, last, step):
            yield start, min(start + step, last)
