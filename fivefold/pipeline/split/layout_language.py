"""The pipeline layout language: parses 'Et*2|(tt|)*29,t|mL' into the contents of each stage.

`E` embedding, `t` decoder layer, `m` multi-token prediction layer, `L` head and loss; `|` ends a
stage; `x*n` and `(..)*n` repeat; commas are ignored. This is Megatron-LM's language, and every text
that Megatron-LM accepts has the same meaning here, even surprising ones: `(tt|)*2*3` repeats its
last symbol, `tt|tt|||`. Texts that Megatron-LM rejects may contain more: white space, nested
parentheses, `x*n*k`, and the prefix `loop:` or `v:`, which sets the placement of stages on ranks
(default: what the schedule needs).
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from fivefold.errors import ConfigError, Mistake, Mistakes

MAX_SYMBOLS = 100_000  # a larger repeat is a typing error, not a model
_MAX_DIGITS = 4300  # longest number that Python, and so Megatron-LM, reads

SYMBOLS = "EtmL|"


@dataclass(frozen=True)
class Symbol:
    """One of E t m L |, and its column in the text."""

    char: str
    column: int


@dataclass(frozen=True)
class LayoutText:
    """A parsed layout: its symbols with all repeats expanded."""

    text: str
    shape: str | None  # "loop", "v", or None if not given
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
        """The text, and a caret under one of its columns."""
        return self.text, " " * column + "^"


def parse(text: str) -> LayoutText:
    """Parse a layout and expand its repeats; `check_rules` checks it against the model.

    Raises:
        ConfigError: a syntax error, with a caret under its place.
    """
    shape = None
    shown = re.sub(r"\s", " ", text)  # so that the caret stays under its column
    symbols = _as_megatron([Symbol(char, at) for at, char in enumerate(text)])
    if symbols is None:
        shape, start = _prefix(shown)
        cells = _without_space(shown, start)
        symbols = _as_megatron(cells)
        if symbols is None:
            symbols = _Parser(shown, cells).run()
    return LayoutText(shown, shape, tuple(symbols))


_REPEATED_GROUP = re.compile(r"\((?P<body>[^)]++)\)\*(?P<count>\d+)")
_REPEATED_CHAR = re.compile(r"(?P<body>.)\*(?P<count>\d+)")


def _as_megatron(cells: list[Symbol]) -> list[Symbol] | None:
    """Megatron-LM's reading of a text; None if it rejects the text or the result is too long.

    Its parser (`PipelineParallelLayerLayout.parse_str_to_list`) has no nesting: it drops commas,
    expands the groups from left to right, then the characters, and only then checks the symbols. So
    `*0` can remove any character.
    """
    cells = [cell for cell in cells if cell.char != ","]
    for pattern in (_REPEATED_GROUP, _REPEATED_CHAR):
        written: list[Symbol] = []
        end = 0
        for match in pattern.finditer("".join(cell.char for cell in cells)):
            body, count = cells[slice(*match.span("body"))], match["count"]
            if len(count) > _MAX_DIGITS or len(body) * int(count) > MAX_SYMBOLS - len(written):
                return None
            written += cells[end : match.start()] + body * int(count)
            end = match.end()
        cells = written + cells[end:]
    return cells if all(cell.char in SYMBOLS for cell in cells) else None


def _prefix(text: str) -> tuple[str | None, int]:
    """The placement that a text names, and the column where its stages start."""
    name, colon, _ = text.partition(":")
    if not colon:
        return None, 0
    if name.strip() not in ("loop", "v"):
        _fail(text, f"unknown placement {name.strip()!r}, it is loop: or v:", 0)
    return name.strip(), len(name) + 1


def _without_space(text: str, start: int) -> list[Symbol]:
    """The significant characters."""
    for gap in re.compile(r"(?<=\d)[ ,]+(?=\d)").finditer(text, start):
        if " " in gap[0]:
            what = f"unexpected {text[gap.end()]!r}; a number has no space in it"
            _fail(text, what, gap.end())
    return [Symbol(text[at], at) for at in range(start, len(text)) if text[at] not in " ,"]


class _Parser:
    """Parses what Megatron-LM rejects: nested parentheses, `x*n*k`."""

    def __init__(self, text: str, cells: list[Symbol]) -> None:
        self.text = text
        self.cells = cells
        self.at = 0
        self.levels: list[list[Symbol]] = [[]]
        self.opened: list[int] = []
        self.repeatable: int | None = None  # start of the last atom in the open level
        self.group = ""  # "closed" after a parenthesis, "repeated" after its *n

    def run(self) -> list[Symbol]:
        while self.at < len(self.cells):
            self._token(self.cells[self.at])
        if self.opened:
            _fail(self.text, "this parenthesis is never closed", self.opened[-1])
        return self.levels[0]

    def _token(self, cell: Symbol) -> None:
        level = self.levels[-1]
        if cell.char == "*":
            self._repeat(cell.column)
            return
        self.group = ""
        if cell.char in SYMBOLS:
            self.repeatable = len(level)
            level.append(cell)
        elif cell.char == "(":
            self.opened.append(cell.column)
            self.levels.append([])
            self.repeatable = None
        elif cell.char == ")":
            if not self.opened:
                _fail(self.text, "this parenthesis was never opened", cell.column)
            self.opened.pop()
            inner = self.levels.pop()
            self.repeatable = len(self.levels[-1])
            self.levels[-1].extend(inner)
            self.group = "closed"
        else:
            what = f"unexpected {cell.char!r}; the symbols are E t m L | * ( )"
            _fail(self.text, what, cell.column)
        self.at += 1

    def _repeat(self, column: int) -> None:
        if self.repeatable is None:
            _fail(self.text, "there is nothing to repeat before this *", column)
        if self.group == "repeated":
            what = (
                "a second * after a parenthesis: Megatron-LM repeats the last symbol alone by it; "
                "write ((..)*n)*k for the whole"
            )
            _fail(self.text, what, column)
        self.at += 1
        digits = ""
        while self.at < len(self.cells) and self.cells[self.at].char in "0123456789":
            digits += self.cells[self.at].char
            self.at += 1
        if not digits:
            _fail(self.text, "after * comes a number", column)
        level = self.levels[-1]
        before, atom = level[: self.repeatable], level[self.repeatable :]
        # Too many digits means too many symbols.
        count = MAX_SYMBOLS + 1 if len(digits) > _MAX_DIGITS else int(digits)
        if len(before) + len(atom) * count > MAX_SYMBOLS:
            _fail(self.text, f"this repeat gives more than {MAX_SYMBOLS} symbols", column)
        level[:] = before + atom * count
        self.group = "repeated" if self.group else ""


def _fail(text: str, what: str, column: int) -> NoReturn:
    raise ConfigError(Mistake(f"pipeline layout: {what}", (text, " " * column + "^")))


def check_rules(layout: LayoutText, num_layers: int, mtp_num_layers: int) -> None:
    """Check the rules: one E first, one L last, the model's layers, t before m, all m in one stage.

    Empty stages may precede E and follow L. As in Megatron-LM, the first stage then still holds the
    embedding, and the last one the head.

    Raises:
        ConfigError: every broken rule, each with the text and a caret.
    """
    mistakes = Mistakes()
    found = {
        char: [i for i, symbol in enumerate(layout.symbols) if symbol.char == char]
        for char in SYMBOLS
    }

    held = [index for index, symbol in enumerate(layout.symbols) if symbol.char != "|"]

    def column(index: int) -> int:
        return layout.symbols[index].column

    def once(char: str, meaning: str, place: str, at: int) -> None:
        expected = held[at] if held else 0
        for index in found[char]:
            if index != expected:
                what = f"pipeline layout: {char} ({meaning}) stands once, as the {place} symbol"
                mistakes.add(what, *layout.point(column(index)))
                return
        if not found[char]:
            what = f"pipeline layout: {char} ({meaning}) is missing; it is the {place} symbol"
            end = 0 if at == 0 else len(layout.text.rstrip())
            mistakes.add(what, *layout.point(end))

    once("E", "embedding", "first", 0)
    once("L", "head and loss", "last", -1)
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
