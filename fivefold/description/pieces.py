"""Attention to chosen tokens takes some queries at a time: which ones."""

from collections.abc import Iterator

SCORES = 1 << 26
"""Most scores that are held at once, of all heads."""
_MOST = 512
"""Most queries of a row."""


def queries_at_once(rows: int, heads: int, keys: int) -> int:
    """Queries of each row whose scores are held at once: one at least."""
    return max(1, min(_MOST, keys, SCORES // (rows * heads * keys)))


def pieces(rows: int, heads: int, queries: int, keys: int) -> Iterator[tuple[tuple[int, int], int]]:
    """(start, stop) of the queries that are taken at once, of the last ones, and how many keys come
    before their end."""
    step = queries_at_once(rows, heads, keys)
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield (start, stop), keys - queries + stop
