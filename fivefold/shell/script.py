"""Finds what a script would run, without running any of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from types import MappingProxyType

from fivefold.errors import ConfigError
from fivefold.files import read_text
from fivefold.shell.conditions import Condition, tested
from fivefold.shell.expansion import Expander, matches
from fivefold.shell.scan import Token
from fivefold.shell.syntax import (
    Block,
    CaseOf,
    Chain,
    Check,
    Command,
    Function,
    Grouped,
    If,
    Loop,
    Statement,
    parse,
)
from fivefold.shell.unknown import (
    known_part,
    readable,
    unknown_names,
)
from fivefold.shell.variables import Variables

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?)=(.*)", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "sbatch")
_MOST_STEPS, _DEEPEST = 20_000, 30
_DECIDES = (*_DECLARING, "set", "eval", "source", ".", "shift", "unset")


@dataclass
class Loops:
    """The loops that a script is in.

    Attributes:
        depth: how many.
        left: how many of them are being left, of the last only a turn if it `goes_on`.
    """

    depth: int = 0
    left: int = 0
    goes_on: bool = False

    def leave(self, words: Sequence[str], goes_on: bool) -> bool:
        """Leave the innermost loop, or as many as a word says."""
        levels = int(words[0]) if words and words[0].isdecimal() else 1
        self.left, self.goes_on = min(levels, self.depth), goes_on
        return True

    def ends(self) -> bool:
        """Whether a loop ends whose turn has."""
        if not self.left:
            return False
        self.left -= 1
        return bool(self.left) or not self.goes_on


class ShellScript:
    """A script, read as bash would run it in an environment.

    What is not set, and what other programs would tell, is not known (`unknown`). Conditions read
    it as not set, files as not there, and other programs as having failed, which elsewhere succeed;
    where that decides about variables it is noted. An `exit` before a command that `launches` is
    passed over, because it is a check that would not fail there.

    Args:
        environment: variables that are set before.
        arguments: what the script is called with.
        folder: where files that it sources lie; None: nowhere.
        launches: whether the words of a command are what is looked for.

    Attributes:
        variables: what is set.
        commands: words of each command that is none of the shell's own.
        notes: what was not known and decided about variables.
        folders: where files that it sources may lie.
        asking: whether a condition is being read.
        ended: whether it has come to its end.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        folder: Path | None,
        launches: Callable[[Sequence[str]], bool],
    ) -> None:
        self.variables = Variables(environment, arguments)
        self._expander = Expander(self.variables)
        self._functions: dict[str, Block] = {}
        self.launches = launches
        self.folders = (Path(),) if folder is None else (folder, Path())
        self._doubts: list[str] = []
        self._steps, self._depth = 0, 0
        self.ended, self.asking = False, False
        self.loops = Loops()
        self.commands: list[list[str]] = []
        self.notes: dict[str, None] = {}

    def run(self, text: str) -> bool:
        """Read the statements of a text; returns whether the last one succeeds.

        Raises:
            ConfigError: bash would not read it, or it is longer than anybody writes.
        """
        return self._block(parse(text))

    def _block(self, block: Block) -> bool:
        if self._depth > _DEEPEST:
            raise ConfigError("the script calls itself too often")
        self._depth += 1
        found = True
        for statement in block:
            self._count()
            if self.ended or self.loops.left:
                break
            found = self._statement(statement)
        self._depth -= 1
        return found

    def _statement(self, statement: Statement) -> bool:
        match statement:
            case Command(words, document):
                return self._command(words, document)
            case Check(kind, text):
                return self._check(kind, text)
            case Chain(parts):
                return self._chain(parts)
            case If(branches, otherwise):
                return self._if(branches, otherwise)
            case CaseOf(word, options):
                return self._case(word, options)
            case Loop():
                return self._loop(statement)
            case Function(name, body):
                self._functions[name] = body
                return True
            case Grouped(body):
                return self._block(body)

    def _chain(self, parts: Sequence[tuple[str, Statement]]) -> bool:
        found, self._doubts = True, []
        for place, (before, statement) in enumerate(parts):
            runs = {"&&": found, "||": not found}.get(before.rstrip("!"), True)
            if place and before.rstrip("!") in ("&&", "||"):
                self._note([statement])
            if runs:
                found = self._statement(statement) != before.endswith("!")
        return found

    def _if(self, branches: Sequence[tuple[Block, Block]], otherwise: Block) -> bool:
        for condition, body in branches:
            self._doubts = []
            holds = self._asked(condition)
            self._note([*(one for _, block in branches for one in block), *otherwise])
            if holds:
                return self._block(body)
        return self._block(otherwise)

    def _asked(self, condition: Block) -> bool:
        before, self.asking = self.asking, True
        found = self._block(condition)
        self.asking = before
        return found

    def _case(self, word: str, options: Sequence[tuple[tuple[str, ...], Block]]) -> bool:
        value = self._expander.text(word)
        self._doubts = list(unknown_names(value))
        self._note([one for _, body in options for one in body])
        for patterns, body in options:
            if any(matches(known_part(value), self._expander.text(each)) for each in patterns):
                return self._block(body)
        return True

    def _note(self, statements: Sequence[Statement]) -> None:
        """Remember what is in doubt, if these statements change anything."""
        if self._doubts and any(map(_decides, statements)):
            self.notes.update(dict.fromkeys(self._doubts))
        self._doubts = []

    def _loop(self, loop: Loop) -> bool:
        """Turns of a loop; where one changes nothing, all others would, until time passes."""
        self.loops.depth += 1
        found = True
        if loop.name:
            given = self.variables.arguments
            words = given if loop.words is None else self._expander.fields(loop.words)
            for word in list(words):
                self.variables.put(loop.name, word)
                found = self._block(loop.body)
                if self.loops.ends():
                    break
        else:
            self._expander.sum(loop.begins)
            before = None
            while not self.ended and self._asked(loop.condition) != loop.until:
                found = self._block(loop.body)
                self._expander.sum(loop.step)
                self._count()
                if self.loops.ends() or before == (before := self.variables.state()):
                    break
        self.loops.depth -= 1
        return found

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            raise ConfigError(f"the script takes more than {_MOST_STEPS} steps")

    def _check(self, kind: str, text: str) -> bool:
        if kind == "sum":
            value = self._expander.sum(text)
            self._doubts += unknown_names(value)
            return known_part(value) not in ("", "0")
        return self._holds(list(tested(text, self._expander)))

    def _holds(self, words: Sequence[str]) -> bool:
        condition = Condition(words, self._expander, self.variables.is_set)
        found = condition.holds()
        self._doubts += condition.doubts
        return found

    def _command(self, words: Sequence[str], document: Token | None) -> bool:
        words = _assigned(self.variables, self._expander, words)
        fields = self._expander.fields(words) if words else []
        if fields and document and PurePath(fields[0]).name in _SHELLS:
            expanded = document.kind == "document"
            inner = self._expander.in_quotes(document.text) if expanded else document.text
            return self.run(inner)
        return self._call(fields) if fields else True

    def _call(self, fields: list[str]) -> bool:
        name, rest = fields[0], fields[1:]
        if name in self._functions:
            self.variables.enter(rest)
            found = self._block(self._functions[name])
            self.variables.leave()
            return found
        if name in ("[", "test"):
            return self._holds(rest[:-1] if name == "[" else rest)
        if name in _OWN:
            return _OWN[name](self, rest)
        if (inner := _inner(fields)) is not None:
            before = len(self.commands)
            self.run(inner)
            for command in self.commands[before:]:
                command[:0] = fields[: fields.index("-c")]
            return True
        self.commands.append(fields)
        if name == "echo" or self.launches(fields):
            return True
        self._doubts.append(f"$({readable(name)})")
        return not self.asking


def _assigned(variables: Variables, expander: Expander, words: Sequence[str]) -> Sequence[str]:
    """Give the variables before a command, or in one that declares them, their values; what is left
    of the command."""
    place = 0
    while place < len(words) and (parts := _ASSIGNMENT.fullmatch(words[place])):
        _assign(variables, expander, *parts.groups())
        place += 1
    if place == len(words) or words[place] not in _DECLARING:
        return words[place:]
    for word in words[place + 1 :]:
        if parts := _ASSIGNMENT.fullmatch(word):
            _assign(variables, expander, *parts.groups())
    return ()


def _assign(
    variables: Variables, expander: Expander, name: str, index: str | None, more: str, text: str
) -> None:
    if text.startswith("(") and text.endswith(")"):
        variables.put_array(name, expander.entries(text[1:-1]), bool(more))
        return
    value = expander.text(text)
    key = None if index is None else known_part(expander.text(index))
    if more and variables.is_set(name):
        value = variables.get(name, key) + value
    variables.put(name, value, key)


def _source(script: ShellScript, words: Sequence[str]) -> bool:
    """Another script, if it exists; otherwise its variables are not known."""
    there = [folder / known_part(word) for word in words[:1] for folder in script.folders]
    known = not any(list(unknown_names(word)) for word in words)
    for path in there:
        if known and path.is_file():
            return script.run(read_text(path, ConfigError))
    if words:
        script.notes[f"$(source {readable(words[0])})"] = None
    return not script.asking


def _exit(script: ShellScript, _: Sequence[str]) -> bool:
    script.ended = any(map(script.launches, script.commands))
    return True


_OWN: Mapping[str, Callable[[ShellScript, Sequence[str]], bool]] = MappingProxyType(
    {
        "eval": lambda script, words: script.run(" ".join(words)),
        "source": _source,
        ".": _source,
        "shift": lambda script, words: script.variables.shift(words),
        "set": lambda script, words: script.variables.set_arguments(words),
        "unset": lambda script, words: script.variables.forget(words),
        "exit": _exit,
        "break": lambda script, words: script.loops.leave(words, goes_on=False),
        "continue": lambda script, words: script.loops.leave(words, goes_on=True),
        **dict.fromkeys(("return", ":", "true"), lambda *_: True),
        **dict.fromkeys(("false", "read", "getopts", "popd"), lambda *_: False),
        **dict.fromkeys(("cd", "pushd", "shopt", "trap", "wait", "ulimit"), lambda *_: True),
    }
)


def _inner(fields: Sequence[str]) -> str | None:
    """The text that a shell is called with, as in `srun ... bash -c TEXT`."""
    for place, word in enumerate(fields[:-2]):
        if PurePath(word).name in _SHELLS and "-c" in fields[place:-1]:
            return fields[fields.index("-c", place) + 1]
    return None


def _decides(statement: Statement) -> bool:
    """Whether a statement changes variables, or starts a job."""
    match statement:
        case Command(words):
            own = bool(words) and (words[0] in _DECIDES or bool(_ASSIGNMENT.fullmatch(words[0])))
            return own or any(".py" in word for word in words)
        case Chain(parts):
            return any(_decides(part) for _, part in parts)
        case If(branches, otherwise):
            return any(map(_decides, [*(s for _, body in branches for s in body), *otherwise]))
        case CaseOf(_, options):
            return any(_decides(one) for _, body in options for one in body)
        case Loop(body=body) | Grouped(body=body):
            return any(map(_decides, body))
        case _:
            return False
