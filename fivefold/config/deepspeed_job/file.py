"""The file of settings that `deepspeed.initialize` takes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fivefold.config.translation import Named
from fivefold.errors import ConfigError, Mistake, Mistakes, shown

N = TypeVar("N", int, float)
_MOST = 1e19  # more than sys.maxsize, which some files contain, and still a float
AUTO = "auto"
"""The value for settings that Hugging Face's Trainer fills in."""


class Left(NamedTuple):
    """A setting that nobody has read; `off`: it is inside something that is switched off."""

    path: str
    value: Any
    off: bool


@dataclass
class DeepSpeedJob:
    """A settings file; records which settings have been read.

    A setting has a path such as "zero_optimization.stage". Numbers may be written as 5e8.

    Attributes:
        given: the file.
        mistakes: settings of the wrong kind.
        left_open: paths of what was read and is "auto", in order.
    """

    given: Mapping[str, Any]
    mistakes: Mistakes = field(default_factory=Mistakes)
    left_open: dict[str, None] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def get(self, path: str) -> Any:
        """A setting; None: not given, or left open."""
        self._read.add(path)
        value: Any = self.given
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value == AUTO:
            self.left_open[path] = None
            return None
        return value

    def number(self, path: str, default: N) -> N:
        """A number; an integer if the default is one."""
        value = self.get(path)
        if value is None:
            return default
        there = isinstance(value, int | float) and not isinstance(value, bool)
        if there and abs(value) <= _MOST and (isinstance(default, float) or value == int(value)):
            return type(default)(value)
        kind = "a number" if isinstance(default, float) else "a whole number"
        self.mistakes.add(f"{path} cannot be {shown(value)}: it is {kind}")
        return default

    def count(self, path: str) -> int | None:
        """An integer of at least 1; None: not given."""
        value = self.number(path, 0)
        if value < 1 and self.get(path) is not None:
            self.mistakes.add(f"{path} cannot be {shown(self.get(path))}: it is 1 or more")
        return value if value > 0 else None

    def flag(self, path: str, default: bool = False) -> bool:
        """A switch."""
        value = self.get(path)
        if value is not None and not isinstance(value, bool):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it is true or false")
        return value if isinstance(value, bool) else default

    def word(self, path: str) -> str:
        """A word in lower case; empty: not given."""
        value = self.get(path)
        if value is not None and not isinstance(value, str):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it is a word")
        return value.lower() if isinstance(value, str) else ""

    def setting(self, name: str, path: str, default: N) -> Named:
        """A number as a setting, unless it is left open."""
        value = self.number(path, default)
        if path not in self.left_open:
            yield name, value

    def unread(self) -> list[Left]:
        """Settings that nobody has read."""
        return [left for left in _leaves(self.given) if left.path not in self._read]


def read_file(text: str) -> DeepSpeedJob:
    """The settings of a file.

    Raises:
        ConfigError: it is no JSON object, or gives a setting twice.
    """
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(Mistake(f"no file of settings for DeepSpeed: {error}")) from None
    if not isinstance(given, dict):
        raise ConfigError(Mistake("no file of settings for DeepSpeed: it is no object"))
    return DeepSpeedJob(given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} stands there twice")
    return found


def _leaves(value: Mapping[str, Any], before: str = "", off: bool = False) -> Iterator[Left]:
    off = off or value.get("enabled") is False
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{before}{name}.", off)
        else:
            yield Left(f"{before}{name}", inner, off)
