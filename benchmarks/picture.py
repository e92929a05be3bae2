"""The README's pictures: what commands show on a terminal, and a pipeline's timeline, as SVG.

python -m benchmarks.picture [NAME ...]
"""

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
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
    """Leave out most step lines: the first three and every tenth tell the history."""
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


@dataclass(frozen=True)
class Page:
    """A page: the commands that make it, its file, and the part of it that is shown, in pixels."""

    commands: tuple[str, ...]
    file: str
    size: tuple[int, int]


_RUN = (
    "fivefold train debug-mixtral --nproc 4 --audit --profile --train-iters 60 --eval-interval 20"
)
PAGES: Mapping[str, Page] = MappingProxyType(
    {
        "report": Page(
            (
                f"{_RUN} --ep 2 --pp 2 --save runs/one",
                f"{_RUN} --tp 2 --sequence-parallel --save runs/other",
                "fivefold report runs/one runs/other --html both.html",
            ),
            "both.html",
            (1100, 1500),
        ),
        "plan-page": Page(
            ("fivefold plan llama3-70b --cluster H100 --gpus 64 --tp 2 --pp 8 --html plan.html",),
            "plan.html",
            (1100, 1500),
        ),
    }
)


def screenshot(name: str, page: Page) -> None:
    """Make a page in a folder of its own, and save what a browser shows of it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{name}: left as it was, for want of Chromium")
        return
    with tempfile.TemporaryDirectory() as folder:
        for command in page.commands:
            print(run(command, Path(folder)))
        options = "--headless --no-sandbox --disable-gpu --hide-scrollbars"
        size = f"--window-size={page.size[0]},{page.size[1]}"
        shot = f"--screenshot={IMAGES / name}.png"
        subprocess.run(
            [browser, *options.split(), size, shot, f"file://{folder}/{page.file}"],
            check=True,
            capture_output=True,
        )


def run(command: str, folder: Path = ROOT) -> str:
    """What a command prints, run in this folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command.split(),
        cwd=folder,
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
    names = [*PICTURES, *PAGES, "timeline"]
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME")
    for name in parser.parse_args().names or names:
        if name == "timeline":
            print(run(f"{TIMELINE} {IMAGES / 'timeline.svg'}"))
        elif name in PAGES:
            screenshot(name, PAGES[name])
        else:
            draw(name, PICTURES[name])


if __name__ == "__main__":
    main()
