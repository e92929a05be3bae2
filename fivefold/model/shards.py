"""Which tokens of a microbatch lie on which of the ranks that share its rows; no torch."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.model.blocks import Block, Sight, Span, common, cut, joined


@dataclass(frozen=True, eq=False)
class Shards:
    """How the rows of a microbatch are divided; the same on every rank.

    Attributes:
        rows: rows that are divided alike. Packed rows count as one, laid end to end.
        sight: what the queries of a row see.
        chunks: per rank, the spans of a row that it holds, ascending.
    """

    rows: int
    sight: Sight
    chunks: tuple[tuple[Span, ...], ...]
    _known: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def blocks(self, rank: int, keys: tuple[Span, ...]) -> tuple[Block, ...]:
        """The blocks of a rank's queries and these keys; every layer asks for the same."""
        return self._once(("blocks", rank, keys), lambda: cut(self.chunks[rank], keys, self.sight))

    def sent(self, source: int, target: int) -> tuple[Span, ...]:
        """What rank `target` needs of rank `source`'s keys, ascending."""
        seen = self._once(("seen", target), lambda: self.sight.seen(self.chunks[target]))
        return self._once(("sent", source, target), lambda: common(self.chunks[source], seen))

    def seeing(self, window: int | None) -> "Shards":
        """The same tokens on the same ranks, of which queries see so many before themselves."""
        if window == self.sight.window:
            return self
        sight = replace(self.sight, window=window)
        return self._once(("seeing", window), lambda: Shards(self.rows, sight, self.chunks))

    def merged(self, inner: int) -> "Shards":
        """The shards of groups of `inner` consecutive ranks, each as one rank."""

        def merge() -> Shards:
            starts = range(0, len(self.chunks), inner)
            groups = [self.chunks[start : start + inner] for start in starts]
            chunks = tuple(joined(span for own in group for span in own) for group in groups)
            return Shards(self.rows, self.sight, chunks)

        return self._once(("merged", inner), merge)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


@dataclass(frozen=True)
class MicrobatchShare:
    """What one rank holds of a microbatch.

    Attributes:
        shards: how the microbatch is divided.
        rank: among those that share it.
    """

    shards: Shards
    rank: int

    @property
    def spans(self) -> tuple[Span, ...]:
        """Of a row, on this rank."""
        return self.shards.chunks[self.rank]

    def seeing(self, window: int | None) -> "MicrobatchShare":
        """See `Shards.seeing`."""
        return replace(self, shards=self.shards.seeing(window))
