"""Reads the settings file that `deepspeed.initialize` takes."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fivefold.config.job_settings import JobSettings, N
from fivefold.config.translation import Named
from fivefold.errors import ConfigError, Mistake, shown

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
"""The value for settings that Hugging Face's Trainer fills in."""


@dataclass
class DeepSpeedJob(JobSettings):
    """A settings file of DeepSpeed.

    Attributes:
        left_open: paths of what was read and is "auto", in order.
    """

    left_open: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _SECTIONS:
            if name in self.given and not isinstance(self.given[name], Mapping | None):
                found = shown(self.given[name])
                self.mistakes.add(f"{name} cannot be {found}: it must be a section with settings")

    def get(self, path: str) -> Any:
        """A setting; None: not given, or left open."""
        value = super().get(path)
        if value == AUTO:
            self.left_open[path] = None
            return None
        return value

    def setting(self, name: str, path: str, default: N) -> Named:
        """A number as a setting, unless it is left open."""
        value = self.number(path, default)
        if path not in self.left_open:
            yield name, value


def read_file(text: str) -> DeepSpeedJob:
    """The settings of a file.

    Raises:
        ConfigError: it is no JSON object, or gives a setting twice.
    """
    try:
        given = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        what = f"not a configuration file of DeepSpeed: line {error.lineno} is no JSON"
        line = text.splitlines()[error.lineno - 1 :][:1]
        works = ("a file whose places to fill in are filled in, without comments",)
        raise ConfigError(
            Mistake(what, tuple(each.strip()[:100] for each in line), works)
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(Mistake(f"not a configuration file of DeepSpeed: {error}")) from None
    if not isinstance(given, dict):
        raise ConfigError(Mistake("not a configuration file of DeepSpeed: it holds no JSON object"))
    if signs := [sign for sign in _OF_OTHERS if sign in given]:
        what = f"not a configuration file of DeepSpeed: {signs[0]} is {_OF_OTHERS[signs[0]]}"
        works = ("the file that it names as deepspeed, or deepspeed_config",)
        raise ConfigError(Mistake(what, works=works))
    older = {"bf16": given.pop("bfloat16")} if "bfloat16" in given else {}
    return DeepSpeedJob(older | given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} is given twice")
    return found
