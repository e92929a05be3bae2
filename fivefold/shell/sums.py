"""Whole numbers that a script computes."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

from fivefold.errors import ConfigError
from fivefold.shell.unknown import readable, unknown, unknown_names

_PIECE = re.compile(
    r"\s*(0[xX][\da-fA-F]+|\d+|[A-Za-z_]\w*|\ue000[^\ue001]*\ue001|\*\*|<<|>>|[<>=!]=|&&|\|\||"
    r"[-+*/%&|^]=|\+\+|--|[-+*/%<>!~?:()=,&|^])"
)
_LEVELS = (
    *(("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", ">", "<=", ">=")),
    *(("<<", ">>"), ("+", "-"), ("*", "/", "%"), ("**",)),
)
_OF_TWO: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "||": lambda a, b: int(bool(a or b)),
        "&&": lambda a, b: int(bool(a and b)),
        "|": lambda a, b: a | b,
        "^": lambda a, b: a ^ b,
        "&": lambda a, b: a & b,
        "==": lambda a, b: int(a == b),
        "!=": lambda a, b: int(a != b),
        "<": lambda a, b: int(a < b),
        ">": lambda a, b: int(a > b),
        "<=": lambda a, b: int(a <= b),
        ">=": lambda a, b: int(a >= b),
        "<<": lambda a, b: a << min(b, 64),
        ">>": lambda a, b: a >> min(b, 64),
        "+": lambda a, b: a + b,
        "-": lambda a, b: a - b,
        "*": lambda a, b: a * b,
        "/": lambda a, b: _divided(a, b),
        "%": lambda a, b: a - _divided(a, b) * b,
        "**": lambda a, b: a ** min(max(b, 0), 64),
    }
)


def _divided(a: int, b: int) -> int:
    if not b:
        raise ConfigError("the script divides by 0")
    whole = abs(a) // abs(b)
    return whole if (a < 0) == (b < 0) else -whole


class ShellSum:
    """What stands between (( and )), after its expansions.

    Args:
        text: it.
        read: the text of a variable.
        write: gives a variable another value.
    """

    def __init__(self, text: str, read: Callable[[str], str], write: Callable[[str, str], None]):
        self._text, self._read, self._write = text, read, write
        self._pieces = _PIECE.findall(text)
        if "".join(self._pieces) != re.sub(r"\s", "", text):
            raise self._wrong()
        self._place = 0
        self._missing: dict[str, None] = {}

    def value(self) -> str:
        """Its value, or that it is not known.

        Raises:
            ConfigError: it is no sum, or divides by 0.
        """
        if not self._pieces:
            return "0"
        try:
            found = self._several()
        except ConfigError:
            if not self._missing:
                raise
            found, self._place = 0, len(self._pieces)
        if self._place < len(self._pieces):
            raise self._wrong()
        return "".join(map(unknown, self._missing)) or str(found)

    def _wrong(self) -> ConfigError:
        return ConfigError(f"(({readable(self._text)})) is no sum of whole numbers")

    @property
    def _now(self) -> str:
        return self._pieces[self._place] if self._place < len(self._pieces) else ""

    def _take(self) -> str:
        self._place += 1
        return str(self._pieces[self._place - 1])

    def _several(self) -> int:
        found = self._choice()
        while self._now == ",":
            self._take()
            found = self._choice()
        return found

    def _choice(self) -> int:
        condition = self._of_two(0)
        if self._now != "?":
            return condition
        self._take()
        first = self._choice()
        if self._now != ":":
            raise self._wrong()
        self._take()
        second = self._choice()
        return first if condition else second

    def _of_two(self, level: int) -> int:
        if level == len(_LEVELS):
            return self._of_one()
        found = self._of_two(level + 1)
        while self._now in _LEVELS[level]:
            sign = self._take()
            other = self._of_two(level if sign == "**" else level + 1)
            if sign in "/%" and not other and self._missing:
                other = 1  # the sum is not known
            found = _OF_TWO[sign](found, other)
        return found

    def _of_one(self) -> int:
        piece = self._take() if self._now else ""
        if piece in ("-", "+", "!", "~"):
            found = self._of_one()
            return {"-": -found, "+": found, "!": int(not found), "~": ~found}[piece]
        if piece == "(":
            found = self._several()
            if self._now != ")":
                raise self._wrong()
            self._take()
            return found
        if piece in ("++", "--"):
            return self._changed(self._take() if self._now else "", 1 if piece == "++" else -1)
        if not piece or not (piece[0].isalnum() or piece[0] in "_\ue000"):
            raise self._wrong()
        if piece[0].isdigit():
            return int(piece, 0 if piece[:2] in ("0x", "0X") else 10)
        return self._of_variable(piece)

    def _of_variable(self, name: str) -> int:
        if self._now in ("++", "--"):
            before = self._number(name)
            self._changed(name, 1 if self._take() == "++" else -1)
            return before
        if re.fullmatch(r"[-+*/%&|^]?=", self._now):
            sign = self._take()[:-1]
            found = self._choice()
            found = _OF_TWO[sign](self._number(name), found) if sign else found
            self._write(name, "".join(map(unknown, self._missing)) or str(found))
            return found
        return self._number(name)

    def _changed(self, name: str, by: int) -> int:
        found = self._number(name) + by
        self._write(name, str(found))
        return found

    def _number(self, name: str) -> int:
        text = name if name[:1] == "\ue000" else self._read(name)
        if missing := tuple(unknown_names(text)):
            self._missing.update(dict.fromkeys(missing))
            return 1
        return int(ShellSum(text, self._read, self._write).value()) if text.strip() else 0
