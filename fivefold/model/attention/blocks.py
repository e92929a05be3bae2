"""Attention masks as blocks: which keys a span of queries sees, cut into kernel calls; no torch.

Positions count tokens within a row. A rank may hold any spans of a row, in ascending order; an
index is the place of a token among those the rank holds.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from fivefold.config.reach import Reach

Span = tuple[int, int]
"""(start, stop) of consecutive tokens."""

TILE = 512
"""Queries per block at the edge of a sliding window; smaller means fewer masked scores computed."""


def flash_takes(features: int) -> bool:
    """Whether FlashAttention has kernels for heads of this many features."""
    return features % 8 == 0 and features <= 256


class Visibility(Enum):
    """Which keys of a block a query sees."""

    FULL = "full"
    CAUSAL = "causal"
    BAND = "band"


@dataclass(frozen=True)
class Block:
    """Queries and keys of one kernel call; every query sees at least one of the keys.

    Attributes:
        q: indices of the queries in the query tensor.
        k: indices of the keys in the key tensor.
        kind: FULL: every query sees every key; CAUSAL: q and k have equal length and query i sees
            keys 0 .. i; BAND: query i sees key j if 0 <= i + shift - j <= window.
        shift: position of the first query minus position of the first key.
        window: window of a BAND, in tokens.
    """

    q: Span
    k: Span
    kind: Visibility
    shift: int = 0
    window: int = 0


@dataclass(frozen=True)
class Segment:
    """Consecutive queries of one document, and the keys that at least one of them sees."""

    queries: Span
    keys: Span


@dataclass(frozen=True)
class DocumentMask:
    """Which keys the queries of a row see: those of their document, not after themselves.

    Attributes:
        starts: position of each document's first token, then the length of the row.
        window: how many tokens before itself a query sees; None: all.
    """

    starts: tuple[int, ...]
    window: int | None = None

    @staticmethod
    def of(documents: Sequence[int], reach: Reach) -> "DocumentMask":
        """What queries see of documents that start there: a chunk is a document of its own."""
        return DocumentMask(reach.starts(documents), reach.window)

    @property
    def whole(self) -> bool:
        """Whether a row is one document without a window."""
        return len(self.starts) == 2 and self.window is None

    def segments(self, span: Span) -> Iterator[Segment]:
        """The queries of a span, one segment per document."""
        document = bisect_right(self.starts, span[0]) - 1
        at = span[0]
        while at < span[1]:
            begin, end = self.starts[document], self.starts[document + 1]
            stop = min(end, span[1])
            first = begin if self.window is None else max(begin, at - self.window)
            yield Segment((at, stop), (first, stop))
            at, document = stop, document + 1

    def area(self, span: Span) -> int:
        """Number of (query, visible key) pairs for the queries of a span: their work."""
        return sum(self._pairs(segment) for segment in self.segments(span))

    def seen(self, spans: Iterable[Span]) -> tuple[Span, ...]:
        """The spans of all keys that queries in these spans see."""
        return joined(segment.keys for span in spans for segment in self.segments(span))

    def _pairs(self, segment: Segment) -> int:
        (start, stop), first = segment.queries, segment.keys[0]
        # Query p sees p + 1 - first keys until the window is full, then `most`.
        most = stop - first if self.window is None else self.window + 1
        growing = range(start - first + 1, min(stop - first, most) + 1)
        grown = max(len(growing), 0)
        return (
            grown * (start - first + 1) + grown * (grown - 1) // 2 + (stop - start - grown) * most
        )


def joined(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The union of spans: ascending, disjoint, adjacent spans merged."""
    union: list[Span] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        elif start < stop:
            union.append((start, stop))
    return tuple(union)


def common(some: Sequence[Span], others: Sequence[Span]) -> tuple[Span, ...]:
    """Intersection of two ascending lists of disjoint spans; spans of `some` are not merged."""
    found = []
    for start, stop in some:
        for other_start, other_stop in others:
            both = max(start, other_start), min(stop, other_stop)
            if both[0] < both[1]:
                found.append(both)
    return tuple(found)


def num_tokens(spans: Iterable[Span]) -> int:
    """Total length of the spans."""
    return sum(stop - start for start, stop in spans)


def indices(spans: Sequence[Span], of: Span) -> Span:
    """Indices of the tokens `of` in a tensor that holds `spans` one after the other.

    Raises:
        ValueError: `of` does not lie within one of the spans.
    """
    base = 0
    for start, stop in spans:
        if start <= of[0] and of[1] <= stop:
            return base + of[0] - start, base + of[1] - start
        base += stop - start
    raise ValueError(f"{of} is not in one of {spans}")


def cut(
    queries: Sequence[Span], keys: Sequence[Span], mask: DocumentMask, tile: int = TILE
) -> tuple[Block, ...]:
    """The blocks that compute attention of query spans to key spans.

    Each key span must lie within, before or after a query span, or be the start of the row up to
    that query span's end. Adjacent FULL blocks of the same queries or the same keys are merged.
    """
    found: list[Block] = []
    for span in queries:
        for segment in mask.segments(span):
            q_base = indices(queries, segment.queries)[0] - segment.queries[0]
            for held in common(keys, (segment.keys,)):
                k_base = indices(keys, held)[0] - held[0]
                for block in _meet(segment.queries, held, mask, tile):
                    q, k = _moved(block.q, q_base), _moved(block.k, k_base)
                    found.append(replace(block, q=q, k=k))
    return _together(found)


def _meet(queries: Span, keys: Span, mask: DocumentMask, tile: int) -> Iterator[Block]:
    """Blocks whose spans are positions, not yet indices."""
    before = keys[0], min(keys[1], queries[0])
    own = max(keys[0], queries[0]), keys[1]
    window = mask.window
    if window is None or queries[1] - 1 - keys[0] <= window:
        if before[0] < before[1]:
            yield Block(queries, before, Visibility.FULL)
        if own[0] < own[1]:
            yield Block(own, own, Visibility.CAUSAL)
        return
    for start in range(queries[0], queries[1], tile):
        stop = min(start + tile, queries[1])
        yield from _tile((start, stop), (keys[0], min(keys[1], stop)), window)


def _tile(queries: Span, keys: Span, window: int) -> Iterator[Block]:
    """Blocks of one query tile: at the window's edge, fully visible, and on the diagonal."""
    start, stop = queries
    edge = stop - 1 - window  # first position that every query of the tile has in its window
    first = max(keys[0], start - window)
    if edge > start:  # no key is visible to every query
        if first < keys[1]:
            last_to_see = min(stop, keys[1] + window)
            yield Block(
                (start, last_to_see), (first, keys[1]), Visibility.BAND, start - first, window
            )
        return
    band = first, min(edge, keys[1])
    middle = max(edge, first), min(start, keys[1])
    if band[0] < band[1]:
        yield Block(
            (start, min(stop, band[1] + window)), band, Visibility.BAND, start - first, window
        )
    if middle[0] < middle[1]:
        yield Block(queries, middle, Visibility.FULL)
    if start < keys[1]:
        yield Block(queries, queries, Visibility.CAUSAL)


def _together(found: list[Block]) -> tuple[Block, ...]:
    """Merge adjacent FULL blocks: first of the same queries, then of the same keys."""
    by_keys = _join(found, lambda a, b: a.q == b.q and a.k[1] == b.k[0])
    return tuple(_join(by_keys, lambda a, b: a.k == b.k and a.q[1] == b.q[0]))


def _join(found: list[Block], touch: Callable[[Block, Block], bool]) -> list[Block]:
    joint: list[Block] = []
    for block in found:
        last = joint[-1] if joint else None
        if last and last.kind == block.kind == Visibility.FULL and touch(last, block):
            joint[-1] = Block((last.q[0], block.q[1]), (last.k[0], block.k[1]), Visibility.FULL)
        else:
            joint.append(block)
    return joint


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
