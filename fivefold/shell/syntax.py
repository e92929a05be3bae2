"""Statements of a bash script."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from fivefold.errors import ConfigError
from fivefold.shell.scan import REDIRECTIONS, Token, tokens

_WITHIN = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_NAME = re.compile(r"[\w.:-]+")
_INTO = tuple(each for each in REDIRECTIONS if ">" in each)


@dataclass(frozen=True)
class Command:
    """Words as they are written, assignments before them included.

    Attributes:
        document: what it is given to read: a here-document, or a "string" after <<<.
        into: where its output or its errors are written, "2" for the errors' stream; "": nowhere
            else.
    """

    words: tuple[str, ...]
    document: Token | None = None
    into: str = ""


@dataclass(frozen=True)
class Check:
    """What is between [[ and ]] ("test"), or between (( and )) ("sum")."""

    kind: str
    text: str


@dataclass(frozen=True)
class Chain:
    """Statements after "", "&&", "||", "|" or "!" (which turns the result of the next)."""

    parts: tuple[tuple[str, "Statement"], ...]


@dataclass(frozen=True)
class If:
    """Conditions, each with the statements to run if it is the first that holds; and the `else`
    statements."""

    branches: tuple[tuple["Block", "Block"], ...]
    otherwise: "Block"


@dataclass(frozen=True)
class CaseOf:
    """A word, and patterns with the statements to run for each."""

    word: str
    branches: tuple[tuple[tuple[str, ...], "Block"], ...]


@dataclass(frozen=True)
class Loop:
    """`for` has a name and words (None: the arguments); `while` and `until` a condition.

    `for ((BEGINS; CONDITION; STEP))` is `while`, with a first sum and one after each time.
    """

    name: str
    words: tuple[str, ...] | None
    condition: "Block"
    until: bool
    body: "Block"
    begins: str = ""
    step: str = ""


@dataclass(frozen=True)
class Function:
    """A name for statements."""

    name: str
    body: "Block"


@dataclass(frozen=True)
class Grouped:
    """Statements in braces; or in parentheses, `apart`, which change no variable after them."""

    body: "Block"
    apart: bool


Statement: TypeAlias = Command | Check | Chain | If | CaseOf | Loop | Function | Grouped
Block: TypeAlias = tuple[Statement, ...]


def parse(text: str) -> Block:
    """Parse the statements of a script.

    Raises:
        ConfigError: it is none that bash reads.
    """
    reader = _Reader(list(tokens(text)))
    found = reader.block()
    if reader.now.text:
        raise reader.unexpected()
    return found


_END = Token("operator", "")


class _Reader:
    """Statements from tokens, one after another."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens, self._place = found, 0
        self._compound: dict[str, Callable[[], Statement]] = {
            "if": self._if,
            "for": self._for,
            "select": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
            "{": self._group,
            "(": self._group,
            "function": self._function,
        }

    @property
    def now(self) -> Token:
        return self._tokens[self._place] if self._place < len(self._tokens) else _END

    def unexpected(self) -> ConfigError:
        what = {"\n": "the end of a line", "": "its end"}.get(self.now.text, repr(self.now.text))
        return ConfigError(f"this is no script that bash reads: it does not expect {what}")

    def block(self, *ends: str) -> Block:
        """Statements until one of several words, or until they cannot be read."""
        found: list[Statement] = []
        while True:
            self._skip("\n", ";", "&")
            if self.now is _END or self.now.text in (*ends, ")", ";;", ";&", ";;&"):
                return tuple(found)
            found.append(self._chain())

    def _chain(self) -> Statement:
        parts, before = [], ""
        while True:
            while self.now.text in ("!", "time"):
                before += "!" if self._take().text == "!" else ""
            parts.append((before, self._statement()))
            if self.now.text not in ("&&", "||", "|", "|&"):
                return parts[0][1] if len(parts) == 1 and not before else Chain(tuple(parts))
            before = self._take().text
            self._skip("\n")

    def _statement(self) -> Statement:
        if self.now.text in _WITHIN:
            raise self.unexpected()
        if self.now.kind in ("test", "sum"):
            found: Statement = Check(*self._take())
        elif self.now.text in self._compound:
            found = self._compound[self.now.text]()
        else:
            return self._command()
        self._redirections()
        return found

    def _command(self) -> Statement:
        words: list[str] = []
        begins = self._place
        while self._redirections() or self.now.kind == "word":
            if self.now.kind != "word":
                continue
            words.append(self._take().text)
            if len(words) == 1 and self.now.text == "(" and _NAME.fullmatch(words[0]):
                return self._named(words[0])
        if not words and self._place and self._tokens[self._place - 1].kind != "word":
            raise self.unexpected()
        read = self._tokens[begins : self._place]
        strings = (Token("string", t.text) for before, t in pairwise(read) if before.text == "<<<")
        document = next((t for t in read if "document" in t.kind), next(strings, None))
        into = (t.text for before, t in pairwise(read) if before.text in _INTO)
        return Command(tuple(words), document, next(into, ""))

    def _redirections(self) -> bool:
        before = self._place
        while self.now.kind == "operator" and self.now.text in REDIRECTIONS:
            self._take()
            if self.now.kind != "operator":
                self._take()
        return self._place > before

    def _named(self, name: str) -> Function:
        self._expect("(")
        self._expect(")")
        self._skip("\n")
        return Function(name, (self._statement(),))

    def _function(self) -> Function:
        self._expect("function")
        name = self._take().text
        if self.now.text == "(":
            return self._named(name)
        self._skip("\n")
        return Function(name, (self._statement(),))

    def _group(self) -> Grouped:
        apart = self._take().text == "("
        ends = ")" if apart else "}"
        body = self.block(ends)
        self._expect(ends)
        return Grouped(body, apart)

    def _if(self) -> If:
        branches: list[tuple[Block, Block]] = []
        while self.now.text in ("if", "elif"):
            self._take()
            condition = self.block("then")
            self._expect("then")
            branches.append((condition, self.block("elif", "else", "fi")))
        otherwise: Block = ()
        if self.now.text == "else":
            self._take()
            otherwise = self.block("fi")
        self._expect("fi")
        return If(tuple(branches), otherwise)

    def _for(self) -> Loop:
        self._take()
        if self.now.kind == "sum":
            begins, condition, step = (part.strip() for part in self._take().text.split(";"))
            holds = Check("sum", condition or "1")
            return Loop("", (), (holds,), False, self._body(), begins, step)
        name, words = self._take().text, None
        self._skip("\n")
        if self.now.text == "in":
            self._take()
            listed: list[str] = []
            while self.now.kind == "word":
                listed.append(self._take().text)
            words = tuple(listed)
        return Loop(name, words, (), False, self._body())

    def _while(self) -> Loop:
        until = self._take().text == "until"
        condition = self.block("do")
        return Loop("", (), condition, until, self._body())

    def _body(self) -> Block:
        self._skip("\n", ";")
        self._expect("do")
        body = self.block("done")
        self._expect("done")
        return body

    def _case(self) -> CaseOf:
        self._take()
        word = self._take().text
        self._skip("\n")
        self._expect("in")
        branches: list[tuple[tuple[str, ...], Block]] = []
        self._skip("\n")
        while self.now.text != "esac":
            self._skip("(")
            patterns = [self._take().text]
            while self.now.text == "|":
                self._take()
                patterns.append(self._take().text)
            self._expect(")")
            branches.append((tuple(patterns), self.block("esac")))
            self._skip("\n", ";;", ";&", ";;&")
        self._expect("esac")
        return CaseOf(word, tuple(branches))

    def _take(self) -> Token:
        if self.now is _END:
            raise self.unexpected()
        self._place += 1
        return self._tokens[self._place - 1]

    def _expect(self, text: str) -> None:
        if self.now.text != text:
            raise self.unexpected()
        self._place += 1

    def _skip(self, *texts: str) -> None:
        while self.now is not _END and self.now.text in texts:
            self._place += 1
