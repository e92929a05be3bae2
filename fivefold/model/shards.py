"""How the tokens of a microbatch are split over context-parallel ranks; no torch."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.config.reach import Reach
from fivefold.model.attention.blocks import Block, DocumentMask, Span, common, cut, joined


@dataclass(frozen=True, eq=False)
class Shards:
    """The split of a microbatch's rows; the same on every rank.

    Attributes:
        rows: number of rows, all split alike. Packed rows count as one, laid end to end.
        mask: which keys the queries of a row see.
        chunks: for each rank, the spans of a row that it holds, ascending.
    """

    rows: int
    mask: DocumentMask
    chunks: tuple[tuple[Span, ...], ...]
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def blocks(self, rank: int, keys: tuple[Span, ...]) -> tuple[Block, ...]:
        """The blocks of a rank's queries and the keys at `keys`; cached for all layers."""
        return self._once(("blocks", rank, keys), lambda: cut(self.chunks[rank], keys, self.mask))

    def sent(self, source: int, target: int) -> tuple[Span, ...]:
        """The spans of rank `source`'s keys that rank `target` needs, ascending."""
        seen = self._once(("seen", target), lambda: self.mask.seen(self.chunks[target]))
        return self._once(("sent", source, target), lambda: common(self.chunks[source], seen))

    def seeing(self, reach: Reach) -> "Shards":
        """The same split of whole documents, for a layer with another attention window."""
        mask = DocumentMask.of(self.mask.starts, reach)
        if mask == self.mask:
            return self
        return self._once(("seeing", reach), lambda: Shards(self.rows, mask, self.chunks))

    def merged(self, inner: int) -> "Shards":
        """The split over groups of `inner` consecutive ranks, each group as one rank."""

        def merge() -> Shards:
            starts = range(0, len(self.chunks), inner)
            groups = [self.chunks[start : start + inner] for start in starts]
            chunks = tuple(joined(span for own in group for span in own) for group in groups)
            return Shards(self.rows, self.mask, chunks)

        return self._once(("merged", inner), merge)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


@dataclass(frozen=True)
class MicrobatchShare:
    """The tokens that one rank holds of a microbatch.

    Attributes:
        shards: the split of the microbatch.
        rank: index of this rank among those that share it.
    """

    shards: Shards
    rank: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of a row on this rank."""
        return self.shards.chunks[self.rank]

    def seeing(self, reach: Reach) -> "MicrobatchShare":
        """See `Shards.seeing`."""
        return replace(self, shards=self.shards.seeing(reach))
