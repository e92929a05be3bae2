"""Tables and wrapped lines of reports."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

WIDTH = 100


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Lines with aligned columns; the columns with these numbers are aligned to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    flush = set(right)
    return [
        "  ".join(
            cell.rjust(width) if column in flush else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def prose(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with long ones wrapped."""
    for line in lines:
        yield from wrap(line, WIDTH, subsequent_indent="  ") or [""]


def listed(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Iterator[str]:
    """A table whose last column is text that is wrapped."""
    lines = table([row[:-1] for row in rows], right)
    start = max(map(len, lines)) + 2
    for line, row in zip(lines, rows, strict=True):
        words = wrap(row[-1], WIDTH - start) or [""]
        yield (line.ljust(start) + words[0]).rstrip()
        yield from (" " * start + more for more in words[1:])
