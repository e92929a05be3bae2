"""The program `fivefold`: runs a command, and prints errors as one message.

A command is a module of this package with `Options`, a dataclass whose docstring is its help text,
and `run(argv) -> status`. If `Options` has a field `recipe`, every setting of a run is a flag too.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import NoReturn

from fivefold import __version__, process
from fivefold.cli.style import first_rank, paint
from fivefold.errors import ConfigError, FivefoldError, PlaceError, did_you_mean
from fivefold.files import telling_system_errors
from fivefold.train.signals import leaving_in_order

VERBS: Mapping[str, str] = MappingProxyType(
    {
        "plan": "find the fastest layout of a model that fits on a cluster, and explain why",
        "train": "train a model in any layout, from a laptop to a cluster",
        "tune": "find the fastest layout on this machine by short trials, and learn the machine",
        "launch": "write, and submit, the job of a run: Slurm, Kubernetes, SkyPilot, Ray",
        "verify": "prove that a layout computes what one device computes",
        "rehearse": "run a rank of each role of any layout here: memory, messages, would it hang",
        "schedule": "draw and time a pipeline schedule, or compare all of them",
        "audit": "compare a run with theory: bytes on the wire, memory, FLOPs, time",
        "watch": "show a run in the terminal while it goes on",
        "profile": "show what torch's profiler saw of a run, and join the traces of its ranks",
        "report": "show a run, or two side by side, as a page",
        "eval": "loss of a checkpoint over validation sets, in any layout",
        "sample": "continue a prompt with a trained model",
        "convert": "weights from Hugging Face into a run, or from a run to Hugging Face",
        "data": "tokenise a recipe's corpus and count its tokens",
        "doctor": "show what this machine can do",
        "completion": "let bash, zsh or fish complete commands, flags and recipes",
    }
)


def program() -> NoReturn:
    """`main`, as a process of its own."""
    process.begin()
    process.leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return 0 for success, 1 for a failure, 2 for a mistake in it."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with telling_system_errors(FivefoldError), leaving_in_order():
            status = _dispatch(words)
            sys.stdout.flush()
        return status
    except FivefoldError as error:
        # All ranks of a cluster read the same settings and would print the same error.
        if not isinstance(error, ConfigError) or isinstance(error, PlaceError) or first_rank():
            print(f"{paint('error:', 'red', sys.stderr)} {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader (head, less) has exited; discard what is still buffered.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [words[1], "--help", *words[2:]]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    verb, argv = words[0], words[1:]
    if verb == "--version":
        print(f"fivefold {__version__}")
        return 0
    if verb not in VERBS:
        kind = "flag" if verb.startswith("-") else "command"
        raise ConfigError(
            f"unknown {kind} {verb!r}{did_you_mean(verb, VERBS)}\n  works: {' | '.join(VERBS)}"
        )
    module = import_module(f"fivefold.cli.{verb}")
    flags = argv[: argv.index("--")] if "--" in argv else argv
    asked = next((place for place, word in enumerate(flags) if word in ("-h", "--help")), None)
    if asked is not None:
        from fivefold.config.reference import help_text

        topic = next((word for word in flags[asked + 1 : asked + 2]), None)
        print(help_text(verb, module.Options, sys.stdout, topic))
        return 0
    status: int = module.run(argv)
    return status


def _overview() -> str:
    width = max(map(len, VERBS))
    verbs = [f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "usage: fivefold COMMAND ...",
            "",
            "Train transformer language models across five dimensions of parallelism.",
            "",
            *verbs,
            "",
            "fivefold help COMMAND shows its flags.   fivefold --version",
            "try: fivefold train demo --nproc 4",
        ]
    )
