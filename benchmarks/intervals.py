"""How wide the planner's 80 % intervals must be for a publisher that it has never seen.

    python -m benchmarks.intervals [FILE.csv ...]

For each kind of run (dense in 16 bits, dense in 8 or 4 bits, experts) the error of a row is that of
its publisher, which all its rows share, and one of its own. Both spreads are estimated from
published runs, each publisher counting alike however many rows it has. The half-width of an
interval for one more publisher, as a logarithm, is then

    t(n - 1) sqrt((1 + 1/n) B + W)

for n publishers, B the mean square of their mean errors (a bias is an error, too), W the mean
variance within them, and t Student's quantile that leaves a tenth on each side: few publishers know
little of the next. `predict/prediction.py` has these half-widths.

Printed are, for each publisher, the half-width that the others alone would have given and the share
of its own rows that this holds; then the same for runs that took part in nothing.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import log, sqrt
from pathlib import Path
from statistics import NormalDist, fmean, pvariance

from fivefold.published.score import Scored, report

DATA = Path(__file__).parent / "data"
FILES = [DATA / f"{name}_runs.csv" for name in ("published", "mpt", "bloom")]
UNSEEN = DATA / "unseen_runs.csv"
HELD = 0.8  # share of errors that an interval is to hold
FEW = 3  # rows from which a publisher's variance is taken
KINDS = {"bf16 dense": "dense", "fp8 dense": "narrow", "fp4 dense": "narrow"}
Errors = Mapping[str, Sequence[float]]


def errors_of(rows: Iterable[Scored]) -> dict[str, dict[str, list[float]]]:
    """Logarithmic errors of each kind, by publisher: the first word of a source.

    Runs that the planner says are unusual, whose intervals are wider, are left out.
    """
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if not row.prediction.notes:
            publisher = row.row.source.split()[0]
            found[KINDS.get(row.kind, row.kind)][publisher].append(log(1 + row.error))
    return found


def quantile(degrees: int) -> float:
    """Student's quantile, by the first terms of its expansion around the normal one."""
    z = NormalDist().inv_cdf((1 + HELD) / 2)
    first = (z**3 + z) / 4 / degrees
    return z + first + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / degrees**2


def half_width(errors: Errors) -> float:
    """What holds four in five errors of one more publisher; there are at least two of them."""
    n = len(errors)
    between = fmean(fmean(own) ** 2 for own in errors.values())
    within = fmean(pvariance(own) for own in errors.values() if len(own) >= FEW)
    return quantile(n - 1) * sqrt(between * (1 + 1 / n) + within)


def print_held(errors: Errors, widths: Mapping[str, float]) -> None:
    """Print how many of each publisher's errors are within a half-width."""
    held = []
    print(f"  {'publisher':<24}{'rows':>6}{'bias':>8}{'width':>8}{'holds':>8}")
    for publisher, own in sorted(errors.items()):
        width = widths[publisher]
        held.append(fmean(abs(error) <= width for error in own))
        print(f"  {publisher:<24}{len(own):>6}{fmean(own):>+8.3f}{width:>8.3f}{held[-1]:>8.0%}")
    print(f"  mean over publishers {fmean(held):>33.0%}")


def main() -> None:
    """Print the half-widths, and what those of others hold of each publisher's rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="tables of runs")
    paths = parser.parse_args().files
    fitted = errors_of(row for path in paths for row in report(path).rows)
    unseen = errors_of(report(UNSEEN).rows)
    for kind, errors in fitted.items():
        width = half_width(errors)
        print(f"\n{kind}: {width:.3f} of {len(errors)} publishers")
        if len(errors) > 2:
            others = {
                publisher: half_width({k: v for k, v in errors.items() if k != publisher})
                for publisher in errors
            }
            print_held(errors, others)
        if kind in unseen:
            print(f"{kind}, of runs that took part in nothing")
            print_held(unseen[kind], dict.fromkeys(unseen[kind], width))


if __name__ == "__main__":
    main()
