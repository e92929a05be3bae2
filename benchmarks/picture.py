"""The README's pictures: what commands show on a terminal, and a pipeline's timeline, as SVG.

python -m benchmarks.picture [NAME ...]
"""

import argparse
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import rich.console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
WIDTH = 112
TIMELINE = "fivefold schedule zb_v --stages 4 --microbatches 8 --svg"


def shorten(lines: list[str]) -> Iterable[str]:
    """Leave out most step lines: the first three and every tenth tell the story."""
    for line in lines:
        step = line.split("/")[0].strip()
        if step.isdigit() and not (int(step) % 10 == 0 or int(step) <= 3):
            continue
        yield line


def answer(lines: list[str]) -> Iterable[str]:
    """A plan without its table of other layouts."""
    table, after = lines.index("layouts, the best of each mesh"), lines.index("next")
    return [*lines[:table], *lines[after:]]


@dataclass(frozen=True)
class Picture:
    """A terminal: its title, the command whose output it shows, and which lines of that."""

    title: str
    command: str
    shown: Callable[[list[str]], Iterable[str]]


PICTURES: Mapping[str, Picture] = MappingProxyType(
    {
        "demo": Picture("make demo", "sh examples/demo.sh", shorten),
        "plan": Picture(
            "fivefold plan llama3-70b --cluster H100 --gpus 64",
            "fivefold plan llama3-70b --cluster H100 --gpus 64",
            answer,
        ),
        "verify": Picture("fivefold verify demo --nproc 4", "fivefold verify demo --nproc 4", list),
    }
)


def run(command: str) -> str:
    """What a command prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command.split(),
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.stdout


def draw(name: str, picture: Picture) -> None:
    """Run the command of a picture and save what its terminal shows."""
    output = run(picture.command)
    print(output)
    console = rich.console.Console(record=True, width=WIDTH, file=io.StringIO())
    for line in picture.shown(output.splitlines()):
        strong = line.startswith(("== ", "PASSED")) or line in ("why", "next")
        console.print(
            Text(line, style="bold green" if strong else ""), overflow="ellipsis", no_wrap=True
        )
    console.save_svg(str(IMAGES / f"{name}.svg"), title=picture.title)


def main() -> None:
    """Draw all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*PICTURES, "timeline"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME")
    for name in parser.parse_args().names or names:
        if name == "timeline":
            print(run(f"{TIMELINE} {IMAGES / 'timeline.svg'}"))
        else:
            draw(name, PICTURES[name])


if __name__ == "__main__":
    main()
