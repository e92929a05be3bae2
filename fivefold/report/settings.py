"""Reads the settings of a run from its folder."""

from pathlib import Path
from shlex import quote

from fivefold.config.config import Config
from fivefold.config.rules.model import check_model
from fivefold.config.rules.values import check_values
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError, DataError, Mistake, Mistakes, closest
from fivefold.hub import model_named
from fivefold.train.folder.run_folder import RunFolder

HUB_CONFIG = "config.json"


def run_settings(folder: Path) -> Path:
    """The file of the settings with which the run was last started.

    Raises:
        DataError: the folder is not a run folder.
    """
    file = RunFolder(folder).config_file
    if not file.is_file():
        near = [p.name for p in folder.parent.glob("*") if (p / file.name).is_file()]
        close = closest(folder.name, near)
        meant = "" if close is None else f", did you mean {str(folder.parent / close)!r}?"
        if inside := [p for p in folder.parents if (p / file.name).is_file()]:
            meant = f", did you mean {str(inside[0])!r}?"
        attempt = None
        on_hub = model_named(str(folder)) is not None
        if on_hub or (folder / HUB_CONFIG).is_file():  # weights as Hugging Face keeps them
            made = f"runs/{folder.name.partition('@')[0]}" if on_hub else f"{folder}-run"
            attempt = "if it is a model on the Hugging Face hub, " if on_hub else ""
            attempt += f"fivefold convert {quote(str(folder))} {quote(made)}"
            attempt += ", which makes a run folder"
        why = f"it has no {file.name}" if folder.is_dir() else "it is a file"
        why = why if folder.exists() else "there is no such folder"
        what = f"{folder} is not a run folder: {why}{meant}"
        raise DataError(Mistake(what, attempt=attempt))
    return file


def run_config(folder: Path, part: Path | None = None) -> Config:
    """The settings with which the run was last started.

    Args:
        folder: run folder.
        part: folder in it with what one start measured; its settings count where it holds them,
            since later starts may have another layout.

    Raises:
        DataError: the folder is not a run folder, or its settings are wrong.
    """
    file = run_settings(folder)
    if part is not None and (own := RunFolder(part).config_file).is_file():
        file = own
    try:
        config, mistakes = read_config(file), Mistakes()
        check_values(config, mistakes)
        check_model(config.model, mistakes)
        mistakes.raise_if_any()
    except ConfigError as error:  # drop the advice of its mistakes, which is for command lines
        why = tuple(line for found in error.mistakes for line in (found.what, *found.why))
        raise DataError(Mistake(f"{file} does not hold the settings of a run", why)) from None
    return config
