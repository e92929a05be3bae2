"""Fit the planner's constants of each kind of GPU to published runs, and cross-validate by source.

    python -m benchmarks.fit_planner [FILE.csv ...]

Fitted are, of each kind of silicon, the share of the peak that fused attention reaches, and of each
board of it, since boards differ in power, the shares of achievable rates that training keeps
(`sustained`, `sustained_narrow`), over dense rows; then, of each kind of host, the time of one
operation that it issues, over rows with experts. GB200 and GB300 have no dense row in bf16: they
are taken to keep there what H100 does. The loss is the mean absolute logarithmic error of a
publisher, and of these the mean over publishers. A long sweep counts little more than a short
table, and tables that are published again with each release count once; but a row or two say little
about their publisher, so one of n rows counts n / (n + 3). Regression tests, which run kernels that
are slower but deterministic, are not fitted, only shown. Nothing is fitted to a row or to a source.
Of several configurations that a row may mean, the fastest at the start counts.

Printed are the constants, to be written into fivefold/hardware.py and fivefold/predict/cluster.py,
and for every source its error with them, and with those that are fitted without its publisher; then
the runs that were published more than once, since no planner can be right about two times of one
run.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import fmean
from typing import Any

from fivefold.layout import Layout
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software
from fivefold.predict.step import predict
from fivefold.published.row import read_rows
from fivefold.published.score import prepare, score

DATA = [Path(__file__).parent / "data" / name for name in ("published_runs.csv", "mpt_runs.csv")]
Constants = Mapping[str, float]
Apply = Callable[[Constants], Callable[[Cluster], Cluster]]
SHARED = {"attention_forward": (0.15, 0.8)}  # by the boards of one silicon
OF_BOARD = {"sustained": (0.3, 1.0), "sustained_narrow": (0.3, 1.0)}
FEW = 3  # rows of a publisher that vary as much as publishers do
BACKWARD = 0.87  # of attention's forward rate, as published kernels reach it
HOST_RANGE = {"host_operation": (1e-6, 50e-6)}
STEPS = (1.1, 1.03, 1.01, 1.003)  # factors by which a constant is tried to change, coarse to fine
NUDGE = 1.02  # of a constant, to see what it moves
ROUNDS = 2  # of tangents and descent
# Boards of one silicon, by what names begin with; GB300 stands for B300, too, which has two rows.
FAMILIES = {
    "A100": ("A100",),
    "H100-96": ("H100-96",),
    "H": ("H",),
    "B": ("B200", "GB200", "GB300"),
}
HOSTS = ("H", "B", "GB")  # of one kind each, by what names of GPUs begin with
NO_BF16 = ("GB200", "GB300")


@dataclass(frozen=True)
class Run:
    """A published run, and the configuration that it is taken to be."""

    source: str
    layout: Layout
    cluster: Cluster
    software: Software
    measured: float
    has_experts: bool

    @property
    def family(self) -> str:
        """Kinds of GPU of the same silicon."""
        board = board_of(self.cluster)
        return next((name for name, boards in FAMILIES.items() if board in boards), board)

    @property
    def publisher(self) -> str:
        """Whose tables are not independent of each other: a source's first word."""
        return self.source.split()[0]

    @property
    def is_fitted(self) -> bool:
        """Whether it was meant to be fast."""
        return "CI" not in self.source.split()

    def log_error(self, changed: Callable[[Cluster], Cluster]) -> float:
        """Logarithm of the predicted time over the measured one."""
        time = predict(self.layout, changed(self.cluster), self.software).step_time
        return log(time / self.measured)


def board_of(cluster: Cluster) -> str:
    """Whose constants a cluster's GPU has."""
    name = cluster.gpu.name.replace("GB300", "B300").replace("B300", "GB300")
    known = [board for boards in FAMILIES.values() for board in boards]
    return next((board for board in known if name.startswith(board)), name)


def with_gpu(constants: Constants) -> Callable[[Cluster], Cluster]:
    """Puts other constants of its GPU into a cluster."""

    def changed(cluster: Cluster) -> Cluster:
        board = board_of(cluster)
        values: dict[str, Any] = {
            name: constants[f"{name} {board}"]
            for name in OF_BOARD
            if f"{name} {board}" in constants
        }
        forward = constants["attention_forward"]
        values |= {"attention_forward": forward, "attention_backward": BACKWARD * forward}
        return replace(cluster, gpu=replace(cluster.gpu, **values))

    return changed


def start_of(runs: Sequence[Run]) -> dict[str, float]:
    """The constants of the GPUs that some runs of a family used, as they are."""
    gpus = {board_of(run.cluster): run.cluster.gpu for run in runs}
    constants = {name: getattr(next(iter(gpus.values())), name) for name in SHARED}
    for board, gpu in gpus.items():
        fitted = [n for n in OF_BOARD if not (n == "sustained" and board in NO_BF16)]
        constants |= {f"{name} {board}": getattr(gpu, name) for name in fitted}
    return constants


def with_host(constants: Constants) -> Callable[[Cluster], Cluster]:
    """Puts another time of a host's operation into a cluster."""
    values: dict[str, Any] = dict(constants)
    return lambda cluster: replace(cluster, **values)


@dataclass(frozen=True)
class Tangent:
    """Predicted time over measured time of a run, near some constants.

    A step's time is a sum of times that are each in inverse proportion to a rate, so a tangent in
    the reciprocals of the rates holds far from where it touches; it breaks only where the larger of
    two times changes. The constants that are times or shares of time count as they are.
    """

    publisher: str
    ratio: float
    at: tuple[float, ...]
    slopes: tuple[float, ...]

    def log_error(self, coordinates: Sequence[float]) -> float:
        """At other constants."""
        moves = (x - own for x, own in zip(coordinates, self.at, strict=True))
        ratio = self.ratio + sum(s * move for s, move in zip(self.slopes, moves, strict=True))
        return abs(log(max(ratio, 1e-3)))


def coordinate(name: str, value: float) -> float:
    """In which the time of a step is nearly linear."""
    return value if name in HOST_RANGE else 1 / value


def tangent(run: Run, constants: Constants, apply: Apply) -> Tangent:
    """Where a run stands, and how each constant moves it."""
    ratio = exp(run.log_error(apply(constants)))
    at, slopes = [], []
    for name, value in constants.items():
        moved = exp(run.log_error(apply({**constants, name: value * NUDGE})))
        here = coordinate(name, value)
        at.append(here)
        slopes.append((moved - ratio) / (coordinate(name, value * NUDGE) - here))
    return Tangent(run.publisher, ratio, tuple(at), tuple(slopes))


def loss(tangents: Sequence[Tangent], constants: Constants) -> float:
    """Weighted mean over publishers of the mean absolute logarithmic error."""
    coordinates = [coordinate(name, value) for name, value in constants.items()]
    errors = defaultdict(list)
    for one in tangents:
        errors[one.publisher].append(one.log_error(coordinates))
    weights = [len(rows) / (len(rows) + FEW) for rows in errors.values()]
    return fmean(map(fmean, errors.values()), weights)


def descend(
    tangents: Sequence[Tangent], start: Constants, ranges: Mapping[str, tuple[float, float]]
) -> dict[str, float]:
    """The least loss, by moving one or two constants at a time with steps that shrink."""
    constants = dict(start)
    best = loss(tangents, constants)
    singles = [{name: sign} for name in ranges for sign in (1, -1)]
    pairs = [a | b for a in singles for b in singles if len(a | b) == 2]
    for step in STEPS:
        improved = True
        while improved:
            improved = False
            for move in singles + pairs:
                tried = dict(constants)
                for name, sign in move.items():
                    low, high = ranges[name]
                    tried[name] = min(high, max(low, tried[name] * step**sign))
                if (found := loss(tangents, tried)) < best - 1e-6:
                    constants, best, improved = tried, found, True
    return constants


def fit(
    runs: Sequence[Run],
    start: Constants,
    ranges: Mapping[str, tuple[float, float]],
    apply: Apply,
) -> tuple[dict[str, float], list[Tangent]]:
    """The constants, and the tangents at the place where the last descent began."""
    constants = dict(start)
    for _ in range(ROUNDS):
        tangents = [tangent(run, constants, apply) for run in runs if run.is_fitted]
        constants = descend(tangents, constants, ranges)
    return constants, tangents


def mape(runs: Sequence[Run], changed: Callable[[Cluster], Cluster]) -> float:
    """Mean absolute relative error."""
    return fmean(abs(exp(run.log_error(changed)) - 1) for run in runs)


def study(
    name: str,
    runs: Sequence[Run],
    start: Constants,
    ranges: Mapping[str, tuple[float, float]],
    apply: Apply,
) -> Constants:
    """Fit, print, and print every source's error with and without it; the constants."""
    fitted, tangents = fit(runs, start, ranges, apply)
    sources = sorted({run.source for run in runs})
    shown = ", ".join(f"{key} {value:.3g}" for key, value in fitted.items())
    print(f"\n{name}: {len(runs)} rows of {len(sources)} sources, {shown}", flush=True)
    print(f"  {'source':<28}{'rows':>5}{'before':>9}{'fitted':>9}{'left out':>10}", flush=True)
    for source in sources:
        own = [run for run in runs if run.source == source]
        rest = [one for one in tangents if one.publisher != own[0].publisher]
        errors = [f"{mape(own, apply(constants)):.1%}" for constants in (start, fitted)]
        errors.append(f"{mape(own, apply(descend(rest, fitted, ranges))):.1%}" if rest else "-")
        before, after, without = errors
        print(f"  {source[:27]:<28}{len(own):>5}{before:>9}{after:>9}{without:>10}", flush=True)
    return fitted


def print_repeated(runs: Sequence[Run]) -> None:
    """Runs of which every column but the time is the same, and the least error that leaves."""
    groups: dict[Any, list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.cluster, run.layout.config, run.software].append(run)
    least: dict[bool, list[float]] = defaultdict(list)
    print("\npublished more than once, longest over shortest time")
    for same in groups.values():
        times = [run.measured for run in same]
        if len(times) > 1:
            low, high = min(times), max(times)
            least[same[0].has_experts].append((high - low) / (high + low))
            places = ", ".join(sorted({run.source for run in same}))
            kind = " (experts)" if same[0].has_experts else ""
            print(f"  {high / low:.2f}  {same[0].cluster.name}{kind}: {places}")
    for experts, errors in sorted(least.items()):
        kind = "with experts" if experts else "dense"
        print(f"  least mean error, {kind}: {fmean(errors):.1%} of {len(errors)} runs")


def read(paths: Sequence[Path]) -> list[Run]:
    """The rows that can be predicted."""
    runs = []
    for case in prepare([row for path in paths for row in read_rows(path)])[0]:
        scored = score(case, with_memory=False)
        prediction = scored.prediction
        runs.append(
            Run(
                case.row.source,
                prediction.layout,
                prediction.cluster,
                prediction.software,
                scored.measured,
                scored.kind == "experts",
            )
        )
    return runs


def main() -> None:
    """Print constants, errors, and errors of sources that were left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, default=DATA, help="tables of runs")
    runs = read(parser.parse_args().files)
    changes: dict[str, Callable[[Cluster], Cluster]] = {}
    for family in sorted({run.family for run in runs}):
        dense = [run for run in runs if run.family == family and not run.has_experts]
        if dense:
            start, ranges = start_of(dense), SHARED | OF_BOARD
            limits = {name: ranges[name.split()[0]] for name in start}
            changes[family] = with_gpu(study(family, dense, start, limits, with_gpu))
    experts = [
        replace(run, cluster=changes[run.family](run.cluster)) if run.family in changes else run
        for run in runs
        if run.has_experts
    ]
    for kind in HOSTS:
        mine = [run for run in experts if run.cluster.gpu.name.startswith(kind)]
        if mine:
            host = {"host_operation": mine[0].cluster.host_operation}
            study(f"experts on {kind}", mine, host, HOST_RANGE, with_host)
    print_repeated(runs)


if __name__ == "__main__":
    main()
