"""Run the demo and draw what its terminal showed as an SVG, for the README.

python benchmarks/picture.py [--out docs/images/demo.svg]
"""

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import rich.console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 112


def main() -> None:
    """Run `examples/demo.sh` and save its output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "demo.svg")
    out = parser.parse_args().out
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", "examples/demo.sh"],
        cwd=ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(done.stdout)
    console = rich.console.Console(record=True, width=WIDTH, file=io.StringIO())
    for line in shorten(done.stdout.splitlines()):
        style = "bold green" if line.startswith("== ") else ""
        console.print(Text(line, style=style), overflow="ellipsis", no_wrap=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(out), title="make demo")


def shorten(lines: list[str]) -> list[str]:
    """Leave out most step lines: the first three and every tenth tell the story."""
    kept: list[str] = []
    for line in lines:
        step = line.split("/")[0].strip()
        if step.isdigit() and not (int(step) % 10 == 0 or int(step) <= 3):
            continue
        kept.append(line)
    return kept


if __name__ == "__main__":
    main()
