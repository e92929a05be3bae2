"""Splits queries of attention to chosen tokens into pieces that are processed at once."""

from collections.abc import Iterable, Iterator

SCORES = 1 << 26
"""Most numbers of one kind that are held at once, such as scores of all heads."""
_MOST = 512
"""Most queries of a row in a piece."""


def of_all(heads: int, index_heads: int, keys: int) -> int:
    """Numbers per query that are held at once with a mask: scores of the rank's attention heads, or
    of the indexer's."""
    return max(heads, index_heads) * keys


def of_chosen(heads: int, features: int, index_heads: int, topk: int, keys: int) -> int:
    """The same if each query reads the latents of its chosen tokens: scores of the indexer or of
    attention's heads, or features of the latents."""
    return max(index_heads * keys, max(heads, features) * min(topk, keys))


def queries_at_once(rows: int, numbers: int) -> int:
    """Number of queries of each row in a piece, given the numbers that are held per query."""
    return max(1, min(_MOST, SCORES // (rows * numbers)))


def pieces(
    rows: int, numbers: int, queries: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """(start, stop) of each piece of the queries at these positions of a row."""
    step = queries_at_once(rows, numbers)
    for first, last in queries:
        for start in range(first, last, step):
            yield start, min(start + step, last)
