"""The file of settings that `deepspeed.initialize` takes."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from fivefold.config.translation import Named
from fivefold.errors import ConfigError, Mistake, Mistakes, shown

N = TypeVar("N", int, float)
_MOST = 1e19  # sys.maxsize, which some files have, and less than what no float can hold
_TRAINER = "an argument of the Trainer of Hugging Face"
_NEOX = "a setting of GPT-NeoX, whose files are not read"
_OF_OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "per_device_train_batch_size": _TRAINER,
        "num_train_epochs": _TRAINER,
        "learning_rate": _TRAINER,
        "num-layers": _NEOX,
        "num_layers": _NEOX,
        "pipe-parallel-size": _NEOX,
        "pipe_parallel_size": _NEOX,
        "model_type": "of a model of Hugging Face: --model reads it",
    }
)
"""What stands in files of others, which have some of DeepSpeed's settings, too."""
_SECTIONS = ("bf16", "fp16", "optimizer", "scheduler", "zero_optimization")
AUTO = "auto"
"""What stands for values that the Trainer of Hugging Face fills in."""


class Left(NamedTuple):
    """A setting that nobody has asked for; `off`: it is within something that is switched off."""

    path: str
    value: Any
    off: bool


@dataclass
class DeepSpeedJob:
    """A file of settings; it notes which of them have been read.

    A setting has a path such as "zero_optimization.stage". Numbers may be written as 5e8.

    Attributes:
        given: the file.
        mistakes: settings of the wrong kind.
        left_open: paths of what was read and is "auto", in order.
    """

    given: Mapping[str, Any]
    mistakes: Mistakes = field(default_factory=Mistakes)
    left_open: dict[str, None] = field(default_factory=dict)
    _read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for name in _SECTIONS:
            if name in self.given and not isinstance(self.given[name], Mapping | None):
                found = shown(self.given[name])
                self.mistakes.add(f"{name} cannot be {found}: it is a section with settings")

    def get(self, path: str) -> Any:
        """A setting; None: it is not given, or left open."""
        self._read.add(path)
        value: Any = self.given
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value == AUTO:
            self.left_open[path] = None
            return None
        return value

    def number(self, path: str, default: N) -> N:
        """A number; a whole one where the default is."""
        value = self.get(path)
        if value is None:
            return default
        there = isinstance(value, int | float) and not isinstance(value, bool)
        if there and abs(value) <= _MOST and (isinstance(default, float) or value == int(value)):
            return type(default)(value)
        kind = "a number" if isinstance(default, float) else "a whole number"
        self.mistakes.add(f"{path} cannot be {shown(value)}: it is {kind}")
        return default

    def count(self, path: str) -> int | None:
        """A whole number from 1 on; None: it is not given."""
        value = self.number(path, 0)
        if value < 1 and self.get(path) is not None:
            self.mistakes.add(f"{path} cannot be {shown(self.get(path))}: it is 1 or more")
        return value if value > 0 else None

    def flag(self, path: str, default: bool = False) -> bool:
        """A switch."""
        value = self.get(path)
        if value is not None and not isinstance(value, bool):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it is true or false")
        return value if isinstance(value, bool) else default

    def word(self, path: str) -> str:
        """A word in small letters; empty: it is not given."""
        value = self.get(path)
        if value is not None and not isinstance(value, str):
            self.mistakes.add(f"{path} cannot be {shown(value)}: it is a word")
        return value.lower() if isinstance(value, str) else ""

    def setting(self, name: str, path: str, default: N) -> Named:
        """A number that is a setting, unless it is left open."""
        value = self.number(path, default)
        if path not in self.left_open:
            yield name, value

    def unread(self) -> list[Left]:
        """What nobody has asked for."""
        return [left for left in _leaves(self.given) if left.path not in self._read]


def read_file(text: str) -> DeepSpeedJob:
    """The settings of a file.

    Raises:
        ConfigError: it is no JSON object, or gives a setting twice.
    """
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        what = f"no file of settings for DeepSpeed: line {error.lineno} is no JSON"
        line = text.splitlines()[error.lineno - 1 :][:1]
        works = ("a file whose places to fill in are filled in, without comments",)
        raise ConfigError(
            Mistake(what, tuple(each.strip()[:100] for each in line), works)
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Mistake(f"no file of settings for DeepSpeed: {error}")) from None
    if not isinstance(given, dict):
        raise ConfigError(Mistake("no file of settings for DeepSpeed: it is no object"))
    if signs := [sign for sign in _OF_OTHERS if sign in given]:
        what = f"no file of settings for DeepSpeed: {signs[0]} is {_OF_OTHERS[signs[0]]}"
        works = ("the file that it names as deepspeed, or deepspeed_config",)
        raise ConfigError(Mistake(what, works=works))
    older = {"bf16": given.pop("bfloat16")} if "bfloat16" in given else {}
    return DeepSpeedJob(older | given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} stands there twice")
    return found


def _leaves(value: Mapping[str, Any], before: str = "", off: bool = False) -> Iterator[Left]:
    off = off or value.get("enabled") is False
    for name, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _leaves(inner, f"{before}{name}.", off)
        else:
            yield Left(f"{before}{name}", inner, off)
