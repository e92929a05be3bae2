"""Settings that have an effect only together with another setting."""

from collections.abc import Collection, Iterator
from operator import attrgetter
from typing import Any

from fivefold.config.config import SECTION_OF, SETTINGS, Config
from fivefold.config.rules.dependents import DEPENDENTS
from fivefold.config.rules.orphan import Dependents, Orphan
from fivefold.errors import Mistakes

_SEARCHED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_sharding_strategy",
    "overlap_moe_expert_parallel_comm",
)
"""Settings that `fivefold plan` chooses: what depends on them may have an effect in its layout."""

_DEPENDENT = tuple(
    (name, attrgetter(f"{SECTION_OF[name]}.{name}"), SETTINGS[name].default, of)
    for of in DEPENDENTS
    for name in of.names
)


def orphans(config: Config) -> Iterator[Orphan]:
    """Every setting that differs from its default and has no effect; a degree of -1 is unknown.

    Few settings differ, so that is asked first: a layout search asks often.
    """
    for name, value_in, default, of in _DEPENDENT:
        if value_in(config) != default and not of.alive(config):
            yield Orphan(name, of, config)


def check_dependents(config: Config, mistakes: Mistakes, *, planned: bool = False) -> None:
    """Refuse settings that have no effect.

    Args:
        config: configuration with all inferable degrees filled in.
        mistakes: collection to which mistakes are added.
        planned: whether the layout is still to be chosen.
    """
    reported = set[str]()
    for orphan in orphans(config):
        needed = orphan.of.refused and not (planned and orphan.of.on in _SEARCHED)
        if needed and orphan.name not in reported:
            reported.add(orphan.name)
            mistakes.add(
                f"{orphan.shown} has no effect: {orphan.why}",
                works=[*orphan.of.add, orphan.off],
            )


def leaves_idle(config: Config, decides: str, **settings: Any) -> bool:
    """Whether these values leave a given setting that depends on `decides` without effect.

    Args:
        config: configuration with the given settings.
        decides: name of a setting in `settings`.
        settings: values of settings, by field name.
    """
    found = orphans(config.with_values(**settings))
    return any(orphan.of.refused and orphan.of.on == decides for orphan in found)


def without_orphans(
    config: Config, by_flag: Collection[str], *, deciding: Collection[str] | None = None
) -> tuple[Config, list[Orphan]]:
    """Leave out the settings of a recipe that have no effect because of a flag.

    Settings given by flags stay, and so do those that have no effect in the recipe itself.

    Args:
        config: configuration of a recipe and flags.
        by_flag: names of the settings that were given by flags.
        deciding: names of the settings because of which others are left out; None: the flags.

    Returns:
        The remaining configuration, and the settings that are left out.
    """
    left_out = []
    deciding = by_flag if deciding is None else deciding
    for of in DEPENDENTS:  # in order: some depend on settings that others leave out
        if of.on in deciding:
            found = [orphan for orphan in _orphans(of, config) if orphan.name not in by_flag]
            if found:
                config = config.with_values(**{orphan.name: orphan.default for orphan in found})
                left_out += found
    return config, left_out


def _orphans(of: Dependents, config: Config) -> Iterator[Orphan]:
    if not of.alive(config):
        for name in of.names:
            if config.value(name) != SETTINGS[name].default:
                yield Orphan(name, of, config)
