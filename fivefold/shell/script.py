"""Finds what a script would run, without running any of it."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from types import MappingProxyType

from fivefold.errors import ConfigError
from fivefold.files import read_text
from fivefold.shell.assignments import ASSIGNMENT, DECLARING, assigned
from fivefold.shell.conditions import Condition, tested
from fivefold.shell.expansion import Expander, matches
from fivefold.shell.loops import Loops
from fivefold.shell.printed import Printed, answer, formatted, within
from fivefold.shell.reading import read_into
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

_SHELLS = ("bash", "sh", "sbatch")
_MOST_STEPS, _DEEPEST = 20_000, 30
_DECIDES = (*DECLARING, "set", "eval", "source", ".", "shift", "unset")


class ShellScript:
    """A script, read as bash would run it in an environment.

    One class because statements hold statements, and all of them change the same variables.

    What is not set, and what other programs would tell, is not known (`unknown`). Conditions read
    it as not set, files as not there, and other programs as having failed, which elsewhere succeed;
    where that decides about variables it is noted. An `exit` before a command that `launches` is
    passed over, because it is a check that would not fail there.

    Args:
        environment: variables that are set before.
        arguments: what the script is called with.
        path: its file, which it may ask for; None: not known.
        launches: whether the words of a command are what is looked for.

    Attributes:
        variables: what is set.
        commands: words of each command that is none of the shell's own.
        notes: what was not known and decided about variables.
        asking: whether a condition is being read.
        ended: whether it has come to its end.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        arguments: Sequence[str],
        path: Path | None,
        launches: Callable[[Sequence[str]], bool],
    ) -> None:
        self.variables = Variables(environment, arguments)
        self._expander = Expander(self.variables, self._printed)
        self._output: Printed | None = None
        if path is not None:
            self.variables.put("0", str(path.absolute()))
            self._come_to(str(path.absolute()))
        self._functions: dict[str, Block] = {}
        self.launches = launches
        self._doubts: list[str] = []
        self._steps, self._depth = 0, 0
        self.ended, self.asking = False, False
        self.loops = Loops()
        self.commands: list[list[str]] = []
        self.notes: dict[str, None] = {}

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where files that it sources may lie: from here, or beside the script itself."""
        here, own = (known_part(self.variables.get(name)) for name in ("PWD", "0"))
        return Path(here), *([Path(own).parent] if own else ())

    def run(self, text: str) -> bool:
        """Read the statements of a text; returns whether the last one succeeds.

        Raises:
            ConfigError: bash would not read it, or it is longer than anybody writes.
        """
        return self._block(parse(text))

    def run_file(self, path: Path) -> bool:
        """Read the statements of a file that the script sources."""
        before = self.variables.get("BASH_SOURCE")
        self._come_to(str(path.absolute()))
        found = self.run(read_text(path, ConfigError))
        self._come_to(before)
        return found

    def _come_to(self, file: str) -> None:
        self.variables.put_array("BASH_SOURCE", [(None, file)], more=False)

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
            case Command(words, document, into):
                return self._command(words, document, into)
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
            case Grouped(body, apart):
                before = self.variables.state()
                found = self._block(body)
                if apart:
                    self.variables.put_back(before)
                return found

    def _printed(self, text: str) -> str | None:
        """What the statements in $() print; None: nobody here knows."""
        try:
            block = parse(text)
        except ConfigError:  # other programs' languages, and what is not read here
            return None
        outer, doubts, before = self._output, self._doubts, self.variables.state()
        self._output, self._doubts = Printed(), []
        self._block(block)
        output = self._output.text if self._output.known else None
        self._output, self._doubts = outer, doubts
        self.variables.put_back(before)
        return output

    def _chain(self, parts: Sequence[tuple[str, Statement]]) -> bool:
        found, self._doubts = True, []
        for place, (before, statement) in enumerate(parts):
            if self._output:
                self._output.begin(piped=before.startswith("|") and before[:2] != "||")
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
        if self._doubts and self._output:
            self._output.add(None)
        elif self._doubts and any(map(_decides, statements)):
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

    def _command(self, words: Sequence[str], document: Token | None, into: str) -> bool:
        if self._output and not words and not into:
            return self._output.add(None)  # $(< FILE)
        own = [word for word in words[:1] if word.startswith("IFS=")]
        words = assigned(self.variables, self._expander, words)
        fields = self._expander.fields(words) if words else []
        if not fields:
            return True
        printed = self._output
        if printed and into:
            self._output = Printed()
        separators = self._expander.text(own[0][4:]) if own else self.variables.get("IFS")
        found = self._given(fields, document, separators) if document else None
        found = self._call(fields) if found is None else found
        if printed and self._output and into:
            if into != "2" and (self._output.text or not self._output.known):
                printed.add(None)
            self._output = printed
        return found

    def _given(self, fields: Sequence[str], document: Token, separators: str) -> bool | None:
        """Whether a command succeeds that is given a text; None: it has no use for it here."""
        text = document.text
        if document.kind == "document":
            text = self._expander.in_quotes(text)
        elif document.kind == "string":
            text = f"{self._expander.text(text)}\n"
        name, rest = PurePath(fields[0]).name, fields[1:]
        if name in _SHELLS:
            return self.run(text)
        if name in ("read", "mapfile", "readarray"):
            return read_into(self.variables, name, rest, text, separators)
        return self._output.add(answer(name, rest, text, "")) if self._output else None

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
        if fields[:2] == ["printf", "-v"] and (output := formatted(fields[3:])) is not None:
            self.variables.put(fields[2], output)
            return True
        if (inner := _inner(fields)) is not None:
            before = len(self.commands)
            self.run(inner)
            for command in self.commands[before:]:
                command[:0] = fields[: fields.index("-c")]
            return True
        if self._output:
            output = answer(name, rest, self._output.given, self.variables.get("PWD"))
            return self._output.add(output)
        self.commands.append(fields)
        if name == "echo" or self.launches(fields):
            return True
        self._doubts.append(f"$({readable(name)})")
        return not self.asking


def _source(script: ShellScript, words: Sequence[str]) -> bool:
    """Another script, if it exists; otherwise its variables are not known."""
    if words and not any(list(unknown_names(word)) for word in words):
        for folder in script.folders:
            if (path := folder / words[0]).is_file():
                return script.run_file(path)
    if words:
        script.notes[f"$(source {readable(words[0])})"] = None
    return not script.asking


def _change_folder(script: ShellScript, words: Sequence[str]) -> bool:
    """What `cd` does, as if the folder were there."""
    values = script.variables
    plain = [word for word in words if not re.match("-[LPe@]|--|\\+", word)]
    before, to = values.get("PWD"), plain[0] if plain else values.get("HOME")
    values.put("PWD", values.get("OLDPWD") if to == "-" else within(before, to))
    values.put("OLDPWD", before)
    return True


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
        **dict.fromkeys(("cd", "pushd"), _change_folder),
        "popd": lambda script, _: _change_folder(script, ("-",)),
        **dict.fromkeys(("false", "read", "getopts"), lambda *_: False),
        **dict.fromkeys(("shopt", "trap", "wait", "ulimit"), lambda *_: True),
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
            own = bool(words) and (words[0] in _DECIDES or bool(ASSIGNMENT.fullmatch(words[0])))
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
