"""Errors for users: what is wrong, the arithmetic, the nearest valid choices."""

import difflib
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        what: description in one line, such as "24 GPUs cannot be split as tp=4 pp=4".
        why: lines with arithmetic or context.
        works: nearest valid choices.
        attempt: command or setting that helps; None if there is none.
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


class FivefoldError(Exception):
    """An error to be shown to the user as one message, without a traceback.

    Attributes:
        mistakes: what is wrong.
        status: exit status for the shell, of a command as of its ranks: 2 where something was given
            that is wrong or missing, 1 where a run failed.
    """

    status = 2

    def __init__(self, *mistakes: Mistake | str) -> None:
        self.mistakes = tuple(Mistake(m) if isinstance(m, str) else m for m in mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets an error be sent to other ranks without being rebuilt from its text."""
        return Exception.__new__, (type(self), *self.args), vars(self)


class ConfigError(FivefoldError):
    """All mistakes in the settings that the user gave."""

    def spelled(self, spell: Callable[[str], Iterable[str]]) -> "ConfigError":
        """The same error, with each choice as flags of the command that was given.

        Args:
            spell: function that gives the flags of a choice; none if the command has none for it.
        """
        return ConfigError(
            *(
                replace(mistake, works=tuple(dict.fromkeys(chain(*map(spell, mistake.works)))))
                for mistake in self.mistakes
            )
        )


class PlaceError(ConfigError):
    """Mistakes that only this rank may have: in its number, its address, the GPUs of its host."""


class DataError(FivefoldError):
    """A corpus, index, tokenizer or other file that is missing or wrong."""


class CheckpointError(FivefoldError):
    """A checkpoint that is missing, truncated, corrupted or of another model."""


class OtherSettings(CheckpointError):
    """A checkpoint whose optimizer state does not fit these settings; `--finetune` takes only its
    weights."""


class DamagedCheckpoint(CheckpointError):
    """The files of a checkpoint are not what was written.

    Attributes:
        intact: step of the latest checkpoint of its folder that is intact; None if there is none.
    """

    def __init__(self, message: Mistake | str, intact: int | None) -> None:
        super().__init__(message)
        self.intact = intact

    @property
    def passed_over(self) -> str:
        """A message that the run resumes from the intact checkpoint instead, and why."""
        (damage,) = self.mistakes
        fault = f"{damage.what}: {damage.why[0]}"
        return f"{fault}; step {self.intact} is the latest that is intact"


class TrainingError(FivefoldError):
    """A run that cannot continue, for example because its loss is not finite."""

    status = 1


class RanksFailed(FivefoldError):
    """Ranks that a command started have failed and have printed why; `status` is that of
    `train`."""

    def __init__(self, what: str, status: int) -> None:
        super().__init__(what)
        self.status = status


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

    @property
    def count(self) -> int:
        """How many were recorded."""
        return len(self._all)

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
        """Collect the mistakes of a ConfigError raised in the block."""
        try:
            yield
        except ConfigError as error:
            self._all.extend(error.mistakes)

    def raise_if_any(self) -> None:
        """Raise one error with every mistake recorded so far, each once."""
        if self._all:
            raise ConfigError(*dict.fromkeys(self._all))


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A suffix such as ", did you mean 'hidden_size'?", or an empty string.

    >>> did_you_mean("hiden_size", ["hidden_size", "seq_length"])
    ", did you mean 'hidden_size'?"
    """
    close = closest(word, choices)
    return "" if close is None else f", did you mean {close!r}?"


def closest(word: str, choices: Iterable[str], least: float = 0.6) -> str | None:
    """The choice that is most like a word, as difflib's `get_close_matches` finds it; None: all
    are less like it than `least`, from 0 (nothing in common) to 1 (the same).

    >>> closest("hiden_size", ["hidden_size", "seq_length"])
    'hidden_size'
    """
    return _closest(word, frozenset(choices), least)


@lru_cache(1024)
def _closest(word: str, choices: frozenset[str], least: float) -> str | None:
    """Ratios are bounded by those of lengths, in whose order choices come, and of letters; what
    cannot be more like the word than the best yet is not compared."""
    lengths = {choice: len(choice) + len(word) for choice in choices}
    most = {c: 2 * min(len(c), len(word)) / n if n else 1.0 for c, n in lengths.items()}
    matcher = difflib.SequenceMatcher(b=word)
    best = (least, "")
    for choice in sorted(choices, key=most.__getitem__, reverse=True):
        if most[choice] < best[0]:
            break
        matcher.set_seq1(choice)
        if matcher.quick_ratio() >= best[0]:
            best = max(best, (matcher.ratio(), choice))
    return best[1] or None


def shown(value: Any) -> str:
    """A value for a message: its repr, with bounded length and depth.

    >>> shown("64"), shown([[[[[]]]]]), len(shown("x" * 1000))
    ("'64'", '[[[[[...]]]]]', 100)
    """
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother, short.maxlong = 4, 100, 100, 100
    try:
        return short.repr(value)
    except ValueError:  # a number of more digits than Python prints
        return f"a {type(value).__name__} with a number of thousands of digits"


def json_kind(value: Any) -> str:
    """The kind of a value read from JSON or a table, in words for a message.

    >>> json_kind(3), json_kind([1]), json_kind(None)
    ('a number', 'a list', 'null')
    """
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    kinds |= {int: "a number", float: "a number", type(None): "null"}
    return kinds.get(type(value), f"of the type {type(value).__name__}")
