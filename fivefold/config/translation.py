"""The common form of another trainer's job, translated into settings."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.config.config import SETTINGS
from fivefold.config.settings import Setting
from fivefold.errors import Mistakes, shown

Named = Iterator[tuple[str, Any]]
"""Settings by name, with values."""


@dataclass(frozen=True)
class Translation:
    """A job in settings.

    Attributes:
        trainer: the trainer whose job it is.
        values: settings by name; those that are missing have their defaults.
        lost: sentences about arguments that have no counterpart here.
        harmless: names of arguments that change nothing here.
        ranks: number of ranks of the job; None: not known.
    """

    trainer: str
    values: dict[str, Any]
    lost: tuple[str, ...]
    harmless: tuple[str, ...]
    ranks: int | None


def fitting(named: Iterable[tuple[str, Any]], mistakes: Mistakes) -> dict[str, Any]:
    """Settings converted to their types; those that would change nothing are left out."""
    return {
        name: _fitting(SETTINGS[name], value, mistakes)
        for name, value in named
        if value is not None or SETTINGS[name].default is None
    }


def _fitting(setting: Setting, value: Any, mistakes: Mistakes) -> Any:
    if value is None:
        return None
    try:
        if setting.many:
            each = value if isinstance(value, list | tuple) else [value]
            return tuple(setting.from_text(str(one)) for one in each)
        return value if isinstance(value, bool) else setting.from_text(str(value))
    except (ValueError, KeyError):
        mistakes.add(f"{setting.name} cannot be {shown(value)}", works=setting.choices)
        return setting.default
