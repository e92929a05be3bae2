"""How wide the planner's 80 % intervals must be for a publisher that it has never seen.

    python -m benchmarks.intervals [FILE.csv ...]

For each kind of run (dense in 16 bits, dense in 8 or 4 bits, experts) the errors of published runs
are pooled, each publisher counting alike however many rows it has. Printed are the half-width, as a
logarithm, that `predict/prediction.py` uses; and for each publisher the half-width that the others
alone would have given, with the share of its own rows that this holds: a publisher's own rows say
nothing about how wrong the planner is elsewhere. To hold four in five rows of a publisher beyond
these n, a half-width must hold (1 + 1/n) times as large a share of theirs, as in conformal
prediction; few publishers know nothing of the tails, so at most nine in ten.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import log
from pathlib import Path

from fivefold.published.score import Scored, report

DATA = Path(__file__).parent / "data"
FILES = [DATA / f"{name}_runs.csv" for name in ("published", "mpt", "bloom")]
HELD, MOST = 0.8, 0.9  # share of errors that an interval is to hold; largest that is asked of n
KINDS = {"bf16 dense": "dense", "fp8 dense": "narrow", "fp4 dense": "narrow"}


def errors_of(rows: Iterable[Scored]) -> dict[str, dict[str, list[float]]]:
    """Absolute logarithmic errors of each kind, by publisher: the first word of a source.

    Runs that the planner says are unusual, whose intervals are wider, are left out.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not row.prediction.notes:
            publisher = row.row.source.split()[0]
            found[KINDS.get(row.kind, row.kind)][publisher].append(abs(log(1 + row.error)))
    return found


def half_width(errors: Mapping[str, Sequence[float]]) -> float:
    """What holds four in five errors of one more publisher, if every publisher counts alike."""
    weighted = sorted((error, 1 / len(own)) for own in errors.values() for error in own)
    left = min(HELD * (1 + 1 / len(errors)), MOST) * len(errors)
    for error, weight in weighted:
        left -= weight
        if left <= 1e-9:
            return error
    return weighted[-1][0]


def main() -> None:
    """Print the half-widths, and each publisher's share of rows within that of the others."""
    paths = [Path(word) for word in sys.argv[1:]] or FILES
    rows = [row for path in paths for row in report(path).rows]
    for kind, errors in errors_of(rows).items():
        print(f"\n{kind}: {half_width(errors):.3f} of {len(errors)} publishers")
        print(f"  {'publisher':<24}{'rows':>6}{'of others':>11}{'holds':>8}")
        held = []
        for publisher, own in sorted(errors.items()):
            others = {name: rest for name, rest in errors.items() if name != publisher}
            if others:
                width = half_width(others)
                held.append(sum(error <= width for error in own) / len(own))
                print(f"  {publisher:<24}{len(own):>6}{width:>11.3f}{held[-1]:>8.0%}")
        if held:
            print(f"  mean over publishers {sum(held) / len(held):>24.0%}")


if __name__ == "__main__":
    main()
