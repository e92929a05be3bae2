"""The program `fivefold`: runs a command, and prints errors as one message.

A command is a module of this package with `Options`, a dataclass whose docstring is its help text,
and `run(argv) -> status`. If `Options` has a field `recipe`, every setting of a run is a flag too.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

from fivefold import __version__, process
from fivefold.cli.style import first_of_host, paint
from fivefold.errors import (
    ConfigError,
    DataError,
    FivefoldError,
    Mistake,
    PlaceError,
    RanksFailed,
    did_you_mean,
)
from fivefold.files import telling_system_errors
from fivefold.train.ranks.signals import leaving_in_order

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "find the fastest layout of a model that fits on a cluster, and explain why",
        "train": "train a model in any layout, from a laptop to a cluster",
        "tune": "find the fastest layout on this machine by short training trials",
        "launch": "write or submit a job for Slurm, Kubernetes, SkyPilot or Ray",
        "verify": "prove that a layout computes what one device computes",
        "rehearse": "run one rank of each role of any layout here: would it hang, does it fit",
        "schedule": "draw and time a pipeline schedule, or compare all of them",
        "audit": "compare a run with theory: bytes on the wire, memory, FLOPs, time",
        "watch": "show the progress of a run in the terminal",
        "profile": "show where the time of a profiled step went, and join its ranks' traces",
        "report": "write a page about a run, or about two side by side",
        "eval": "compute the loss of a checkpoint over validation sets, in any layout",
        "sample": "continue a prompt with a trained model",
        "convert": "convert weights between runs and Hugging Face, Megatron-core or PEFT",
        "translate": "turn a job of Megatron-LM, DeepSpeed, Accelerate or torchtitan into a recipe",
        "data": "tokenise a recipe's corpus and count its tokens",
        "doctor": "show what this machine can do",
        "completion": "let bash, zsh or fish complete commands, flags and recipes",
    }
)
MEANT_VERBS = {
    name: verb
    for verb, names in (
        ("train", "run fit pretrain finetune fine-tune sft resume"),
        ("sample", "generate chat predict infer inference"),
        ("eval", "evaluate validate test benchmark"),
        ("convert", "export import merge merge-weights"),
        (
            "translate",
            "from-megatron megatron from-deepspeed deepspeed accelerate from-torchtitan torchtitan "
            "port",
        ),
        ("data", "tokenize tokenise preprocess preprocess-data prepare prepare-data"),
        ("plan", "estimate estimate-memory memory search"),
        ("doctor", "env info check"),
        ("launch", "submit sbatch"),
        ("help", "config flags options settings"),
        ("--version", "version"),
    )
    for name in names.split()
}
"""Commands of other trainers, and words that people try."""


def program() -> NoReturn:
    """`main` as a process of its own."""
    process.own_streams()
    process.begin()
    process.leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 for success, 1 for a failure, 2 for a mistake in it, or 128 plus
    the signal that ended it or one of its ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with (
            telling_system_errors(FivefoldError),
            leaving_in_order(),
            process.telling_environment(),
        ):
            status = _dispatch(words)
            sys.stdout.flush()
        return status
    except FivefoldError as error:
        if _tells(error):
            # In one piece, so that ranks that fail at the same time do not mix their lines; where
            # nobody can read it, the status still tells.
            with suppress(OSError):
                sys.stderr.write(f"{paint('error:', 'red', sys.stderr)} {error}\n")
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has exited; discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _tells(error: FivefoldError) -> bool:
    """Whether this rank of a cluster prints an error that other ranks may have as well.

    Ranks of one host read the same settings and files; another host may have different ones.
    """
    if isinstance(error, RanksFailed):
        return False
    alone = isinstance(error, PlaceError) or not isinstance(error, ConfigError | DataError)
    return alone or first_of_host()


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [*_explained(words[1]), *words[2:]]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    verb, argv = words[0], words[1:]
    if verb == "--version":
        print(f"fivefold {__version__}")
        return 0
    if verb not in VERBS:
        kind = "flag" if verb.startswith("-") else "command"
        raise ConfigError(Mistake(f"unknown {kind} {verb!r}{_meant(verb)}", works=(*VERBS, "help")))
    module = import_module(f"fivefold.cli.{verb}")
    flags = argv[: argv.index("--")] if "--" in argv else argv
    asked = next((place for place, word in enumerate(flags) if word in ("-h", "--help")), None)
    if asked is not None:
        from fivefold.config.reference import help_text

        topic = next(iter(flags[asked + 1 :]), None)
        print(help_text(verb, module.Options, sys.stdout, topic))
        return 0
    _see_current_folder()
    status: int = module.run(argv)
    return status


def _see_current_folder() -> None:
    """Refuse to work in a folder that no longer exists, in which PyTorch cannot be imported."""
    try:
        os.getcwd()
    except FileNotFoundError:
        what = "the current folder is gone: it was deleted, or another one has its name"
        raise FivefoldError(Mistake(what, attempt='cd "$PWD", or another folder')) from None


def _explained(topic: str) -> list[str]:
    """The command line that explains a command, a setting or a flag, given by name only."""
    if topic in VERBS:
        return [topic, "--help"]
    from fivefold.config.reference import is_topic, is_word, resembles_topic

    for verb in ("train", *VERBS):
        if is_topic(topic, import_module(f"fivefold.cli.{verb}").Options):
            return [verb, "--help", topic]
    of_runs = not _named_elsewhere(topic) and (
        is_word(topic) or (not _meant(topic) and resembles_topic(topic))
    )
    return ["train", "--help", topic] if of_runs else [topic]


def _named_elsewhere(verb: str) -> str | None:
    """The command that other trainers know by this name."""
    return MEANT_VERBS.get(verb.lower().replace("_", "-"))


def _meant(verb: str) -> str:
    """A suggestion for an unknown command, to be appended to a message."""
    known = _named_elsewhere(verb)
    return f", did you mean {known!r}?" if known else did_you_mean(verb, (*VERBS, "help"))


def _overview() -> str:
    from fivefold.tell.columns import line_width, listed
    from fivefold.units import wrapped

    about = "Train transformer language models across five dimensions of parallelism."
    return "\n".join(
        [
            "usage: fivefold COMMAND ...",
            "",
            *wrapped(about, line_width()),
            "",
            *listed([(f"  {verb}", summary) for verb, summary in VERBS.items()]),
            "",
            "fivefold help COMMAND shows its flags, help FLAG one flag,",
            "help WORD all that match it, such as fivefold help muon.",
            "fivefold --version",
            "try: fivefold train demo --nproc 4",
        ]
    )
