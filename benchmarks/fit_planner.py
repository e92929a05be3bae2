"""Fit the planner's constants of each kind of GPU to published runs, and cross-validate by source.

    python -m benchmarks.fit_planner [FILE.csv]

Fitted are, of each kind of GPU, the shares of achievable rates that training keeps (`sustained`,
`sustained_narrow`, fused attention), by least absolute logarithmic error over the dense rows. A
source counts by the square root of its rows, so that a long sweep does not decide for all. Nothing
is fitted to a row or to a source. The result is printed, to be written into fivefold/hardware.py;
beside it the errors of every source when the constants are fitted without it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import log, sqrt
from pathlib import Path
from statistics import fmean

from fivefold.plan.cluster import Cluster
from fivefold.plan.published import Row, cluster_of, read_rows
from fivefold.plan.score import Case, prepare, score

DATA = Path(__file__).parent / "data" / "published_runs.csv"
Constants = Mapping[str, float]
FITTED = ("sustained", "sustained_narrow", "attention_forward")
BACKWARD = 0.82  # of attention's forward rate, as published kernels reach it
FACTORS = (0.93, 0.98, 1.02, 1.07)  # by which a constant is tried to change
FAMILIES = ("A100", "H100-96", "H", "B200", "B300")  # of one silicon each, by the start of the name


def family(case: Case) -> str:
    """Kinds of GPU that share their constants."""
    name = cluster_of(case.row).gpu.name
    return next((start for start in FAMILIES if name.removeprefix("G").startswith(start)), name)


def with_constants(cluster: Cluster, constants: Constants) -> Cluster:
    """The cluster with other constants."""
    backward = BACKWARD * constants["attention_forward"]
    gpu = replace(cluster.gpu, attention_backward=backward, **constants)
    return replace(cluster, gpu=gpu)


def loss(cases: Sequence[Case], constants: Constants) -> float:
    """Mean absolute logarithmic error, sources weighted by the square root of their rows."""
    hardware = _hardware(constants)
    count = Counter(case.row.source for case in cases)
    total = weights = 0.0
    for case in cases:
        weight = 1 / sqrt(count[case.row.source])
        scored = score(case, hardware, with_memory=False)
        total += weight * abs(log(1 + scored.error))
        weights += weight
    return total / weights


def _hardware(constants: Constants) -> Callable[[Row], Cluster]:
    return lambda row: with_constants(cluster_of(row), constants)


def start(case: Case) -> dict[str, float]:
    """The constants as they are now."""
    gpu = cluster_of(case.row).gpu
    return {name: getattr(gpu, name) for name in FITTED}


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """Coordinate descent from the present constants, over the rows of one kind of GPU."""
    constants = start(cases[0])
    best = loss(cases, constants)
    improved = True
    while improved:
        improved = False
        for name in FITTED:
            for factor in FACTORS:
                tried = constants | {name: constants[name] * factor}
                if 0.2 < tried[name] <= 1 and (found := loss(cases, tried)) < best - 1e-4:
                    constants, best, improved = tried, found, True
    return constants


def fixed(cases: Sequence[Case]) -> list[Case]:
    """The dense rows, each with the configuration that is now the fastest of those that fit."""
    chosen = []
    for case in cases:
        scored = score(case, with_memory=False)
        if not scored.kind.startswith("experts"):
            layout = scored.prediction.layout
            only = tuple(choice for choice in case.choices if choice.layout is layout)
            chosen.append(Case(case.row, only))
    return chosen


def main() -> None:
    """Print constants, errors, and errors of sources that were left out."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DATA
    cases, _ = prepare(read_rows(path))
    dense = fixed(cases)
    for name in sorted({family(case) for case in dense}):
        own = [case for case in dense if family(case) == name]
        constants = fit(own)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in constants.items())
        print(f"{name}: {len(own)} rows, error {loss(own, constants):.1%} with {shown}", flush=True)
        sources = sorted({case.row.source for case in own})
        for source in sources if len(sources) > 1 else ():
            inside = [case for case in own if case.row.source != source]
            outside = [case for case in own if case.row.source == source]
            hardware = _hardware(fit(inside))
            errors = [score(case, hardware, with_memory=False).error for case in outside]
            print(
                f"  left out {source}: {len(outside)} rows, MAPE {fmean(map(abs, errors)):.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
