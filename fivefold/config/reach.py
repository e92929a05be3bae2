"""How far back the tokens of a layer attend."""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import NamedTuple


class Reach(NamedTuple):
    """Limits which earlier tokens of its document a token attends to.

    Attributes:
        window: tokens before itself that it attends to; None: no window.
        chunk: tokens of the chunks within which it attends, the first of which starts with the
            document; None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def is_whole(self, length: int) -> bool:
        """Whether a document of this many tokens is attended to as a whole."""
        slides = self.window is not None and self.window + 1 < length
        return not slides and (self.chunk is None or self.chunk >= length)

    def starts(self, documents: Sequence[int]) -> tuple[int, ...]:
        """The starts of documents and of their chunks, then the end of the last document.

        >>> Reach(chunk=4).starts((0, 10, 12))
        (0, 4, 8, 10, 12)
        """
        if self.chunk is None:
            return tuple(documents)
        begun = (range(begin, end, self.chunk) for begin, end in pairwise(documents))
        return *chain.from_iterable(begun), documents[-1]

    def mean_keys(self, length: int) -> float:
        """Mean number of keys that a token attends to, in a document of this many tokens."""
        chunk = min(self.chunk or length, length)
        whole, rest = divmod(length, chunk)
        return (whole * chunk * self._in_chunk(chunk) + rest * self._in_chunk(rest)) / length

    def _in_chunk(self, length: int) -> float:
        window = min(self.window or length, length)
        return window - window**2 / (2 * length) if length else 0.0
