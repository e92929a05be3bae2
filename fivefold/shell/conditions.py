"""Evaluates `[` and `[[` as far as their operands are known."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from fivefold.shell.expansion import Expander, matches, words_of
from fivefold.shell.unknown import known_part, readable, unknown_names

_NUMBERS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {
        "-eq": lambda a, b: a == b,
        "-ne": lambda a, b: a != b,
        "-lt": lambda a, b: a < b,
        "-le": lambda a, b: a <= b,
        "-gt": lambda a, b: a > b,
        "-ge": lambda a, b: a >= b,
    }
)
_TEXTS = ("=", "==", "!=", "=~", "<", ">")


class Condition:
    """One condition.

    Args:
        words: its words, expanded.
        expander: computes what is compared as numbers.
        is_set: whether a variable has a value.

    Attributes:
        doubts: what it depends on and nobody here knows.
    """

    def __init__(
        self, words: Sequence[str], expander: Expander, is_set: Callable[[str], bool]
    ) -> None:
        self._words, self._place = list(words), 0
        self._expander, self._is_set = expander, is_set
        self.doubts: list[str] = []

    def holds(self) -> bool:
        """Whether it holds, if unknown variables are not set and unknown files do not exist."""
        found = self._any()
        return found and self._place == len(self._words)

    def _any(self) -> bool:
        found = self._all()
        while self._now in ("||", "-o"):
            self._place += 1
            other = self._all()
            found = found or other
        return found

    def _all(self) -> bool:
        found = self._one()
        while self._now in ("&&", "-a"):
            self._place += 1
            other = self._one()
            found = found and other
        return found

    @property
    def _now(self) -> str | None:
        return self._words[self._place] if self._place < len(self._words) else None

    def _one(self) -> bool:
        left = self._words[self._place : self._place + 3]
        if len(left) > 1 and (left[1] in _NUMBERS or left[1] in _TEXTS):
            self._place += min(len(left), 3)
            return len(left) == 3 and self._compared(*left)
        if left[:1] == ["!"]:
            self._place += 1
            return not self._one()
        if left[:1] == ["("]:
            self._place += 1
            found = self._any()
            self._place += self._now == ")"
            return found
        if len(left) > 1 and re.fullmatch("-[a-zA-Z]", left[0]):
            self._place += 2
            return self._has(*left[:2])
        self._place += len(left[:1])
        return bool(left) and bool(known_part(left[0]))

    def _compared(self, left: str, how: str, right: str) -> bool:
        self.doubts += [*unknown_names(left), *unknown_names(right)]
        left, right = known_part(left), known_part(right)
        if how in _NUMBERS:
            try:
                return _NUMBERS[how](*(int(self._expander.sum(text)) for text in (left, right)))
            except ValueError:
                return False
        if how == "=~":
            try:
                return re.search(right, left) is not None
            except re.error:
                return False
        if how in ("<", ">"):
            return left < right if how == "<" else left > right
        return matches(left, right) == (how != "!=")

    def _has(self, what: str, value: str) -> bool:
        if what in ("-z", "-n"):
            return bool(known_part(value)) == (what == "-n")
        if what == "-v":
            return self._is_set(value)
        self.doubts.append(f"$([ {what} {readable(value)} ])")
        return False


def tested(text: str, expander: Expander) -> Iterator[str]:
    """The words between [[ and ]]; variables within are not split."""
    apart = re.sub(r"(?<!\\)(&&|\|\||[()])", r" \1 ", text) if "=~" not in text else text
    before = ""
    for word in words_of(apart):
        pattern = before == "=~" and not re.search(r"['\"`]|\$[\w{(]", word)
        yield word if pattern else expander.text(word)
        before = word
