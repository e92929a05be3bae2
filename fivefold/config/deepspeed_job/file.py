"""The file of settings that `deepspeed.initialize` takes."""

from dataclasses import dataclass, field
from typing import Any

from fivefold.config.job_settings import JobSettings, N
from fivefold.config.translation import Named

AUTO = "auto"
"""What stands for values that the Trainer of Hugging Face fills in."""


@dataclass
class DeepSpeedJob(JobSettings):
    """A file of settings.

    Attributes:
        left_open: paths of what was read and is "auto", in order.
    """

    left_open: dict[str, None] = field(default_factory=dict)

    def get(self, path: str) -> Any:
        """A setting; None: it is not given, or left open."""
        value = super().get(path)
        if value == AUTO:
            self.left_open[path] = None
            return None
        return value

    def setting(self, name: str, path: str, default: N) -> Named:
        """A number that is a setting, unless it is left open."""
        value = self.number(path, default)
        if path not in self.left_open:
            yield name, value
