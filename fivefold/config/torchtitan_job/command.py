"""Command lines of torchtitan, and scripts with them: what they add to a job file."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from fivefold.config.megatron_job.command import ScriptEnvironment, ranks_of, script_of, tasks_of
from fivefold.config.torchtitan_job.job import TitanJob, job_in_python, job_of
from fivefold.config.torchtitan_job.releases import all_settings, known, renamed
from fivefold.errors import ConfigError, Mistake, did_you_mean, shown
from fivefold.files import parse_toml, read_text
from fivefold.shell.unknown import is_unknown, readable, unknown_names

_FILE = ("job.config_file", "job.config-file")
_PROGRAMS = ("run_train.sh", "torchtitan.train", "train.py")
_RUN_TRAIN = "run_train.sh"
_KINDS = re.compile(r"activation[-_]checkpoint:([\w-]+)")
_RANKS_OF_RUN_TRAIN = 8  # unless NGPU says otherwise


def starts_job(words: Sequence[str]) -> bool:
    """Whether the words of a command start a job of torchtitan."""
    flags = {word.partition("=")[0].removeprefix("--") for word in words if word[:2] == "--"}
    runs = any(PurePath(word).name in _PROGRAMS for word in words)
    named = flags & set(_FILE) or flags >= {"module", "config"}
    return bool(words) and words[0] not in ("echo", "printf") and bool(runs or named)


def job_of_script(text: str, around: ScriptEnvironment) -> TitanJob:
    """The job that a script, or a command line, starts.

    Raises:
        ConfigError: it starts none, or several; or what it starts is not known here.
    """
    script = script_of(text, around, starts_job)
    commands = {tuple(words) for words in script.commands if starts_job(words)}
    if len(commands) != 1:
        what = "no job" if not commands else f"{len(commands)} jobs"
        works = ("a script that starts one of them",) if commands else ()
        raise ConfigError(Mistake(f"the script starts {what} of torchtitan", works=works))
    (words,) = commands
    after = next(n for n, w in enumerate(words) if starts_job((w,)) or w.startswith("--module"))
    place = after + 1 if PurePath(words[after]).name in _PROGRAMS else after
    launcher = (*tasks_of(text), *words[:place])
    variables = script.variables

    def variable(name: str) -> str | None:
        value = variables.get(name) if variables.is_set(name) else ""
        return value if value and not is_unknown(value) else None

    ranks = ranks_of(launcher)
    by_script = any(PurePath(word).name == _RUN_TRAIN for word in words)
    if by_script and ranks is None:
        ranks = int(number) if (number := variable("NGPU") or "").isdecimal() else None
        ranks = _RANKS_OF_RUN_TRAIN if ranks is None and not variable("NGPU") else ranks
    file = variable("CONFIG_FILE") if by_script else None
    job = job_of_words(words[place:], around.folder, file)
    return replace(job, ranks=ranks, notes=tuple(map(readable, script.notes)))


def job_of_words(
    words: Sequence[str], folder: Path | None, file: str | Mapping[str, Any] | None = None
) -> TitanJob:
    """The job of the words that follow the program's name.

    Args:
        words: flags with their values.
        folder: where files may lie, or a folder below that; None: here.
        file: the job file, or its sections, unless a flag says it.

    Raises:
        ConfigError: the file cannot be read, or a configuration in Python is not known.
    """
    given = dict(_flags(words))
    module, name = given.pop("module", None), given.pop("config", None)
    if module and name:
        return _in_python(module[0], name[0], _valued(given))
    for flag in _FILE:
        file = next(iter(given.pop(flag, ())), file)
    if not isinstance(file, str):
        return job_of(file or {}, _valued(given))
    if missing := list(unknown_names(file)):
        raise ConfigError(f"only its caller knows {', '.join(missing)} (the job file)")
    path = found_file(file, folder)
    tables = parse_toml(read_text(path, ConfigError), str(path), ConfigError)
    return job_of(tables, _valued(given))


def _in_python(module: str, name: str, overrides: Mapping[str, Any]) -> TitanJob:
    configuration = known().configurations.get(name)
    if configuration is None or module.rpartition(".")[2] != configuration.module:
        raise ConfigError(
            Mistake(
                f"--module {module} --config {name} is code that is not read"
                f"{did_you_mean(name, known().configurations)}",
                ("those of torchtitan 0.3.0 are known by name",),
                works=(
                    "--debug.save_config_file config.json, and the file that a start of the job "
                    "saves then",
                ),
            )
        )
    return job_in_python(configuration, overrides, None)


def found_file(name: str, folder: Path | None) -> Path:
    """A file that a job names, from the folder where torchtitan starts.

    Raises:
        ConfigError: it is not there.
    """
    beside = [] if folder is None else [folder, *folder.resolve().parents]
    for place in (Path(), *beside):
        if (path := place / name).is_file():
            return path
    raise ConfigError(Mistake(f"the job file {shown(name)} is not here", works=("its own path",)))


def _flags(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Flags with the words that follow them; a kind of recomputation is a word of its own."""
    flag, values = "", list[str]()
    for word in words:
        if (kind := _KINDS.fullmatch(word)) is not None:
            yield "activation_checkpoint.mode", [kind[1].replace("-", "_").removesuffix("_ac")]
        elif word.startswith("--"):
            if flag:
                yield flag, values
            flag, equals, value = word[2:].partition("=")
            flag, values = flag.replace("-", "_"), [value] if equals else []
        elif not is_unknown(word):
            values.append(word)
    if flag:
        yield flag, values


def _valued(given: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Settings with values of the kind that each of them has."""
    found: dict[str, Any] = {}
    for flag, words in given.items():
        section, _, last = flag.rpartition(".")
        plain = f"{section}.{last.removeprefix('no_')}" if section else last
        off = renamed(flag) not in all_settings() and renamed(plain) in all_settings()
        default = all_settings().get(renamed(plain))
        found[plain if off else flag] = False if off else _value(words, default, plain)
    return found


def _value(words: Sequence[str], default: Any, path: str) -> Any:
    """The value of words; without a default it is what it looks like."""
    text = " ".join(words)
    if isinstance(default, bool) or not words:
        return {"true": True, "false": False}.get(text.lower(), text or True)
    if path.endswith("module_fqns_per_model_part"):
        return [word.split(",") for word in words]
    if isinstance(default, list) and not any(isinstance(each, float) for each in default):
        return [part for word in words for part in word.split(",")]
    if len(words) > 1:
        return [_number(word) for word in words]
    return text if isinstance(default, str) else _number(text)


def _number(text: str) -> Any:
    if text == "None":
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
