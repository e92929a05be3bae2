"""Types what an error suggests: reads suggestions out of a message and edits the command line."""

import contextlib
import io
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from fivefold.cli.main import main
from fivefold.pipeline.schedules.registry import SCHEDULES

MEANT = re.compile(r", did you mean (.+)\?$")
NUMBER = re.compile(r"(?<![\w-])\d[\w.]*")


class Told(NamedTuple):
    """One mistake of a message: its first line without "did you mean", and what it suggests."""

    what: str
    suggestions: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The mistake, whatever its numbers."""
        return NUMBER.sub("N", self.what)


@dataclass(frozen=True)
class Line:
    """A command line with the files and variables that it finds."""

    argv: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    def answer(self, folder: Path) -> tuple[int, str]:
        """Exit status and what is said on the error stream; nothing is started."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        argv = [*self.argv, "--dry-run"] if self.argv[:1] == ("train",) else [*self.argv]
        out, err = io.StringIO(), io.StringIO()
        here = Path.cwd()
        os.chdir(folder)
        try:
            with (
                patch.dict(os.environ, {**self.env, "HOME": str(folder)}),
                patch("fivefold.data.paths._builtin_files", lambda: [Path(__file__)]),
                patch("fivefold.cli.doctor.SECTIONS", {}),  # it would measure the machine
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                status = main(argv)
        finally:
            os.chdir(here)
        return status, err.getvalue()


def read_message(message: str) -> Iterator[Told]:
    """The mistakes of a message, with everything that they suggest."""
    blocks: list[list[str]] = []
    for line in message.splitlines():
        if line.startswith("  ") and blocks:
            blocks[-1].append(line)
        elif not line.startswith("note: "):
            blocks.append([line.removeprefix("error: ")])
    for what, *rest in blocks:
        meant = MEANT.search(what)
        found = re.split(r",? or (?=--)", meant[1]) if meant else []
        for line in rest:
            label, _, text = line.strip().partition(":")
            if label == "works":
                found += text.strip().split(" | ")
            elif label == "try":
                found.append(text.strip())
        yield Told(MEANT.sub("", what), tuple(found))


def type_suggestion(line: Line, told: Told, suggestion: str) -> Line:
    """The line with a suggestion of one of its mistakes followed."""
    if suggestion.startswith("unset "):
        gone = suggestion.split()[1:]
        return replace(line, env={k: v for k, v in line.env.items() if k not in gone})
    if "has no key" in told.what or "has no column" in told.what:
        suggestion = suggestion if suggestion[:2] == "--" else f"--text-key {suggestion}"
    if "is a model, not a recipe" in told.what:
        place = line.argv.index(told.what.split("'")[1])
        argv = (*line.argv[:place], *shlex.split(suggestion), *line.argv[place + 1 :])
        return replace(line, argv=argv)
    if suggestion.startswith("--"):
        return replace(line, argv=_with_flags(line.argv, told.what, shlex.split(suggestion)))
    field = re.fullmatch(r"([\w.]+) = (.+)", suggestion)
    if field and "hf/config.json" in line.files:
        return _with_field(line, field[1].split("."), json.loads(field[2]))
    return _with_word(line, told.what, suggestion)


def _with_field(line: Line, path: list[str], value: object) -> Line:
    """Another value in the config.json of a model; `type` is an old spelling of `rope_type`."""
    content = json.loads(line.files["hf/config.json"])
    table = content
    for name in path[:-1]:
        table = table[name]
    if path[-1] == "rope_type":
        table.pop("type", None)
    table[path[-1]] = value
    return replace(line, files={**line.files, "hf/config.json": json.dumps(content)})


def _with_flags(argv: tuple[str, ...], what: str, flags: list[str]) -> tuple[str, ...]:
    """Flags instead of those that the mistake names, else at the end, where they count."""
    named = [word.strip(",:") for word in what.split() if word[:1] in "-\u2013" and len(word) > 2]
    places = [n for n, word in enumerate(argv) if word.partition("=")[0] in named]
    if what.startswith("unknown flag") and places:
        at = places[0]
        _, equals, value = argv[at].partition("=")
        following = argv[at + 1 : at + 2]
        if len(flags) > 1 or equals:  # it says all, or the value is at the same place
            new = flags if len(flags) > 1 else [f"{flags[0]}={value}"]
            skip = 1 + (following in (("True",), ("true",)))
            return (*argv[:at], *new, *argv[at + skip :])
        return (*argv[:at], *flags, *argv[at + 1 :])
    kept: list[str] = []
    dropping = False
    for word in argv:
        is_flag = bool(re.match(r"-[^\d.]", word))
        dropping = word.partition("=")[0] in named if is_flag else dropping
        if not dropping:
            kept.append(word)
    return (*kept, *flags)


def _with_word(line: Line, what: str, suggestion: str) -> Line:
    """Another word in the place of the wrong one, on the line or in a file."""
    word = suggestion.strip("'")
    if line.argv[0] == "schedule" and word in SCHEDULES:
        return replace(line, argv=("schedule", word, *line.argv[2:]))
    in_section = re.fullmatch(r"'(\w+)' in \[(\w+)\]", suggestion)
    found = re.findall(r"'([^']*)'|\[(\w+)\]|(?<=: )(\S+)$", what)
    for wrong in filter(None, (next(filter(None, groups), "") for groups in found)):
        flag = what.split()[0]
        first = line.argv.index(flag) if flag in line.argv else 0
        if flag in line.argv and line.argv.count(flag) > 1:
            first = max(
                n
                for n, typed in enumerate(line.argv)
                if typed == flag and wrong in line.argv[n + 1 :]
            )
        places = [
            n
            for n, typed in enumerate(line.argv)
            if typed.rpartition("=")[2] == wrong and n >= first
        ]
        places = places or [n for n, typed in enumerate(line.argv) if typed.endswith("/" + wrong)]
        if places:
            new = line.argv[places[0]].removesuffix(wrong) + word
            at = places[0]
            return replace(line, argv=(*line.argv[:at], new, *line.argv[at + 1 :]))
        for name, text in line.files.items():
            if isinstance(text, str) and wrong in text:
                if in_section:
                    edited = _moved(text, wrong, in_section[1], in_section[2])
                else:
                    edited = text.replace(wrong, word, 1)
                return replace(line, files={**line.files, name: edited})
    path = re.search(r"(\S+) is not", what) or re.search(r": (\S+)$", what)
    if path and path[1] in line.argv:
        at = line.argv.index(path[1])
        return replace(line, argv=(*line.argv[:at], word, *line.argv[at + 1 :]))
    raise AssertionError(f"no place to type {suggestion!r} of {what!r} in {line}")


def _moved(text: str, wrong: str, key: str, section: str) -> str:
    """A key under its right name in its right section."""
    lines = text.splitlines()
    at = next(n for n, each in enumerate(lines) if each.partition("=")[0].strip() == wrong)
    value = lines.pop(at).partition("=")[2]
    header = f"[{section}]"
    if header not in lines:
        lines.append(header)
    lines.insert(lines.index(header) + 1, f"{key} ={value}")
    edited = "\n".join(lines)
    tomllib.loads(edited)
    return edited
