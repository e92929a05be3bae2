"""The command that starts a job, from a line, a script, or a file of MODEL_ARGS."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import yaml

from fivefold.config.foreign import foreign
from fivefold.config.megatron_job.relatives import is_pretraining, release_flag
from fivefold.config.megatron_job.release import Argument
from fivefold.errors import ConfigError, Mistake
from fivefold.shell.script import ShellScript
from fivefold.shell.unknown import dollar, is_unknown, readable, unknown_names

_OPEN = re.compile(r"\$[\w{(@*!#]|`")
_MODEL_ARGS = re.compile(r"^MODEL_ARGS:", re.MULTILINE)
_NO_JOB = (
    "this is neither a command line of Megatron-LM's pretrain_gpt.py, nor a script that runs it, "
    "nor a log of it, which begins with '---- arguments ----'"
)
_SETTINGS = re.compile(
    r"--(?:config[_-]file|deepspeed(?:[_-]config)?)[= ]([^ =]+\.(?:json|ya?ml|toml))"
)
"""Flags of Accelerate, DeepSpeed, transformers and torchtitan that name a file of settings."""
_FEWEST = 3  # flags of a command that is a job's
_TELLING = ("echo", "printf", "cat", "sed", "grep", "cp", "mkdir")
_FILES = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "vocab_file", "merge_file", "tokenizer_model", "save", "load"),
    *("data_cache_path", "tensorboard_dir", "tokenizer_type", "pretrained_checkpoint"),
)
"""Arguments that say where something lies, and not what is trained how."""
_SLURM: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        r"(?:--nodes[= ]|-N ?)(\d+)": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
        r"(?:--ntasks[= ]|-n ?)(\d+)": ("SLURM_NTASKS", "SLURM_NPROCS"),
        r"--ntasks-per-node[= ](\d+)": ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
        r"(?:--gpus-per-node[= ]|--gres[= ]gpu:)(?:\w+:)?(\d+)": (
            *("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
        ),
        r"--cpus-per-task[= ](\d+)": ("SLURM_CPUS_PER_TASK",),
    }
)
"""What a job's own lines ask Slurm for, and the variables that then say so."""


@dataclass(frozen=True)
class ScriptEnvironment:
    """The environment that a script runs in.

    Attributes:
        environment: variables that are set.
        arguments: what it is called with.
        script: its file; None: not known.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()
    script: Path | None = None

    @property
    def folder(self) -> Path | None:
        """Where the script lies; None: not known."""
        return None if self.script is None else self.script.parent


@dataclass(frozen=True)
class Launch:
    """The words of a command.

    Attributes:
        launcher: words before the job's arguments.
        arguments: words of the job.
        left_open: arguments that only the caller of the script knows, as it spells them.
        notes: what else is not known.
    """

    launcher: tuple[str, ...]
    arguments: tuple[str, ...]
    left_open: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def launch_of(text: str, flags: Mapping[str, Argument], around: ScriptEnvironment) -> Launch:
    """The command of a text.

    Args:
        text: a command line, a script, or a file of MODEL_ARGS.
        flags: the argument of each flag that may be given.
        around: what a script finds.

    Raises:
        ConfigError: there is none, or several; or it depends on what only its caller knows.
    """
    if _MODEL_ARGS.search(text):
        text = _as_script(text, flags)
    elif not _OPEN.search(text):
        launcher, arguments = _cut(_words(text), flags)
        if not is_pretraining(launcher):
            raise _no_training(launcher)
        return Launch(launcher, arguments)
    script = script_of(text, around, lambda words: _starts(words, flags))
    launcher, arguments = _chosen(script.commands, flags)
    launcher = (*tasks_of(text), *launcher)
    notes = [dollar(note) for note in script.notes]
    if launcher == ("pretrain_gpt.py",):  # a file of MODEL_ARGS does not say it
        notes.append("its program, read as pretrain_gpt.py")
    notes += [readable(words[0]) for words in script.commands if words[0].startswith("--")]
    return _without_open(launcher, arguments, flags, tuple(notes))


def script_of(
    text: str, around: ScriptEnvironment, launches: Callable[[Sequence[str]], bool]
) -> ShellScript:
    """A script, read as bash would run it where Slurm gives it what its own lines ask for.

    Args:
        text: the script.
        around: what it finds.
        launches: whether the words of a command are what is looked for.

    Raises:
        ConfigError: bash would not read it.
    """
    environment = _slurm(text) | dict(around.environment)
    script = ShellScript(environment, around.arguments, around.script, launches)
    script.run(text)
    return script


def _words(text: str) -> list[str]:
    """The words of a command, which may span lines ending in backslashes and contain comments."""
    text = text.rstrip().removesuffix("\\").replace("\\\n", " ")
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        raise ConfigError(f"this is no command that a shell reads: {error}") from None


def _as_script(text: str, flags: Mapping[str, Argument]) -> str:
    """The command that Megatron-LM's functional tests make from their files."""
    try:
        found = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"no file of MODEL_ARGS: {error}") from None
    given = found.get("MODEL_ARGS") if isinstance(found, dict) else None
    if not isinstance(given, dict):
        raise ConfigError("MODEL_ARGS is no list of flags with values")
    return " ".join(
        ("pretrain_gpt.py", *(w for item in given.items() for w in _flag(*item, flags)))
    )


def _flag(name: str, value: object, flags: Mapping[str, Argument]) -> Iterator[str]:
    """A flag with its values; true means no value, false leaves it out."""
    if value == "false":
        return
    yield name
    if isinstance(value, str) and (inner := re.fullmatch(r"\[(.*)\]", value)):
        value = inner[1].split()
    for one in value if isinstance(value, list) else (value,):
        if one not in ("true", ""):
            whole = name in flags and flags[name].nargs is None and "$" not in str(one)
            yield shlex.quote(str(one)) if whole else str(one)


def _slurm(text: str) -> dict[str, str]:
    asked = " ".join(tasks_of(text)) + " "
    return {
        name: found[1]
        for pattern, names in _SLURM.items()
        if (found := re.search(rf"(?:^| ){pattern} ", asked))
        for name in names
    }


def tasks_of(text: str) -> list[str]:
    """The options for Slurm in a job's own lines."""
    lines = re.findall(r"^#SBATCH\s+([^#\n]*)", text, re.MULTILINE)
    return [word for line in lines for word in line.split()]


def _starts(words: Sequence[str], flags: Mapping[str, Argument]) -> bool:
    given = {word.partition("=")[0] for word in words}
    is_option = words[0] in _TELLING or words[0].startswith("-")
    return not is_option and sum(word in flags for word in given) >= _FEWEST


def _chosen(
    commands: Sequence[Sequence[str]], flags: Mapping[str, Argument]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The one command that starts a job; if some train and others do not, one that trains."""
    found = [_cut(words, flags) for words in commands if _starts(words, flags)]
    trains = [each for each in found if is_pretraining(each[0])]
    named = (
        [each for each in trains if "train" in each[0][-1]]
        if all(launcher for launcher, _ in trains)
        else []
    )
    distinct = {arguments: launcher for launcher, arguments in reversed(named or trains)}
    if len(distinct) == 1:
        arguments, launcher = next(iter(distinct.items()))
        return launcher, arguments
    if distinct:
        started = ", ".join(readable(launcher[-1]) for launcher in distinct.values() if launcher)
        what = f"the script starts {len(distinct)} jobs: {started[:200]}"
        raise ConfigError(Mistake(what, works=("a script that starts one of them",)))
    raise _no_training(found[0][0]) if found else no_job(commands)


def no_job(commands: Iterable[Sequence[str]]) -> ConfigError:
    """What is wrong with commands of which none is a job; they may name settings that are one."""
    files = [name for words in commands for name in _SETTINGS.findall(" ".join(words))]
    works = tuple(f"fivefold translate {readable(name)}" for name in dict.fromkeys(files))
    return ConfigError(Mistake(_NO_JOB, works=works))


def _no_training(launcher: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the job runs {readable(launcher[-1])}; what is translated is a training by "
        "pretrain_gpt.py, or by a program with its arguments and its model"
    )


def _cut(
    words: Sequence[str], flags: Mapping[str, Argument]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The launcher with the program, and the job's arguments."""
    first = next((n for n, word in enumerate(words) if word.partition("=")[0] in flags), len(words))
    programs = [n for n, word in enumerate(words[:first]) if word.endswith(".py")]
    place = programs[-1] + 1 if programs else first
    return tuple(words[:place]), tuple(words[place:])


def _without_open(
    launcher: tuple[str, ...],
    words: Sequence[str],
    flags: Mapping[str, Argument],
    notes: tuple[str, ...],
) -> Launch:
    """A command without its unknown parts: unknown files are named, anything else unknown is a
    mistake."""
    kept: list[str] = []
    left_open: dict[str, str] = {}
    needed: dict[str, str] = {}
    flag = ""
    for word in words:
        before, flag = flag, word.partition("=")[0] if word.startswith("--") else flag
        missing = tuple(unknown_names(word))
        argument = flags.get(release_flag(flag))
        follows = bool(kept) and kept[-1] == flag and (argument is None or argument.is_valued)
        if not missing:
            kept.append(word)
        elif is_unknown(word) and not follows:
            continue  # as an optional list of arguments that is empty
        elif argument is None:
            kept.append(readable(word))
        elif _is_file(argument):
            left_open[argument.name] = readable(word.removeprefix(f"{flag}="))
            if kept and kept[-1] == before == flag:
                kept.pop()
        else:
            needed |= dict.fromkeys(missing, argument.name)
    if needed:
        raise _needed(needed, notes)
    for place in reversed(range(len(kept))):
        argument = flags.get(release_flag(kept[place]))
        empty = place + 1 == len(kept) or kept[place + 1].startswith("--")
        if empty and argument and argument.is_valued and _is_file(argument):
            left_open[argument.name] = "nothing"
            del kept[place]
    return Launch(launcher, tuple(kept), MappingProxyType(left_open), notes)


def _is_file(argument: Argument) -> bool:
    """Whether an argument only names a place, or changes nothing here."""
    return argument.name in _FILES or foreign(argument.name).idle


def _needed(needed: Mapping[str, str], notes: Sequence[str]) -> ConfigError:
    named = ", ".join(f"{dollar(name)} ({argument})" for name, argument in needed.items())
    given = " ".join(f"{name}=..." for name in needed if re.fullmatch(r"[A-Za-z_]\w*", name))
    works = [f"{given} fivefold translate job.sh"] if given else []
    if any(name.isdecimal() for name in needed) or any(note[1:].isdecimal() for note in notes):
        works.append('--script-arguments "A B C", which are $1, $2 and $3')
    if not works:
        works.append("a script with numbers for them")
    why = (f"it decides by {', '.join(notes)}, not known either",) if notes else ()
    return ConfigError(Mistake(f"only its caller knows {named} of the script", why, tuple(works)))


def ranks_of(launcher: Sequence[str]) -> int | None:
    """The number of ranks that a launcher, or Slurm, starts; None: not known."""
    text = " ".join(launcher)

    def last(*patterns: str) -> int | None:
        each = [re.findall(rf"(?:^| ){pattern}[ =](\d+)(?![\d:])", text) for pattern in patterns]
        return next((int(found[-1]) for found in each if found), None)

    nodes = last("--nnodes", "--num_nodes", "--nodes", "-N")
    each = last("--nproc[-_]per[-_]node", "--num_gpus")
    if each is not None:
        return each * (nodes or 1)
    if any(word.endswith("srun") for word in launcher):
        tasks, of_node = last("--ntasks", "-n"), last("--ntasks-per-node")
        return tasks or (of_node * nodes if of_node and nodes else None)
    return None
