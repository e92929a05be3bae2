"""The layout language: 'Et*2|(tt|)*29,t|mL' -> what each stage holds.

`E` embedding, `t` decoder layer, `m` multi-token-prediction layer, `L` head and loss; `|` ends a
stage; `x*n` and `(..)*n` repeat, also nested and chained; commas and white space mean nothing. The
prefix `loop:` or `v:` chooses how the stages are laid over the ranks (by default as the schedule
wants it). The language is Megatron-LM's, with nesting, white space, chained repeats and the prefix
added.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from fivefold.errors import ConfigError, Mistake, Mistakes

MAX_SYMBOLS = 100_000  # a repeat that explodes is a typing error, not a model

SYMBOLS = "EtmL|"


@dataclass(frozen=True)
class Symbol:
    """One of E t m L |, and the column of the text that it comes from."""

    char: str
    column: int


@dataclass(frozen=True)
class LayoutText:
    """A parsed layout: its symbols with all repeats written out."""

    text: str
    shape: str | None  # "loop", "v", or None where the text does not say
    symbols: tuple[Symbol, ...]

    def stages(self) -> list[list[Symbol]]:
        """The symbols of each stage."""
        stages: list[list[Symbol]] = [[]]
        for symbol in self.symbols:
            if symbol.char == "|":
                stages.append([])
            else:
                stages[-1].append(symbol)
        return stages

    def point(self, column: int) -> tuple[str, str]:
        """The text, and a caret under a column of it."""
        return self.text, " " * column + "^"


def parse(text: str) -> LayoutText:
    """Read a layout, repeats written out; the rules for models come later.

    Raises:
        ConfigError: with a caret under the place where reading stopped.
    """
    return _Parser(text).run()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = re.sub(r"\s", " ", text)  # so that the caret stays under its column
        self.at = 0
        self.levels: list[list[Symbol]] = [[]]
        self.opened: list[int] = []
        self.repeatable: int | None = None  # where in the open level the last atom starts

    def run(self) -> LayoutText:
        shape = self._prefix()
        while self.at < len(self.text):
            self._token(self.text[self.at])
        if self.opened:
            self._fail("this parenthesis is never closed", self.opened[-1])
        return LayoutText(self.text, shape, tuple(self.levels[0]))

    def _prefix(self) -> str | None:
        name, colon, _ = self.text.partition(":")
        if not colon:
            return None
        if name.strip() not in ("loop", "v"):
            self._fail(f"unknown placement {name.strip()!r}, it is loop: or v:", 0)
        self.at = len(name) + 1
        return name.strip()

    def _token(self, char: str) -> None:
        level = self.levels[-1]
        if char == "*":
            self._repeat()
            return
        if char in SYMBOLS:
            self.repeatable = len(level)
            level.append(Symbol(char, self.at))
        elif char == "(":
            self.opened.append(self.at)
            self.levels.append([])
            self.repeatable = None
        elif char == ")":
            if not self.opened:
                self._fail("this parenthesis was never opened", self.at)
            self.opened.pop()
            group = self.levels.pop()
            self.repeatable = len(self.levels[-1])
            self.levels[-1].extend(group)
        elif char not in " ,":
            self._fail(f"unexpected {char!r}; the symbols are E t m L | * ( )", self.at)
        self.at += 1

    def _repeat(self) -> None:
        if self.repeatable is None:
            self._fail("there is nothing to repeat before this *", self.at)
        count = re.compile(r"\* *([0-9]+)").match(self.text, self.at)
        if count is None or int(count[1][:9]) == 0:
            self._fail("after * comes a number of at least 1", self.at)
        level = self.levels[-1]
        atom = level[self.repeatable :]
        if len(count[1]) > 9 or len(level) + len(atom) * int(count[1]) > MAX_SYMBOLS:
            self._fail(f"this repeat gives more than {MAX_SYMBOLS} symbols", self.at)
        level.extend(atom * (int(count[1]) - 1))
        self.at = count.end()

    def _fail(self, what: str, column: int) -> NoReturn:
        caret = " " * column + "^"
        raise ConfigError(Mistake(f"pipeline layout: {what}", (self.text, caret)))


def check_rules(layout: LayoutText, num_layers: int, mtp_num_layers: int) -> None:
    """One E first, one L last, the model's layers, t before m, all m in one stage.

    Raises:
        ConfigError: every broken rule, each with the text and a caret.
    """
    mistakes = Mistakes()
    found = {
        char: [i for i, symbol in enumerate(layout.symbols) if symbol.char == char]
        for char in SYMBOLS
    }

    def column(index: int) -> int:
        return layout.symbols[index].column

    def once(char: str, meaning: str, place: str, expected: int) -> None:
        for index in found[char]:
            if index != expected:
                what = f"pipeline layout: {char} ({meaning}) stands once, as the {place} symbol"
                mistakes.add(what, *layout.point(column(index)))
                return
        if not found[char]:
            what = f"pipeline layout: {char} ({meaning}) is missing; it is the {place} symbol"
            end = 0 if expected == 0 else len(layout.text.rstrip())
            mistakes.add(what, *layout.point(end))

    once("E", "embedding", "first", 0)
    once("L", "head and loss", "last", len(layout.symbols) - 1)
    for char, wanted, name in (
        ("t", num_layers, "num_layers"),
        ("m", mtp_num_layers, "mtp_num_layers"),
    ):
        if len(found[char]) != wanted:
            what = f"pipeline layout has {len(found[char])} {char}, but {name} is {wanted}"
            mistakes.add(what, layout.text)
    late = [index for index in found["t"] if found["m"] and index > found["m"][0]]
    if late:
        what = "pipeline layout: a decoder layer t cannot follow a prediction layer m"
        mistakes.add(what, *layout.point(column(late[0])))
    cut = [index for index in found["|"] if found["m"] and found["m"][0] < index < found["m"][-1]]
    if cut:
        mistakes.add("pipeline layout: all m belong in one stage", *layout.point(column(cut[0])))
    mistakes.raise_if_any()
