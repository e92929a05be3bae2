"""Settings of another trainer, and what they leave unsaid."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Export:
    """Settings for a trainer.

    Attributes:
        text: of the file, or the command line's flags.
        missing: what the layout asks for and these settings do not say, a sentence each.
    """

    text: str
    missing: tuple[str, ...]


def command_line(flags: Iterable[str]) -> str:
    """Flags, one a line, that a shell reads as one command."""
    return " \\\n".join(flags) + "\n"


def flag(name: str, *values: object) -> Iterator[str]:
    """`--name value ...`, each value quoted where a shell would take it apart."""
    yield " ".join([f"--{name}", *map(_quoted, values)])


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"'{text}'" if set(text) & set("|*() []") else text
