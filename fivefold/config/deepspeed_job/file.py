"""Reads the settings file that `deepspeed.initialize` takes."""

import json
from dataclasses import dataclass, field
from typing import Any

from fivefold.config.job_settings import JobSettings, N
from fivefold.config.translation import Named
from fivefold.errors import ConfigError, Mistake

AUTO = "auto"
"""The value for settings that Hugging Face's Trainer fills in."""


@dataclass
class DeepSpeedJob(JobSettings):
    """A settings file of DeepSpeed.

    Attributes:
        left_open: paths of what was read and is "auto", in order.
    """

    left_open: dict[str, None] = field(default_factory=dict)

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
    except (ValueError, RecursionError) as error:
        raise ConfigError(Mistake(f"no file of settings for DeepSpeed: {error}")) from None
    if not isinstance(given, dict):
        raise ConfigError(Mistake("no file of settings for DeepSpeed: it is no object"))
    return DeepSpeedJob(given)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)} stands there twice")
    return found
