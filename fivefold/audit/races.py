"""Finds accesses to the same memory that nothing puts in order. Imports no torch.

Each stream has a vector clock: how far it is, and how far every other stream had come when it last
waited for it, directly or through others (Mattern, 1989; as ThreadSanitizer does for threads). An
access races with an earlier one, of another stream, that its stream's clock does not cover.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

HOST = "the host"
"""Name of the stream for the host's own reads and writes."""


class Span(NamedTuple):
    """Bytes of memory, `start` included, `end` not."""

    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        """Whether both have a byte."""
        return self.start < other.end and other.start < self.end

    def without(self, other: "Span") -> Iterator["Span"]:
        """The parts of the span before and behind `other`, which it overlaps."""
        if self.start < other.start:
            yield Span(self.start, other.start)
        if other.end < self.end:
            yield Span(other.end, self.end)


class Access(NamedTuple):
    """A read or a write of a stream.

    Attributes:
        stream: name of the stream.
        what: what read or wrote, in words.
        writes: whether it wrote.
    """

    stream: str
    what: str
    writes: bool

    def __str__(self) -> str:
        return f"{self.stream} {'writes' if self.writes else 'reads'} in {self.what}"


class Race(NamedTuple):
    """Two accesses, launched in this order, of which either may come first."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"nothing orders: {self.first}; {self.second}"


Mark = Mapping[str, int]
"""A place in a stream, as a vector clock: how far each stream has come when it is reached."""


@dataclass
class Races:
    """Tracks streams, and collects races between their accesses.

    Attributes:
        found: races, each pair of accesses once.
    """

    found: dict[Race, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._seen: defaultdict[int, dict[tuple[Span, Access], int]] = defaultdict(dict)

    def access(
        self, stream: str, what: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()
    ) -> None:
        """An access of a stream; it is launched by the host, so it follows everything that the host
        waited for."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[HOST])
        now = clock[stream] = clock.get(stream, 0) + 1
        for spans, does_write in ((reads, False), (writes, True)):
            access = Access(stream, what, does_write)
            for span in spans:
                for page in _pages(span):
                    self._enter(self._seen[page], span, access, clock)
                    self._seen[page][span, access] = now

    def mark(self, stream: str) -> Mark:
        """The current place of a stream, as an event records it."""
        return dict(self._clocks[stream])

    def wait(self, stream: str, mark: Mark) -> None:
        """A stream, or the host, waits until a place has been reached."""
        _join(self._clocks[stream], mark)

    def free(self, span: Span, known: Collection[str] | None = ()) -> None:
        """Memory returns to the allocator, which may give it to another stream.

        Args:
            span: the memory.
            known: streams whose work until now the allocator lets the next owner wait for; None:
                all.
        """
        for page in _pages(span):
            kept = self._seen[page]
            self._seen[page] = {
                (other, access): at
                for (other, access), at in kept.items()
                if not other.overlaps(span) or (known is not None and access.stream not in known)
            }

    def _enter(
        self,
        seen: dict[tuple[Span, Access], int],
        span: Span,
        access: Access,
        clock: Mapping[str, int],
    ) -> None:
        """Look for races with earlier accesses to a page, and forget bytes that this access
        supersedes.

        Whoever is ordered after a write is so after all before it, and races with it if not; after
        a read, this holds for what the read itself is ordered after, but for writes: they also
        race with other reads.
        """
        hidden = []
        start, end = span
        for key, at in seen.items():
            other, before = key
            if other.end <= start or end <= other.start:  # a call of `overlaps` takes far longer
                continue
            ordered = clock.get(before.stream, 0) >= at
            if not ordered and (access.writes or before.writes):
                race = Race(before, access)
                self.found[race] = self.found.get(race, 0) + 1
            if access.writes or (ordered and not before.writes):
                hidden.append((key, at))
        for (other, before), at in hidden:
            del seen[other, before]
            for left in other.without(span):
                seen[left, before] = max(at, seen.get((left, before), 0))


PAGE = 1 << 13
"""Bytes of memory that are looked up together: a page holds few of the tensors of a small model."""


def _pages(span: Span) -> range:
    return range(span.start // PAGE, (span.end - 1) // PAGE + 1)


def _join(clock: dict[str, int], other: Mapping[str, int]) -> None:
    for stream, at in other.items():
        if clock.get(stream, 0) < at:
            clock[stream] = at
