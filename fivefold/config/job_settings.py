"""The settings of another trainer's job by path, with a record of which have been read."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from fivefold.errors import Mistakes, shown

N = TypeVar("N", int, float)
_MOST = 1e19  # sys.maxsize, which some files have, and less than what no float can hold


class Left(NamedTuple):
    """A setting that nobody has read; `off`: it is inside something that is switched off."""

    path: str
    value: Any
    off: bool


@dataclass
class JobSettings:
    """The settings of a job; records which of them have been read.

    A setting has a path such as "training.steps". Whole numbers may be written as 5e8.

    Attributes:
        given: what the job says, nested.
        mistakes: settings of the wrong kind.
    """

    given: Mapping[str, Any]
    mistakes: Mistakes = field(default_factory=Mistakes)
    _read: set[str] = field(default_factory=set)

    def get(self, path: str) -> Any:
        """A setting; None: not given."""
        self._read.add(path)
        value: Any = self.given
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    def mention(self, *paths: str) -> None:
        """Mark settings as understood."""
        self._read.update(paths)

    def number(self, path: str, default: N) -> N:
        """A number; an integer if the default is one."""
        value = self.get(path)
        if value is None:
            return default
        there = isinstance(value, int | float) and not isinstance(value, bool)
        if there and abs(value) <= _MOST and (isinstance(default, float) or value == int(value)):
            return type(default)(value)
        kind = "a number" if isinstance(default, float) else "a whole number"
        self.mistakes.add(f"{path} cannot be {shown(value)}: it must be {kind}")
        return default

    def count(self, path: str) -> int | None:
        """An integer of at least 1; None: not given."""
        value = self.number(path, 0)
        if value < 1 and self.get(path) is not None:
            self.mistakes.add(f"{path} cannot be {shown(self.get(path))}: it must be 1 or more")
        return value if value > 0 else None

    def flag(self, path: str, default: bool = False) -> bool:
        """A switch."""
        value = self.get(path)
        if value is not None and not isinstance(value, bool):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it must be true or false")
        return value if isinstance(value, bool) else default

    def word(self, path: str) -> str:
        """A word in lower case; empty: not given."""
        value = self.get(path)
        if value is not None and not isinstance(value, str):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it must be a word")
        return value.lower() if isinstance(value, str) else ""

    def unread(self) -> list[Left]:
        """Settings that nobody has read."""
        return [left for left in leaves(self.given) if left.path not in self._read]


def leaves(value: Mapping[str, Any], before: str = "", off: bool = False) -> Iterator[Left]:
    """Every setting by its path."""
    off = off or value.get("enabled") is False
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from leaves(inner, f"{before}{name}.", off)
        else:
            yield Left(f"{before}{name}", inner, off)
