"""Reads fields of a config.json, or of an adapter's settings, by name and type."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from fivefold.config.model import MAX_SIZE
from fivefold.errors import Mistakes, did_you_mean, shown

_LIMIT = 1e300  # of numbers; larger whole numbers may not fit into a float
_MAX_SHOWN = 100  # characters of a value in a message
_MAX_NAMED = 20  # unknown fields that a message lists

_REQUIRED: Final = object()
_WRONG: Final = object()  # marks a value that was reported as a mistake

Need = Callable[[Any], str | None]
"""value -> what it should be, to follow "needs"; None if it is correct."""


class Reader:
    """Reads fields, and collects missing, wrong, conflicting and unknown ones.

    A field counts as understood once it was requested, so each family requests all of its fields
    unconditionally. After a mistake a harmless value is returned, so that reading continues and
    finds the others.

    Attributes:
        fields: fields of the file, or of a table in it.
        mistakes: everything that cannot be read.
        left_out: features that a ModelConfig cannot express; such a model cannot be trained.
    """

    def __init__(
        self, fields: Mapping[str, Any], whose: str, place: str = "", file: str = "config.json"
    ) -> None:
        self.mistakes = Mistakes()
        self.left_out: list[str] = []
        self.fields = fields
        self._whose = whose
        self._place = place  # prefix of a table within the file, such as "rope_scaling."
        self._file = file
        self._asked: set[str] = set()
        self._spellings: dict[str, str] = {}

    def also(self, **spellings: str) -> None:
        """Accept another name for fields that are asked for by these names."""
        self._spellings |= spellings

    def spelt(self, name: str) -> str:
        """The name of a field in the file, which may be another spelling."""
        other = self._spellings.get(name)
        return other if other in self.fields and other is not None else name

    @property
    def known(self) -> Collection[str]:
        """Names that were requested so far."""
        return self._asked

    def table(self, name: str) -> "Reader | None":
        """A reader of a table within the file, with the same mistakes; None if null or empty."""
        value = self._value((name,), None, _a_table)
        if value is _WRONG or not value:
            return None
        inner = Reader(value, self._whose, f"{self._place}{name}.", self._file)
        inner.mistakes, inner.left_out = self.mistakes, self.left_out
        return inner

    def size(
        self, *names: str, default: Any = _REQUIRED, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """A positive whole number; further names are alternative spellings of the first."""
        value = self._value(names, default, _whole(least, most))
        return 1 if value is _WRONG else value

    def optional_size(self, *names: str, default: Any = _REQUIRED, least: int = 1) -> int | None:
        """A whole number or null, which differs from a missing field."""
        value = self._value(names, default, _or_null(_whole(least, MAX_SIZE)))
        return None if value is _WRONG else value

    def sizes(self, name: str) -> Sequence[int]:
        """Whole numbers from 0; empty if null or missing."""
        value = self._value((name,), None, _or_null(_list_of(_whole(0, MAX_SIZE))))
        return () if value is _WRONG or value is None else value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        value = self._value((name,), _REQUIRED, _list_of(_a_number))
        return () if value is _WRONG else tuple(map(float, value))

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A finite number; None if missing."""
        value = self._value((name,), None, _a_number)
        return None if value is _WRONG or value is None else float(value)

    def number_or_null(self, name: str, default: float | None) -> float | None:
        """A finite number or null, which differs from a missing field."""
        if name in self.fields and self.fields[name] is None:
            self.without_effect(name)
            return None
        found = self.optional_number(name)
        return default if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value((name,), default, _a_switch)
        return default if value is _WRONG else value

    def text(self, *names: str, default: str, choices: Iterable[str]) -> str | None:
        """One of several words; None, and a mistake, if it is none of them."""
        value = self._value(names, default, _a_text)
        if value is _WRONG:
            return None
        if value not in choices:
            self.unsupported(names[0], value, choices)
            return None
        return str(value)

    def letters(self, name: str, choices: str, default: str) -> str:
        """A text of one letter or more, all among `choices`."""
        value = self._value((name,), default, _letters_of(choices))
        return default if value is _WRONG else value

    def texts(self, name: str, choices: Sequence[str]) -> Sequence[str] | None:
        """A list of words from `choices`; None if null or missing."""
        value = self._value((name,), None, _or_null(_list_of(_a_text)))
        if value is _WRONG or value is None:
            return None
        for other in [word for word in dict.fromkeys(value) if word not in choices][:_MAX_NAMED]:
            self.unsupported(name, other, choices)
        return [word for word in value if word in choices]

    def has_each_layer(self, name: str, listed: Sequence[Any], layers: int) -> bool:
        """Whether a list has an entry for each layer; if not, that is a mistake."""
        if len(listed) != layers:
            counts = f"{len(listed)} entries, num_hidden_layers is {layers}"
            self.mistakes.add(f"{name} must have one entry a layer: {counts}")
        return len(listed) == layers

    def patterns(self, name: str) -> str | tuple[str, ...] | None:
        """A list of texts, or one that is a regular expression; None if null or missing."""
        value = self._value((name,), None, _text_or_texts)
        if value is _WRONG or value is None:
            return None
        return value if isinstance(value, str) else tuple(value)

    def fixed(self, name: str, *works: Any, why: str = "") -> None:
        """Accept a field only if it is missing or has one of these values, with no effect."""
        self._asked.add(name)
        value = self.fields.get(name, works[0])
        if not any(_same(value, other) for other in works):
            self.unsupported(name, value, works[:1], why)

    def without_effect(self, *names: str) -> None:
        """Accept fields that change neither the computation nor the sizes."""
        self._asked.update(names)

    def unsupported(self, name: str, value: Any, works: Iterable[Any], why: str = "") -> None:
        """Report a field whose value a ModelConfig cannot express."""
        name = self.spelt(name)
        self.mistakes.add(
            f"{self._place}{name} = {_written(value)} of {self._whose} is not supported",
            *([why] if why else []),
            works=[f"{self._place}{name} = {_written(choice)}" for choice in works],
        )

    def refuse_unread(self) -> None:
        """Report every field that was not requested."""
        unknown = [name for name in self.fields if name not in self._asked]
        place = f" in {self._place[:-1]}" if self._place else ""
        for name in unknown[:_MAX_NAMED]:
            self.mistakes.add(
                f"unknown field {_written(name)}{place} of {self._whose}"
                f"{did_you_mean(name[:80], self._asked)}",
                "it may change what the model computes; take it out if it does not",
            )
        if len(unknown) > _MAX_NAMED:
            more = len(unknown) - _MAX_NAMED
            self.mistakes.add(f"and {more} more unknown fields{place} of {self._whose}")

    def _value(self, names: tuple[str, ...], default: Any, need: Need) -> Any:
        """The value of a field with several spellings, its default, or _WRONG."""
        names += tuple(self._spellings[name] for name in names if name in self._spellings)
        self._asked.update(names)
        given = {name: self.fields[name] for name in names if name in self.fields}
        wrong = {name: what for name, value in given.items() if (what := need(value))}
        for name, what in wrong.items():
            self.mistakes.add(
                f"{self._file} needs {what} for {self._place + name!r}, not {_written(given[name])}"
            )
        if wrong:
            return _WRONG
        if not given and default is _REQUIRED:
            what = need(_REQUIRED) or "a value"
            self.mistakes.add(f"{self._file} needs {what} for {self._place + names[0]!r}")
            return _WRONG
        values = list(given.values())
        if any(value != values[0] for value in values):
            self.contradict({self._place + name: value for name, value in given.items()})
            return _WRONG
        return values[0] if values else default

    def contradict(self, given: Mapping[str, Any]) -> None:
        """Report that fields with the same meaning differ."""
        conflict = " and ".join(f"{name} = {_written(value)}" for name, value in given.items())
        self.mistakes.add(f"{conflict} of {self._whose} contradict each other")


def _written(value: Any) -> str:
    """A value as written in the file, shortened."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return shown(value)
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def _same(value: Any, other: Any) -> bool:
    """Equality in which true differs from 1."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _whole(least: int, most: int) -> Need:
    def need(value: Any) -> str | None:
        if type(value) is not int:
            return "a whole number"
        if value < least:
            return f"a number of at least {least}"
        return None if value <= most else f"a number of at most {most}"

    return need


def _a_number(value: Any) -> str | None:
    if type(value) not in (int, float):
        return "a number"
    return None if abs(value) < _LIMIT else "a finite number"  # which is not true of NaN


def _a_switch(value: Any) -> str | None:
    return None if type(value) is bool else "true or false"


def _a_text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _letters_of(choices: str) -> Need:
    def need(value: Any) -> str | None:
        right = isinstance(value, str) and value and not {*value} - {*choices}
        return None if right else f"letters among {choices}"

    return need


def _text_or_texts(value: Any) -> str | None:
    if not isinstance(value, str):
        return _or_null(_list_of(_a_text))(value)
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return "a regular expression, or a list of texts,"
    return None


def _a_table(value: Any) -> str | None:
    return None if value is None or isinstance(value, Mapping) else "an object"


def _list_of(need: Need) -> Need:
    def of_all(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list"
        what = next(filter(None, map(need, value)), None)
        return what and f"a list, each item of which is {what},"

    return of_all


def _or_null(need: Need) -> Need:
    return lambda value: None if value is None else need(value)
