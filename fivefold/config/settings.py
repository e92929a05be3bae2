"""Settings: dataclass fields with their type, flag and TOML key."""

import json
import math
import shlex
from collections.abc import Callable, Collection
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_SPELLINGS = MappingProxyType({"allgather": "all_gather"})  # Megatron-LM spells this word both ways
_MAX_WHOLE = 1 << 64  # sums and ratios of such numbers are still floats
NONE = "none"  # how flags and TOML, which has no null, spell None


class Allowed(NamedTuple):
    """Numbers that a setting may have: `Annotated[int, Allowed(...)]` is its type.

    Attributes:
        holds: tells whether it may have a number.
        words: which ones, to follow "must be".
    """

    holds: Callable[[float], bool]
    words: str


Count = Annotated[int, Allowed(lambda v: v >= 1, "at least 1")]
Whole = Annotated[int, Allowed(lambda v: v >= 0, "0 or more")]
Positive = Annotated[float, Allowed(lambda v: v > 0, "positive")]
NonNegative = Annotated[float, Allowed(lambda v: v >= 0, "0 or more")]
Share = Annotated[float, Allowed(lambda v: 0 <= v < 1, "in [0, 1)")]
Probability = Annotated[float, Allowed(lambda v: 0 <= v <= 1, "in [0, 1]")]
PositiveShare = Annotated[float, Allowed(lambda v: 0 < v <= 1, "in (0, 1]")]


def option(default: Any, help: str, none: str = NONE) -> Any:
    """A dataclass field for a flag, whose help text feeds --help and the flag reference.

    Args:
        default: default value; MISSING if there is none.
        help: description in one line.
        none: how flags and TOML spell None.
    """
    return field(default=default, metadata={"help": help, "none": none})


def argument(help: str, default: Any = MISSING) -> Any:
    """A dataclass field for a positional argument; required if it has no default."""
    return field(default=default, metadata={"help": help, "positional": True})


def flag_of(name: str) -> str:
    """The flag of a setting; a switch is turned off by its name after `no_`.

    >>> flag_of("seq_length"), flag_of("no_sequence_parallel")
    ('--seq-length', '--no-sequence-parallel')
    """
    return "--" + name.replace("_", "-")


def name_of_flag(flag: str) -> str:
    """The inverse of `flag_of`, for a flag with or without values.

    >>> name_of_flag("--seq-length 4096")
    'seq_length'
    """
    return flag.partition(" ")[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Setting:
    """One field of a settings dataclass.

    Attributes:
        name: name of the field and of the TOML key; the flag has dashes instead of underscores.
        kind: type of the value, or of its items if `many`: bool, int, float or str.
        help: description in one line.
        default: default value; MISSING if there is none.
        choices: allowed values; empty: all.
        optional: whether None is allowed.
        many: whether it takes several values, which are kept as a tuple.
        positional: whether it is a positional argument rather than a flag.
        none: how None is spelled.
        within: numbers that it may have; None: any.
    """

    name: str
    kind: type
    help: str
    default: Any
    choices: tuple[str, ...] = ()
    optional: bool = False
    many: bool = False
    positional: bool = False
    none: str = NONE
    within: Allowed | None = None

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return flag_of(self.name)

    @property
    def expected(self) -> str:
        """A description of valid values, to follow "must be"."""
        word = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        one = f"one of {', '.join(self.choices)}" if self.choices else word[self.kind]
        if self.many:
            several = {int: "whole numbers", float: "numbers", str: "texts"}[self.kind]
            one = f"{one} or a list of {'them' if self.choices else several}"
        return f"{one}, or {self.none}" if self.optional else one

    def from_text(self, text: str) -> Any:
        """Convert a word of the command line to a value.

        Raises:
            ValueError: the word is not a valid value.
        """
        if self.optional and text == self.none:
            return None
        if self.kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return self._checked(self.kind(text))

    def is_too_large(self, value: object) -> bool:
        """Whether a value is an integer that is refused only because it is too large."""
        try:
            return self.kind is int and abs(int(str(value))) >= _MAX_WHOLE
        except (ValueError, RecursionError):
            return False

    def words(self, value: Any) -> str:
        """The inverse of `from_text`; several values are separated by spaces."""
        if value is None or value == ():
            return self.none
        if isinstance(value, tuple):
            return " ".join(map(self.words, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def typed(self, value: Any) -> str:
        """The flag with a value, quoted for a shell."""
        if self.kind is bool:
            return self.flag if value else f"--no-{self.flag[2:]}"
        parts = (
            map(self.words, value) if isinstance(value, tuple) and value else [self.words(value)]
        )
        if self.kind is str and str(value).startswith("-"):  # or it would be a flag itself
            return f"{self.flag}={shlex.quote(value)}"
        return " ".join([self.flag, *map(shlex.quote, parts)])

    def from_toml(self, value: object) -> Any:
        """Convert a TOML value to a value.

        Raises:
            ValueError: it has another type, is not among the choices, or is an empty list where no
                flag gives one either.
        """
        if self.optional and value == self.none:
            return None
        if self.many and (value != [] or self.default == ()):
            return tuple(map(self._one, value if isinstance(value, list) else [value]))
        return self._one(value)

    def _one(self, value: object) -> Any:
        """Convert a TOML value, or an item of a list."""
        if self.kind is float and type(value) is int and abs(value) < _MAX_WHOLE:
            value = float(value)
        if type(value) is not self.kind:
            raise ValueError(value)
        return self._checked(value)

    def to_toml(self, value: Any) -> str:
        """The inverse of `from_toml`, as TOML text."""
        if value is None:
            return f'"{self.none}"'
        if isinstance(value, tuple):
            return f"[{', '.join(map(self.to_toml, value))}]"
        if isinstance(value, str):
            return _quoted(value)
        return str(value).lower() if isinstance(value, bool) else repr(value)

    def beyond(self, value: Any) -> str:
        """Why a number, or one of several, is not allowed, such as "must be at least 1, not 0";
        empty if allowed."""
        if self.within is None or value is None:
            return ""
        each = value if isinstance(value, tuple) else (value,)
        wrong = [one for one in each if one is not None and not self.within.holds(one)]
        return f"must be {self.within.words}, not {wrong[0]}" if wrong else ""

    def is_empty(self, value: object) -> bool:
        """Whether it is an empty text where that makes no sense: an empty path would be the current
        folder."""
        return value == "" and self.kind is str and self.default != ""

    def _checked(self, value: Any) -> Any:
        if self.choices and value not in self.choices:
            value = _SPELLINGS.get(value, value)
        if (
            (self.choices and value not in self.choices)
            or (type(value) is int and abs(value) >= _MAX_WHOLE)
            or (isinstance(value, float) and not math.isfinite(value))
            or self.is_empty(value)
            or (
                isinstance(value, str) and "\0" in value
            )  # neither file names nor terminals allow it
        ):
            raise ValueError(value)
        if isinstance(value, str):
            value.encode()  # a UnicodeEncodeError is a ValueError: files hold settings as UTF-8
        return value


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a dataclass, in the order of its fields."""
    any_class: Any = cls  # a checker of types doubts that classes can be hashed
    return _settings_of(any_class)


@cache
def _settings_of(cls: Any) -> tuple[Setting, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(_setting(of, hints[of.name]) for of in fields(cls))


def changed(options: Any, names: Collection[str] | None = None) -> list[Setting]:
    """The settings that are not at their defaults in an object of a settings dataclass.

    Args:
        options: the object.
        names: settings to look at; None: all.
    """
    found = (s for s in settings_of(type(options)) if names is None or s.name in names)
    return [setting for setting in found if getattr(options, setting.name) != setting.default]


def _setting(of: Field, hint: Any) -> Setting:
    optional = get_origin(hint) in (Union, UnionType)
    if optional:
        hint = next(part for part in get_args(hint) if part is not NoneType)
    many = get_origin(hint) is tuple
    if many:
        hint = get_args(hint)[0]
    within = None
    if get_origin(hint) is Annotated:
        hint, within = get_args(hint)
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    return Setting(
        name=of.name,
        kind=str if choices else hint,
        choices=choices,
        optional=optional,
        many=many,
        positional=of.metadata.get("positional", False),
        default=of.default,
        help=of.metadata["help"],
        none=of.metadata.get("none", NONE),
        within=within,
    )


def _quoted(text: str) -> str:
    """A TOML basic string: a JSON string with one more character escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
