"""Folders of the settings that begin with the home of a user."""

from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.files import at_home

_FOLDERS = (
    "save",
    "load",
    "load_adapter",
    "non_persistent_local_ckpt_dir",
    "optimizer_offload_path",
    "param_offload_path",
)


def with_home_folders(config: Config) -> Config:
    """The configuration with `~` at the start of folders replaced, since no shell does so in a
    recipe or after `--save=`.

    Raises:
        ConfigError: there is no such home.
    """
    given = {name: config.value(name) or "" for name in _FOLDERS}
    of_home = {name: path for name, path in given.items() if path.startswith("~")}
    paths = {name: str(at_home(path, ConfigError)) for name, path in of_home.items()}
    return config.with_values(**paths) if paths else config
