"""What a verb reads of the folder of a run."""

from pathlib import Path

from fivefold.config.config import Config
from fivefold.config.sources import read_config
from fivefold.errors import DataError, did_you_mean


def run_config(folder: Path) -> Config:
    """The settings of the run's latest start.

    Raises:
        DataError: the folder is not that of a run.
        ConfigError: the settings cannot be read.
    """
    file = folder / "config.toml"
    if not file.is_file():
        near = [p.name for p in folder.parent.glob("*") if (p / file.name).is_file()]
        raise DataError(
            f"{folder} is not a run folder: it has no {file.name}{did_you_mean(folder.name, near)}"
        )
    return read_config(file)
