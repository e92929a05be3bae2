"""Write down the arguments of Megatron-LM: their flags, how many words follow, types and defaults.

    git clone --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
    PYTHONPATH=Megatron-LM python -m benchmarks.megatron_arguments

`fivefold translate` reads command lines by this file, and knows from it which arguments a job
leaves at their defaults.
"""

import argparse
import enum
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.files import write_atomic

TARGET = Path(__file__).parents[1] / "fivefold" / "config" / "megatron_job" / "arguments.json"


def rows(parser: argparse.ArgumentParser) -> Iterator[list[Any]]:
    """Of each way to give an argument: its name, flags, action, words, type and default."""
    for action in parser._actions:
        if action.dest == "help":
            continue
        default = action.default
        if isinstance(default, enum.Enum):
            default = default.name
        kind = getattr(action.type, "__name__", None)
        yield [
            action.dest,
            list(action.option_strings),
            type(action).__name__.removeprefix("_").removesuffix("Action"),
            action.nargs,
            kind if kind in ("int", "float", "bool") else None,
            default,
        ]


def main() -> None:
    """Write the file."""
    sys.argv = sys.argv[:1]
    of = import_module("megatron.training.arguments")
    parser = of.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    release = import_module("megatron.core.package_info").__version__
    lines = ",\n".join(json.dumps(row) for row in rows(parser))
    write_atomic(TARGET, f'{{"release": {json.dumps(release)}, "arguments": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
