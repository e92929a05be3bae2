"""A text with a job of torchtitan: a TOML file, saved settings, a log, or a script."""

import re
from collections.abc import Mapping
from shlex import quote
from typing import Any

from fivefold.config.config import SECTIONS, SETTINGS
from fivefold.config.job_settings import leaves
from fivefold.config.megatron_job.command import ScriptEnvironment
from fivefold.config.sources import PRESET
from fivefold.config.torchtitan_job.command import job_of_script, job_of_words
from fivefold.config.torchtitan_job.job import TitanJob
from fivefold.config.torchtitan_job.releases import all_settings, renamed
from fivefold.config.torchtitan_job.saved import LOGGED, job_of_log
from fivefold.errors import ConfigError, Mistake
from fivefold.files import parse_toml

_SECTION = re.compile(r"^\s*\[(?:\"?[\w-]+\"?\.)*\"?[\w-]+\"?\]\s*(?:#.*)?$", re.MULTILINE)
_COMMAND = re.compile(
    r"torchtitan\.train|torchtitan/train\.py|run_train\.sh|--job\.config[_-]file"
    r"|--module[ =].*--config[ =]|--config[ =].*--module[ =]"
)


def is_text_of_torchtitan(text: str, name: str) -> bool:
    """Whether a text is a job of torchtitan.

    Args:
        text: what it says.
        name: name of its file.
    """
    joined = text.replace("\\\n", " ")
    return name.endswith(".toml") or any(
        pattern.search(joined) for pattern in (_SECTION, _COMMAND, LOGGED)
    )


def read_text_of_torchtitan(text: str, name: str, around: ScriptEnvironment) -> TitanJob:
    """The job of a text.

    Args:
        text: a TOML file, a log, a command line, or a script.
        name: name of its file, for messages.
        around: what a script finds; its arguments are a TOML file's changes, too.

    Raises:
        ConfigError: it is none that can be read.
    """
    if LOGGED.search(text):
        return job_of_log(text)
    if not name.endswith(".toml") and not _SECTION.search(text):
        return job_of_script(text, around)
    tables = parse_toml(text, name, ConfigError)
    _check_is_job(tables, name)
    return job_of_words(around.arguments, None, tables)


def _check_is_job(tables: Mapping[str, Any], name: str) -> None:
    """Refuse what is not torchtitan's, such as a recipe."""
    paths = [left.path for left in leaves(tables)]
    theirs = sum(renamed(path) in all_settings() for path in paths)
    ours = sum(path.rpartition(".")[2] in (*SETTINGS, PRESET) for path in paths)
    if theirs > ours or set(tables) - set(SECTIONS):
        return
    if ours:
        works = (f"fivefold train {quote(name)}",)
        raise ConfigError(Mistake(f"{name} is a recipe of Fivefold's already", works=works))
    raise ConfigError(f"{name} is no job of torchtitan: it gives none of its settings")
