"""Wrapped lines of reports, also beside a table."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence

from fivefold.units import table, wrapped

WIDTH = 100
"""Characters of a line that goes into a file or a pipe."""
_NARROWEST, _WIDEST = 60, 140


def line_width() -> int:
    """Characters of a line on standard output: the terminal's, within reason."""
    if not sys.stdout.isatty():
        return WIDTH
    return min(max(shutil.get_terminal_size().columns, _NARROWEST), _WIDEST)


def prose(lines: Iterable[str]) -> Iterator[str]:
    """The lines, with long ones wrapped."""
    for line in lines:
        yield from wrapped(line, line_width(), others="  ")


def listed(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> Iterator[str]:
    """A table whose last column is text that is wrapped."""
    lines = table([row[:-1] for row in rows], right)
    start = max(map(len, lines)) + 2
    for line, row in zip(lines, rows, strict=True):
        words = wrapped(row[-1], max(_NARROWEST // 3, line_width() - start))
        yield (line.ljust(start) + words[0]).rstrip()
        yield from (" " * start + more for more in words[1:])
