"""What settings of other trainers mean here."""

import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType

from fivefold.config.config import SETTINGS
from fivefold.config.megatron_job.release import known
from fivefold.config.settings import name_of_flag
from fivefold.errors import closest


@dataclass(frozen=True)
class Foreign:
    """A setting of another trainer.

    Attributes:
        flags: equivalent flags, of which the first one that a command knows is suggested; with a
            value if the value is part of the meaning.
        note: what differs, or why no flag is needed.
        idle: whether it changes, of any value, neither what is computed nor what is sent here.
    """

    flags: tuple[str, ...] = ()
    note: str = ""
    idle: bool = False

    def meant(self, known: Collection[str]) -> str:
        """The equivalent flag among those that a command knows; empty if there is none."""
        return next((flag for flag in self.flags if name_of(flag) in known), "")


@cache
def foreign_settings() -> Mapping[str, Foreign]:
    """All known settings by name, with underscores; a name that ends with one stands for all that
    begin so."""
    tables = tomllib.loads(files(__package__).joinpath("foreign.toml").read_text(encoding="utf-8"))
    return MappingProxyType(
        {
            name: _read(row, table == "without-effect")
            for table, rows in tables.items()
            for row, names in rows.items()
            for name in names.split()
        }
    )


def _read(row: str, idle: bool) -> Foreign:
    flags, _, note = row.partition(": ") if row.startswith("--") else ("", "", row)
    return Foreign(tuple(filter(None, flags.split(" | "))), note, idle)


def foreign(name: str, ours: Iterable[str] = ()) -> Foreign:
    """The meaning of another trainer's setting here; empty if it is not known.

    Args:
        name: its name, with underscores.
        ours: names of our settings; what is nearly one of them is a typing error, not a beginning.
    """
    table = foreign_settings()
    if name in table or closest(name, ours, 0.85):
        return table.get(name, Foreign())
    begins = (start for start in table if start.endswith("_") and name.startswith(start))
    return table.get(max(begins, key=len, default=""), Foreign())


def without_entry(flag: str) -> str:
    """A note on a flag of Megatron-LM of which `foreign` does not tell; "" if it is none."""
    argument = known().flags.get(flag)
    if argument is None:
        return ""
    return foreign(argument.name).note or (
        f"an argument of Megatron-LM {known().release} that is no flag here: fivefold translate "
        "tells what becomes of a job with it"
    )


def name_of(flag: str) -> str:
    """'--lr-decay-style cosine' -> 'lr_decay_style'; a switch by its name, on or off."""
    name = name_of_flag(flag)
    return name if name in SETTINGS else name.removeprefix("no_")


def without_section(name: str, known: Collection[str]) -> str:
    """A setting's name without the section that other trainers put before it.

    >>> without_section("checkpoint.interval", ()), without_section("optimizer.lr", ["lr"])
    ('checkpoint_interval', 'lr')
    """
    section, _, own = name.rpartition(".")
    joined = f"{section.rpartition('.')[2]}_{own}"
    return joined if section and (joined in foreign_settings() or joined in known) else own
