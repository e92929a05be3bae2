"""The errors that a person reads: what is wrong, the arithmetic, the nearest valid choices."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any


class FivefoldError(Exception):
    """An error to be shown to the user as one message, without a traceback."""


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        what: one line, no final full stop: "24 GPUs cannot be split as tp=4 pp=4".
        why: lines of arithmetic or context.
        works: the nearest choices that would have been valid.
        attempt: a command or setting that helps, if there is one.
    """

    what: str
    why: tuple[str, ...] = ()
    works: tuple[str, ...] = ()
    attempt: str | None = None

    def __str__(self) -> str:
        lines = [self.what, *(f"  {line}" for line in self.why)]
        if self.works:
            lines.append(f"  works: {' | '.join(self.works)}")
        if self.attempt:
            lines.append(f"  try:   {self.attempt}")
        return "\n".join(lines)


class ConfigError(FivefoldError):
    """Everything that is wrong with what the user asked for, all mistakes at once."""

    def __init__(self, *mistakes: Mistake | str) -> None:
        self.mistakes = tuple(Mistake(m) if isinstance(m, str) else m for m in mistakes)
        super().__init__("\n".join(str(m) for m in self.mistakes))

    def spelled(self, spell: Callable[[str], Iterable[str]]) -> "ConfigError":
        """The same, with each choice in the words of the command that was given.

        Args:
            spell: what to type for a choice; nothing, where the command has no word for it.
        """
        return ConfigError(
            *(
                replace(mistake, works=tuple(dict.fromkeys(chain(*map(spell, mistake.works)))))
                for mistake in self.mistakes
            )
        )


class DataError(FivefoldError):
    """A corpus, index or tokenizer that cannot be read as what it claims to be."""


class CheckpointError(FivefoldError):
    """A checkpoint that is missing, cut short, corrupted or of another model."""


class TrainingError(FivefoldError):
    """A run that cannot go on, such as one whose loss is no longer a number."""


class Mistakes:
    """Collects mistakes so that the user sees them all at once.

    >>> mistakes = Mistakes()
    >>> mistakes.add("2 layers cannot fill 4 stages")
    >>> mistakes.found
    True
    """

    def __init__(self) -> None:
        self._all: list[Mistake] = []

    @property
    def found(self) -> bool:
        """Whether anything was recorded."""
        return bool(self._all)

    def add(
        self,
        what: str,
        *why: str,
        works: Iterable[str] = (),
        attempt: str | None = None,
    ) -> None:
        """Record one mistake; arguments are the fields of `Mistake`."""
        self._all.append(Mistake(what, why, tuple(works), attempt))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Turn a ConfigError raised in the block into collected mistakes."""
        try:
            yield
        except ConfigError as error:
            self._all.extend(error.mistakes)

    def raise_if_any(self) -> None:
        """Raise one ConfigError with every mistake recorded so far."""
        if self._all:
            raise ConfigError(*self._all)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A suffix such as ", did you mean 'hidden_size'?", or an empty string.

    >>> did_you_mean("hiden_size", ["hidden_size", "seq_length"])
    ", did you mean 'hidden_size'?"
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""


def shown(value: Any) -> str:
    """A value that somebody wrote, as a message shows it: its repr, of bounded length and depth.

    >>> shown("64"), shown([[[[[]]]]]), len(shown("x" * 1000))
    ("'64'", '[[[[[...]]]]]', 100)
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 4, 100, 100, 100
    try:
        return short.repr(value)
    except ValueError:  # a number of more digits than Python prints
        return f"a {type(value).__name__} with a number of thousands of digits"
