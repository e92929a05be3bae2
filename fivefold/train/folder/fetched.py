"""Fetches what a run reads from the Hugging Face hub. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from fivefold.config.config import Config
from fivefold.data.mixture import with_paths
from fivefold.data.paths import JSON_SUFFIXES, TABLE_SUFFIXES
from fivefold.data.prepare import DEFAULT_CACHE
from fivefold.errors import DataError
from fivefold.files import at_home
from fivefold.hub import BESIDE, WEIGHTS, Tell, data_named, fetched_data, in_place
from fivefold.train.corpora import check_data_settings
from fivefold.train.folder.run_folder import CHECKPOINTS


def with_fetched(config: Config, tell: Tell) -> Config:
    """The configuration, with weights, tokenizer and text of the hub replaced by folders on this
    machine.

    Weights are not fetched for a run that resumes from its own checkpoints.

    Raises:
        ConfigError: there is no such repository, it may not be read, or the hub is out of reach.
    """
    config = with_fetched_data(config, tell)
    save, found = config.checkpoint.save, dict[str, str]()
    continues = save is not None and (Path(save) / CHECKPOINTS).is_dir()
    for name in ("load", "load_adapter"):
        if not continues and (given := config.value(name)) is not None:
            found[name] = str(in_place(given, WEIGHTS, tell))
    return config.with_values(**found)


def with_fetched_data(config: Config, tell: Tell) -> Config:
    """The same for tokenizer and text alone, whose settings are checked before.

    Raises:
        ConfigError: as above; or all mistakes in the settings of the data.
    """
    check_data_settings(config)
    data = config.data
    if data.tokenizer_model is not None:
        data = replace(data, tokenizer_model=str(in_place(data.tokenizer_model, BESIDE, tell)))
    suffixes = [*sorted(JSON_SUFFIXES | TABLE_SUFFIXES), ".txt"]

    def meant(path: str) -> str:
        if (named := data_named(path)) is None:
            return path
        cache = at_home(data.data_cache_path or DEFAULT_CACHE, DataError)
        return fetched_data(named, suffixes, cache, tell)

    return replace(config, data=with_paths(data, meant))
