"""A setting that has an effect only together with another one, and one that is left without
effect."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from fivefold.config.config import SECTION_OF, SETTINGS, Config


@dataclass(frozen=True)
class Dependents:
    """Settings that have an effect only with certain values of another setting.

    Attributes:
        names: names of the dependent settings.
        on: name of the setting that they depend on.
        alive: function that tells whether they have an effect.
        why: their purpose, as the rest of a sentence that begins with "it".
        add: flags with which they have an effect.
        refused: whether they are refused here if they have no effect. Others are refused elsewhere,
            or do no harm; they are only left out if a flag removes the setting that a recipe chose
            them for.
    """

    names: tuple[str, ...]
    on: str
    alive: Callable[[Config], bool]
    why: str
    add: tuple[str, ...] = ()
    refused: bool = True


def where(names: str, condition: str, why: str, *add: str, refused: bool = True) -> Dependents:
    """Settings that have an effect where other settings have, or do not have, a value.

    Args:
        names: the settings.
        condition: such as "compile = true", "num_experts != none" or several with "or" between
            them, of which the first one names what they depend on.
        why: as in `Dependents`.
        add: flags with which they have an effect; none: that of the first condition's value.
        refused: as in `Dependents`.
    """
    tests = [_test(*each.split()) for each in condition.split(" or ")]
    on, sign, text = condition.split(" or ")[0].split()
    flags = add or ((SETTINGS[on].typed(_value(on, text)),) if sign == "=" else ())
    alive = tests[0] if len(tests) == 1 else lambda config: any(test(config) for test in tests)
    return Dependents((*names.split(),), on, alive, why, flags, refused)


def _test(on: str, sign: str, text: str) -> Callable[[Config], bool]:
    """A test whether a setting has, or does not have, a value; fast, since a layout search asks
    often."""
    value, wanted = _value(on, text), sign == "="
    of = attrgetter(f"{SECTION_OF[on]}.{on}")
    return lambda config: (of(config) == value) is wanted


def _value(name: str, text: str) -> Any:
    value = SETTINGS[name].from_text(text)
    return (value,) if SETTINGS[name].many else value


@dataclass(frozen=True)
class Orphan:
    """A setting that was changed from its default and has no effect."""

    name: str
    of: Dependents
    config: Config

    @property
    def default(self) -> object:
        """The value at which the setting is no mistake."""
        return SETTINGS[self.name].default

    @property
    def off(self) -> str:
        """The flag that resets the setting."""
        return SETTINGS[self.name].typed(self.default)

    @property
    def shown(self) -> str:
        """The name and value of the setting, for messages."""
        return _shown(self.config, self.name)

    @property
    def why(self) -> str:
        """The purpose of the setting, and what is missing for it."""
        return f"it {self.of.why}, and {_shown(self.config, self.of.on, ' is ')}"


def _shown(config: Config, name: str, equals: str = " = ") -> str:
    return f"{name}{equals}{SETTINGS[name].words(config.value(name))}"
