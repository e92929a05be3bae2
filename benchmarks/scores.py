"""The tables of the planner's errors on published runs, as pages quote them.

    python -m benchmarks.scores

What `fivefold plan --score FILE` prints of each file, as Markdown.
"""

import argparse
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from benchmarks.memory_tables import markdown
from fivefold.published.score import Scored, ScoreReport, Summary, report

DATA = Path(__file__).parent / "data"
FILES = ("published_runs", "mpt_runs", "bloom_runs", "unseen_runs")
_KINDS = {"bf16": "bf16", "fp8": "8-bit", "fp4": "4-bit"}
_COMPLETE = {"complete": "complete", "open": "configuration published in part"}


@cache
def scored(file: str) -> ScoreReport:
    """The score of a file of runs."""
    return report(DATA / f"{file}.csv")


def sources(file: str) -> str:
    """Markdown: the errors of each source of a file, and of each kind of row."""
    found = scored(file)
    rows = [_cells(name, found.summary(runs)) for name, runs in found.groups().items()]
    head = ("source", "rows", "MAPE", "worst", "bias", "null", "in 80 %", "memory")
    return markdown([head, *rows])


def _cells(name: str, s: Summary) -> tuple[str, ...]:
    shares = (f"{s.mape:.1%}", f"{s.worst:+.0%}", f"{s.bias:+.1%}", f"{s.null_mape:.1%}")
    memory = "" if s.memory_mape is None else f"{s.memory_mape:.1%}"
    return (name, f"{s.rows}", *shares, f"{s.coverage:.0%}", memory)


def sweeps() -> str:
    """Markdown: whether layouts that somebody compared are predicted in their order."""
    head = ("source", "sweeps", "pairs", "Kendall's tau", "worst regret")
    rankings = [ranking for file in FILES for ranking in scored(file).rankings()]
    rows = [
        (r.source, f"{r.sweeps}", f"{r.pairs}", f"{r.tau:.2f}", f"{r.regret:.1%}") for r in rankings
    ]
    return markdown([head, *rows])


def kinds() -> str:
    """Markdown: the errors of each kind of row of the published runs, the README's table."""
    found = scored("published_runs")
    rows = []
    for name, runs in found.groups().items():
        words = name.removeprefix("all").strip()
        if name.startswith("all "):
            kind, _, complete = words.partition(", ")
            precision = kind.partition(" ")[0]
            kind = kind if kind == "experts" else f"dense {_KINDS[precision]}"
            rows.append(_short(f"{kind}, {_COMPLETE[complete]}", found, runs))
    rows.sort()
    rows.append(_short("all", found, found.rows))
    for file, words in (
        ("bloom_runs", "BLOOM's candidates"),
        ("unseen_runs", "unseen sources and later releases"),
    ):
        rows.append(_short(f"{words}: no constant is fitted to them", scored(file), None))
    known = [row.memory for row in found.rows if row.memory is not None]
    memory = found.summary(found.rows).memory_mape
    rows.append(("peak memory, where it was published", f"{len(known)}", f"{memory:.1%}", "", ""))
    return markdown([("runs", "rows", "error", "one MFU", "in 80 %"), *rows])


def _short(name: str, found: ScoreReport, runs: Iterable[Scored] | None) -> tuple[str, ...]:
    s = found.summary(found.rows if runs is None else runs)
    return (name, f"{s.rows}", f"{s.mape:.1%}", f"{s.null_mape:.1%}", f"{s.coverage:.0%}")


def main() -> None:
    """Print all tables."""
    for file in FILES:
        print(f"{file}\n\n{sources(file)}\n")
    print(f"{kinds()}\n\n{sweeps()}")


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    main()
