"""The arguments of a Megatron-LM job, from its command line or its log."""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from fivefold.config.foreign import foreign
from fivefold.config.megatron_job.command import (
    Launch,
    ScriptEnvironment,
    launch_of,
    no_job,
    ranks_of,
)
from fivefold.config.megatron_job.described import Described
from fivefold.config.megatron_job.loongforge import (
    describe,
    is_of_loongforge,
    overrides,
    own_arguments,
)
from fivefold.config.megatron_job.mindspeed import of_mindspeed
from fivefold.config.megatron_job.relatives import (
    grouped,
    in_release,
    in_samples,
    is_tokens,
    of_later,
)
from fivefold.config.megatron_job.release import Argument, known
from fivefold.config.settings import flag_of, name_of_flag
from fivefold.config.translation import Named
from fivefold.errors import ConfigError, Mistake, Mistakes, shown

_FIRST, _LAST = re.compile(r"-{3,} arguments -{3,}"), re.compile(r"-{3,} end of arguments -{3,}")
_LINE = re.compile(r"(\w+) \.{2,}(?: (.*))?$")
_MEMBERS = re.compile(r"<\w+\.(\w+): ")  # of enumerations
_VOCABULARY = re.compile(r"padded vocab \(size: (\d+)\)")
_NOWHERE = ScriptEnvironment()
_OLDER: Mapping[str, str] = MappingProxyType(
    {
        "apply_layernorm_1p": "layernorm_zero_centered_gamma",
        "norm_epsilon": "layernorm_epsilon",
    }
)
"""Names that arguments have in logs and checkpoints of older releases."""


@dataclass
class MegatronJob:
    """The arguments of a job; records which of them have been read.

    Raises:
        ConfigError: values of arguments are of the wrong kind.

    Attributes:
        given: arguments by name, as far as they are known to have been given.
        unknown: flags that the release does not have, with their values.
        ranks: number of ranks; None: not known.
        vocabulary: tokens of the tokenizer, where a log tells; None: not known.
        notes: sentences about what only the caller of a script knows, or a model's file says.
        settings: settings here that no argument of the release says.
    """

    given: Mapping[str, Any]
    unknown: tuple[str, ...] = ()
    ranks: int | None = None
    vocabulary: int | None = None
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.given = {_OLDER.get(name, name): value for name, value in self.given.items()}
        mistakes = Mistakes()
        for argument in known().arguments:
            value = self.given.get(argument.name, argument.default)
            if not argument.can_be(value):
                mistakes.add(f"{argument.name} of the job cannot be {shown(value)}")
        mistakes.raise_if_any()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self.given[name] if name in self.given else known().defaults.get(name)

    def listed(self, name: str) -> list[Any]:
        """An argument that may have several values."""
        value = self[name]
        return value if isinstance(value, list) else [] if value is None else [value]

    def same(self, *names: str) -> Named:
        """Arguments that are settings under the same name."""
        for name in names:
            yield name, self[name]

    def mention(self, *names: str) -> None:
        """Mark arguments as understood."""
        self._read.update(names)

    def unread(self) -> dict[str, Any]:
        """Arguments that differ from their defaults and that nobody has read.

        Arguments of other releases count as off if they are empty or False.
        """
        off: tuple[Any, ...] = (None, False, [])
        defaults = known().defaults
        return {
            name: value
            for name, value in self.given.items()
            if name not in self._read
            if (value != defaults[name] if name in defaults else value not in off)
        }


def read_job(text: str, around: ScriptEnvironment = _NOWHERE) -> MegatronJob:
    """The job described by a text: a log, a command line or a script.

    Raises:
        ConfigError: it is none of them, or a script that depends on more than what is `around`.
    """
    if _FIRST.search(text):
        return _from_log(text)
    return _from_command(launch_of(text, known().flags, around), around.folder)


def job_of(arguments: Mapping[str, Any]) -> MegatronJob:
    """The job that had these arguments when it saved a checkpoint."""
    ranks = arguments.get("world_size")
    return MegatronJob({n: _plain(v) for n, v in arguments.items()}, ranks=ranks)


def _plain(value: Any) -> Any:
    """A value as on a command line: types of torch by name, tuples as lists."""
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, bool | int | float | str | list | None) else str(value)


def _from_log(text: str) -> MegatronJob:
    start = _FIRST.search(text)
    assert start is not None
    block = text[start.end() :]
    end = _LAST.search(block)
    kinds = {argument.name: argument for argument in known().arguments}
    found = (_LINE.search(line) for line in block[: end.start() if end else None].splitlines())
    given = {
        match[1]: _value((match[2] or "").strip(), kinds.get(match[1]))
        for match in found
        if match is not None
    }
    if "num_layers" not in given:
        raise ConfigError(
            "the log's list of arguments has no num_layers, so it does not describe a model"
        )
    vocabulary = _VOCABULARY.search(text)
    ranks = given.get("world_size")
    return MegatronJob(given, (), ranks, int(vocabulary[1]) if vocabulary else None)


def _value(text: str, argument: Argument | None) -> Any:
    """A value, parsed from Python's printed form."""
    if text in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[text]
    plain = argument is not None and argument.kind is None and argument.nargs is None
    if members := _MEMBERS.findall(text):
        return members
    if not plain or text.startswith(("[", "(")):
        with suppress(ValueError, SyntaxError):
            return _plain(ast.literal_eval(text))
    return text


class _MegatronParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"Megatron-LM would refuse this command: {message}")


@cache
def _parser() -> _MegatronParser:
    """Megatron-LM's parser, in which absent arguments have no value."""
    parser = _MegatronParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    types: dict[str | None, type] = {"int": int, "float": float}
    for name, flags, action, nargs, kind, _ in known().arguments:
        if action in ("StoreTrue", "StoreFalse"):
            which = "store_true" if action == "StoreTrue" else "store_false"
            parser.add_argument(*flags, dest=name, action=which, default=argparse.SUPPRESS)
        elif action == "BooleanOptional":
            on = [flag for flag in flags if not flag.startswith("--no-")]
            how = argparse.BooleanOptionalAction
            parser.add_argument(*on, dest=name, action=how, default=argparse.SUPPRESS)
        else:
            of = types.get(kind, str)
            parser.add_argument(*flags, dest=name, nargs=nargs, type=of)
    return parser


def _from_command(launch: Launch, folder: Path | None) -> MegatronJob:
    by_file = is_of_loongforge(launch.launcher, launch.arguments)
    words, changed = overrides(launch.arguments) if by_file else ([*launch.arguments], {})
    words = in_release(words)
    found, rest = _parser().parse_known_args(words)
    given, unknown = vars(found), list(_unknown(words))
    if not given:
        raise no_job([(*launch.launcher, *launch.arguments)])
    dashed = {flag.split()[0]: flag_of(name_of_flag(flag)) for flag in unknown}
    if meant := {flag: name for flag, name in dashed.items() if name in known().flags}:
        what = f"flags of Megatron-LM have dashes; those with underscores, such as {min(meant)},"
        why = "are of a relative whose other defaults are not known here"
        raise ConfigError(Mistake(f"{what} {why}", works=tuple(sorted(meant.values())[:8])))
    counted = in_samples(given, unknown)
    later = of_later(unknown)
    left = [flag for flag in unknown if not (counted and is_tokens(flag))]
    left = [flag for flag in left if name_of_flag(flag.split()[0]) not in later]
    job = Described({**given, **counted, **later}, left)
    if by_file:
        describe(job, changed, launch.launcher[-1] if launch.launcher else "", folder)
    of_mindspeed(job)
    own_arguments(job)
    job.mistakes.raise_if_any()
    notes = (*job.notes, *_notes(launch), *_strays(rest, unknown))
    ranks = ranks_of(launch.launcher)
    return MegatronJob(job.given, tuple(job.unknown), ranks, job.vocabulary, notes, job.settings)


def _unknown(words: Sequence[str]) -> Iterator[str]:
    """Flags that the release does not have, with the words that follow them."""
    flags = known().flags
    for flag, values in grouped(words):
        if flag and flag not in flags:
            yield " ".join((flag, *values))


def _strays(rest: Sequence[str], unknown: Sequence[str]) -> Iterator[str]:
    """Words that follow neither an argument that takes them nor a flag that is not known."""
    given = Counter(word for flag in unknown for word in flag.split())
    over: list[str] = []
    for word in (word for each in rest for word in each.split() if not word.startswith("--")):
        if given[word] > 0:
            given[word] -= 1
        else:
            over.append(word)
    if over:
        yield f"words that belong to no argument: {' '.join(over)[:100]}"


def _notes(launch: Launch) -> Iterator[str]:
    for name, value in launch.left_open.items():
        yield f"{name} = {value}: only the caller of the script knows"
    if launch.notes:
        yield f"not known here, and read as not set, not there or not so: {', '.join(launch.notes)}"


def lost_argument(name: str, value: Any) -> str:
    """A sentence about an argument that has no counterpart."""
    ours = foreign(name)
    note = "; ".join(filter(None, [" or ".join(ours.flags), ours.note]))
    return f"{name} = {shown(value)}" + (f": {note}" if note else "")
