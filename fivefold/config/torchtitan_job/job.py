"""The settings of a job of torchtitan, from files or flags, under one set of names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.config.job_settings import JobSettings, leaves
from fivefold.config.torchtitan_job.releases import (
    IN_PYTHON,
    Configuration,
    all_settings,
    defaults_of,
    releases_of,
    renamed,
)
from fivefold.errors import Mistakes, did_you_mean, shown

_UNSAID = object()


@dataclass
class TitanJob(JobSettings):
    """A job; what it does not say has the defaults of its release.

    Attributes:
        given: settings by path, as the newest TOML files name them.
        releases: releases that the job may be for, oldest first.
        configuration: the function of 0.3.0's registry that it goes by.
        ranks: ranks that its launcher starts; None: not known.
        unknown: settings that no release has, with their values.
        notes: sentences about what only the caller of a script knows.
    """

    releases: tuple[str, ...] = ()
    configuration: Configuration | None = None
    ranks: int | None = None
    unknown: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        """The newest release that it may be of."""
        return self.releases[-1]

    def get(self, path: str) -> Any:
        """A setting, or its default."""
        self._read.add(path)
        value = self.given.get(path, _UNSAID)
        return self._default(path) if value is _UNSAID else value

    def says(self, path: str) -> bool:
        """Whether the job itself says a setting, and something other than the default."""
        self._read.add(path)
        return path in self.given and self.given[path] != self._default(path)

    def choice(self, path: str, *choices: str) -> str:
        """One of some words; a mistake if it is another one."""
        value = self.get(path)
        if value not in choices:
            self.mistakes.add(f"{path} cannot be {shown(value)}", works=choices)
            return choices[0]
        return str(value)

    def word_as_it_is(self, path: str) -> str:
        """A word with its capitals; empty: it is not given."""
        return str(self.get(path) or "") if self.word(path) else ""

    def words(self, path: str) -> list[str]:
        """Several words; one text has commas between them."""
        value = self.get(path)
        if isinstance(value, str):
            return [word.strip() for word in value.split(",") if word.strip()]
        if value is not None and not isinstance(value, list):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it is a list")
        return list(map(str, value)) if isinstance(value, list) else []

    def said(self, *paths: str) -> str:
        """Settings with their values: 'training.dataset = c4'."""
        return ", ".join(f"{path} = {shown(self.get(path)).strip(chr(39))}" for path in paths)

    def without_counterpart(self) -> dict[str, Any]:
        """Settings that differ from their defaults and that no translation has read."""
        return {
            left.path: left.value
            for left in self.unread()
            if left.value != self._default(left.path)
        }

    def _default(self, path: str) -> Any:
        default = defaults_of(self.release).get(path, _UNSAID)
        return all_settings().get(path) if default is _UNSAID else default


def job_of(tables: Mapping[str, Any], overrides: Mapping[str, Any]) -> TitanJob:
    """The job of a TOML file, or of what is saved of one.

    Args:
        tables: its sections.
        overrides: settings by path that a command line changes.
    """
    raw = {left.path: left.value for left in leaves(tables)} | dict(overrides)
    given, unknown, mistakes = named(raw)
    releases = releases_of(raw)
    return TitanJob(given, mistakes, releases=releases, unknown=unknown)


def job_in_python(
    configuration: Configuration, overrides: Mapping[str, Any], ranks: int | None
) -> TitanJob:
    """The job of a configuration of the registry, with what a command line changes of it."""
    given, unknown, mistakes = named({**configuration.values, **overrides})
    return TitanJob(
        given,
        mistakes,
        releases=(IN_PYTHON,),
        configuration=configuration,
        ranks=ranks,
        unknown=unknown,
    )


def named(raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Mistakes]:
    """Settings under the names of the newest TOML files, and those that no release has.

    A setting that is given by an old and a new name with two values is a mistake.
    """
    given, unknown, mistakes = dict[str, Any](), dict[str, Any](), Mistakes()
    spelt: dict[str, str] = {}
    for path, value in raw.items():
        name = renamed(path)
        if name not in all_settings():
            if value != {}:
                unknown[path] = value
            continue
        if name in given and given[name] != value and None not in (given[name], value):
            mistakes.add(
                f"{spelt[name]} = {shown(given[name])} and {path} = {shown(value)} are one setting"
            )
        if given.get(name) is None:
            given[name], spelt[name] = value, path
    if isinstance(betas := given.pop("optimizer.betas", None), Sequence) and len(betas) == 2:
        given["optimizer.beta1"], given["optimizer.beta2"] = betas
    return given, unknown, mistakes


def unknown_setting(path: str, value: Any) -> str:
    """A sentence about a setting that no release has."""
    section, _, last = path.rpartition(".")
    beside = {
        name: name.rpartition(".")[2]
        for name in all_settings()
        if name.rpartition(".")[0] == renamed(f"{section}.").rstrip(".")
    }
    meant = did_you_mean(last, beside.values()) or did_you_mean(path, all_settings())
    return f"{path} = {shown(value)}: no setting of torchtitan's releases{meant.rstrip('?')}"
