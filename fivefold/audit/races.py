"""Accesses to the same memory that nothing puts in order. Imports no torch.

Each stream has a vector clock: how far it is, and how far every other stream had come when it last
waited for it, directly or through others (Mattern, 1989; as ThreadSanitizer does for threads). An
access races with an earlier one, of another stream, that its stream's clock does not cover.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

HOST = "the host"
"""Name of the stream of what the host itself reads and writes."""


@dataclass(frozen=True)
class Span:
    """Bytes of memory, `start` included, `end` not."""

    start: int
    end: int

    def overlaps(self, other: "Span") -> bool:
        """Whether both have a byte."""
        return self.start < other.end and other.start < self.end

    def within(self, other: "Span") -> bool:
        """Whether `other` has all of its bytes."""
        return other.start <= self.start and self.end <= other.end


@dataclass(frozen=True)
class Access:
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


@dataclass(frozen=True)
class Race:
    """Two accesses, launched in this order, of which either may come first."""

    first: Access
    second: Access

    def __str__(self) -> str:
        return f"nothing orders: {self.first}; {self.second}"


Mark = Mapping[str, int]
"""A place in a stream: of each stream, how much has happened when it is reached."""


@dataclass
class Races:
    """Follows streams, and collects the races between what they do.

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
        """An operation on a stream; launched by the host, so after all that the host waited for."""
        clock = self._clocks[stream]
        _join(clock, self._clocks[HOST])
        now = clock[stream] = clock.get(stream, 0) + 1
        for spans, does_write in ((reads, False), (writes, True)):
            access = Access(stream, what, does_write)
            for span in spans:
                self._check(span, access, clock)
                for page in _pages(span):
                    seen = self._seen[page]
                    if does_write:  # whoever is ordered after it is so after these, too
                        for old in [key for key in seen if key[0].within(span)]:
                            del seen[old]
                    seen[span, access] = now

    def mark(self, stream: str) -> Mark:
        """The place that a stream has come to: what an event records."""
        return dict(self._clocks[stream])

    def wait(self, stream: str, mark: Mark) -> None:
        """A stream, or the host, waits until a place has been reached."""
        _join(self._clocks[stream], mark)

    def free(self, span: Span, known: Collection[str] | None = ()) -> None:
        """Memory goes back to the allocator, which may give it to whoever asks on its own stream.

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

    def _check(self, span: Span, access: Access, clock: Mapping[str, int]) -> None:
        for page in _pages(span):
            for (other, before), at in self._seen[page].items():
                if (
                    (access.writes or before.writes)
                    and clock.get(before.stream, 0) < at
                    and other.overlaps(span)
                ):
                    race = Race(before, access)
                    self.found[race] = self.found.get(race, 0) + 1


PAGE = 1 << 13
"""Bytes of memory that are looked up together: a page holds few of the tensors of a small model."""


def _pages(span: Span) -> range:
    return range(span.start // PAGE, (span.end - 1) // PAGE + 1)


def _join(clock: dict[str, int], other: Mapping[str, int]) -> None:
    for stream, at in other.items():
        if clock.get(stream, 0) < at:
            clock[stream] = at
