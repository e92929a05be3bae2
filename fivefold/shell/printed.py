"""The output of commands, where it follows from their words."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType

from fivefold.shell.sums import ShellSum
from fivefold.shell.unknown import is_unknown


def _folder_of(fields: Sequence[str]) -> str | None:
    return str(PurePath(fields[-1]).parent) if fields and not is_unknown(fields[-1]) else None


def _name_of(fields: Sequence[str]) -> str | None:
    return PurePath(fields[0]).name if len(fields) == 1 else None


def _computed(fields: Sequence[str]) -> str | None:
    text = " ".join(fields)
    plain = re.fullmatch(r"[-+*/%() \d]+", text)
    return ShellSum(text, lambda _: "", lambda *_: None).value() if plain else None


PRINTED: Mapping[str, Callable[[Sequence[str]], str | None]] = MappingProxyType(
    {
        "echo": lambda fields: " ".join(f for f in fields if f not in ("-n", "-e")),
        "dirname": _folder_of,
        "basename": _name_of,
        "expr": _computed,
    }
)
