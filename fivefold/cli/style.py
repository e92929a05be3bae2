"""Colour on a terminal, plain text elsewhere and under NO_COLOR (no-color.org)."""

import os
from typing import Literal, TextIO

Style = Literal["red", "green", "yellow", "bold", "dim"]

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def paint(text: str, style: Style, stream: TextIO) -> str:
    """`text` in a style if `stream` shows styles."""
    if not shows_styles(stream):
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"


def shows_styles(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that is allowed colours."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not unwanted
