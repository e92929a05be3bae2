"""Colour on a terminal, plain text elsewhere and under NO_COLOR (no-color.org)."""

import os
import sys
from typing import Literal, TextIO

Style = Literal["red", "green", "yellow", "bold", "dim"]

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33}


def paint(text: str, style: Style, stream: TextIO) -> str:
    """`text` in a style if `stream` shows styles."""
    if not shows_styles(stream):
        return text
    return f"\033[{_CODES[style]}m{text}\033[0m"


def note(text: str) -> None:
    """Print a note on the error stream, from the first rank only."""
    if first_rank():
        print(f"{paint('note:', 'yellow', sys.stderr)} {text}", file=sys.stderr)


def first_rank() -> bool:
    """Whether this process prints for all: it is the first rank, or no rank at all."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "")
    if rank is None:
        rank, size = os.environ.get("SLURM_PROCID", "0"), os.environ.get("SLURM_NTASKS", "")
    if not rank.isdecimal() or (size.isdecimal() and int(rank) >= int(size)):
        return True
    return int(rank) == 0


def first_of_host() -> bool:
    """Whether this process prints for its host: it is the first rank there, or no rank at all."""
    local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID", "0")
    return not local.isdecimal() or int(local) == 0


def shows_styles(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which colours are wanted."""
    unwanted = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not unwanted
