"""`make docs`: write the figures that pages quote, each by the command that makes it.

    python -m benchmarks.pages [NAME ...] [--check]

A block of a page stands between `<!-- figures: NAME -->` and `<!-- end -->`: a table, and below it
the command and the date. What is computed is computed again, and keeps its date if nothing changed.
What was measured comes from the latest file in `benchmarks/results/`, which the benchmark that is
named writes. --check changes nothing and says which blocks are out of date.
"""

import argparse
import datetime
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks import (
    experts,
    guides,
    host,
    long_context,
    memory_tables,
    packed_predictions,
    peers,
    scores,
)
from fivefold.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- figures: ([\w -]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class Figures:
    """What a block holds.

    Attributes:
        command: the command that prints or measures it.
        table: returns it as Markdown.
        measured: name of the results that it is read from; empty: it is computed.
        seconds: CPU seconds that this takes, about.
    """

    command: str
    table: Callable[[], str]
    measured: str = ""
    seconds: float = 1.0


def latest(name: str) -> Path:
    """The newest file of results of a benchmark."""
    return max(RESULTS.glob(f"{name}-2*.json"))


def _results(name: str) -> Any:
    return json.loads(latest(name).read_text(encoding="utf-8"))


FIGURES: Mapping[str, Figures] = MappingProxyType(
    {
        "decision guides": Figures("python -m benchmarks.guides", guides.table, seconds=60),
        "long sequences": Figures(
            "python -m benchmarks.long_context",
            lambda: long_context.planned("llama3-8b", "H100", 256),
            seconds=40,
        ),
        "bytes of context parallelism": Figures(
            "python -m benchmarks.long_context", lambda: long_context.volumes("llama3-8b")
        ),
        "activations": Figures(
            "python -m benchmarks.memory_tables",
            lambda: memory_tables.markdown(
                memory_tables.activation_rows(
                    memory_tables.MODEL, memory_tables.RANKS, memory_tables.LENGTH
                )
            ),
        ),
        "bytes of a parameter": Figures(
            "python -m benchmarks.memory_tables",
            lambda: memory_tables.markdown(
                memory_tables.parameter_rows(memory_tables.MODEL, memory_tables.RANKS)
            ),
        ),
        **{
            f"score of {file}": Figures(
                f"fivefold plan --score benchmarks/data/{file}.csv",
                partial(scores.sources, file),
                seconds=20,
            )
            for file in scores.FILES
        },
        "order of sweeps": Figures("python -m benchmarks.scores", scores.sweeps, seconds=60),
        "errors by kind": Figures("python -m benchmarks.scores", scores.kinds, seconds=60),
        "packed predictions": Figures(
            "python -m benchmarks.packed_predictions",
            lambda: packed_predictions.table(latest("gpu")),
        ),
        "peers": Figures(
            "python benchmarks/peers.py", lambda: peers.summary(_results("peers")), "peers"
        ),
        "experts": Figures(
            "python benchmarks/experts.py --rounds 3",
            lambda: experts.summary(_results("experts")),
            "experts",
        ),
        "host time": Figures(
            "python -m benchmarks.host", lambda: host.summary(_results("host")), "host"
        ),
    }
)


def pages() -> list[Path]:
    """The README and all pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def renewed(name: str, old: str, page: Path) -> str:
    """The lines of a block of a page, with the date of the old ones if nothing else changed."""
    figures = FIGURES[name]
    if figures.measured:
        file = latest(figures.measured)
        link = "../" * (len(page.relative_to(ROOT).parents) - 1) + f"benchmarks/results/{file.name}"
        made = f"[measured]({link}) by `{figures.command}`, {_dated(file.name)}"
    else:
        made = f"computed by `{figures.command}`, {datetime.date.today()}"
    new = f"{figures.table()}\n\n{made}\n"
    alike = DATE.sub("", new) == DATE.sub("", old)
    return old if alike and not figures.measured else new


def _dated(name: str) -> str:
    found = DATE.search(name)
    assert found is not None
    return found[0]


def blocks() -> list[tuple[Path, str, str]]:
    """Every block of the pages: the page, the block's name and its lines."""
    return [
        (page, match[2], match[3])
        for page in pages()
        for match in BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def write(page: Path, name: str, lines: str) -> None:
    """Put new lines into a block of a page."""
    text = page.read_text(encoding="utf-8")

    def with_lines(match: re.Match[str]) -> str:
        return match[1] + lines + match[4] if match[2] == name else match[0]

    write_atomic(page, BLOCK.sub(with_lines, text))


def main(argv: Sequence[str] | None = None) -> int:
    """Renew the blocks of the pages, or say which are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="blocks (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args(argv)
    if unknown := [name for name in asked.names if name not in FIGURES]:
        parser.error(f"no block {unknown[0]!r}: {', '.join(FIGURES)}")
    stale = 0
    for page, name, old in blocks():
        if asked.names and name not in asked.names:
            continue
        place = f"{page.relative_to(ROOT)}: {name}"
        new = renewed(name, old, page)
        if new == old:
            print(f"{place}: as it was")
            continue
        stale += 1
        print(f"{place}: out of date" if asked.check else f"{place}: written")
        if not asked.check:
            write(page, name, new)
    return 1 if asked.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
