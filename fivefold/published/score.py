"""Scores the planner on published runs, against a model that assumes one MFU per kind of GPU."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import exp, hypot, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.predict.cluster import Cluster
from fivefold.predict.prediction import Prediction
from fivefold.predict.step import predict
from fivefold.published.frameworks.framework import Framework
from fivefold.published.memory import published_fits, published_peak
from fivefold.published.row import PublishedRow, cluster_of, read_rows
from fivefold.published.runs import (
    Choice,
    measured_bytes,
    measured_seconds,
    ran_out_of_memory,
    row_layouts,
    software_of,
)

TIE = 0.05  # difference below which two measured rates are as good: the noise of published runs
MEMORY_DOUBT = 1.2  # a run that succeeded may have a predicted need of this much of the memory


@dataclass(frozen=True)
class Case:
    """A row that can be predicted, with its possible configurations: those that fit, else all."""

    row: PublishedRow
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Scored:
    """A published run and its prediction.

    Attributes:
        row: row of the file.
        prediction: prediction for the fastest of its configurations that fit.
        measured: published step time, in seconds.
        complete: whether the row gives micro-batch size, stages and recomputation.
        memory: predicted and published memory in bytes; None if none was published.
    """

    row: PublishedRow
    prediction: Prediction
    measured: float
    complete: bool
    memory: tuple[float, float] | None

    @property
    def error(self) -> float:
        """Predicted time relative to the measured one, minus 1."""
        return self.prediction.step_time / self.measured - 1

    @property
    def covered(self) -> bool:
        """Whether the 80 % interval holds the measured time."""
        return self.prediction.low <= self.measured <= self.prediction.high

    @property
    def kind(self) -> str:
        """Kind of the run: bf16 dense, fp8 dense, fp4 dense, or experts."""
        if self.prediction.layout.config.model.num_experts:
            return "experts"
        return {"fp8": "fp8 dense", "fp4": "fp4 dense"}.get(
            self.prediction.layout.config.product_precision, "bf16 dense"
        )

    @property
    def predicted_rate(self) -> float:
        """Predicted tokens per second and GPU."""
        return self.prediction.tokens_per_second_per_gpu

    @property
    def measured_rate(self) -> float:
        """Measured tokens per second and GPU."""
        return self.predicted_rate * self.prediction.step_time / self.measured

    @property
    def measured_mfu(self) -> float:
        """Model FLOPs in the measured time, relative to the peak of the precision."""
        return self.prediction.mfu * self.prediction.step_time / self.measured


@dataclass(frozen=True)
class Summary:
    """Errors of some rows; times are relative, 0.05 is 5 %."""

    rows: int
    mape: float
    worst: float
    bias: float
    null_mape: float
    coverage: float
    memory_mape: float | None


@dataclass(frozen=True)
class Ranking:
    """How well the planner orders the sweeps of a source: runs of one model on one kind of GPU.

    Attributes:
        source: name of the source.
        sweeps: number of sweeps, of at least three runs each.
        pairs: number of pairs of runs in the same sweep that differ by more than `TIE`.
        tau: Kendall's tau over these pairs, for predicted and measured tokens per second and GPU.
        regret: largest share by which the planner's first run of a sweep is slower than the best.
    """

    source: str
    sweeps: int
    pairs: int
    tau: float
    regret: float


@dataclass(frozen=True)
class ScoreReport:
    """The score on a file of published runs.

    Attributes:
        rows: rows that could be predicted.
        skipped: rows that could not be predicted, with the reasons.
        failed: runs that ran out of memory, and whether this was predicted.
    """

    rows: tuple[Scored, ...]
    skipped: tuple[tuple[PublishedRow, str], ...]
    failed: tuple[tuple[PublishedRow, bool], ...]

    @cached_property
    def null_errors(self) -> dict[int, float]:
        """Relative errors by line if the median MFU of the same kind of GPU is assumed."""
        by_gpu: defaultdict[str, list[float]] = defaultdict(list)
        for row in self.rows:
            by_gpu[row.prediction.cluster.name].append(row.measured_mfu)
        return {
            row.row.line: row.measured_mfu / median(by_gpu[row.prediction.cluster.name]) - 1
            for row in self.rows
        }

    def summary(self, rows: Iterable[Scored]) -> Summary:
        """The errors of these rows, of which there is at least one."""
        rows = list(rows)
        errors = [row.error for row in rows]
        memory = [abs(m[0] / m[1] - 1) for row in rows if (m := row.memory)]
        return Summary(
            rows=len(rows),
            mape=fmean(map(abs, errors)),
            worst=max(errors, key=abs),
            bias=exp(fmean(log(1 + error) for error in errors)) - 1,
            null_mape=fmean(abs(self.null_errors[row.row.line]) for row in rows),
            coverage=fmean(row.covered for row in rows),
            memory_mape=fmean(memory) if memory else None,
        )

    def groups(self) -> dict[str, list[Scored]]:
        """Groups of rows: by source and completeness, then by kind, then all."""
        found: defaultdict[str, list[Scored]] = defaultdict(list)
        for row in self.rows:
            found[row.row.source + ("" if row.complete else ", open")].append(row)
        for row in self.rows:
            found[f"all {row.kind}, " + ("complete" if row.complete else "open")].append(row)
        if self.rows:
            found["all"] = list(self.rows)
        return dict(found)

    def rankings(self) -> list[Ranking]:
        """The rankings of all sources that have sweeps."""
        sweeps: defaultdict[str, defaultdict[tuple[str, ...], list[Scored]]]
        sweeps = defaultdict(lambda: defaultdict(list))
        for row in self.rows:
            key = tuple(row.row.cells[column].strip() for column in _SWEEP)
            sweeps[row.row.source][key].append(row)
        return [
            ranking(source, long)
            for source, found in sweeps.items()
            if (long := [rows for rows in found.values() if len(rows) >= 3])
        ]

    def table(self) -> str:
        """The score as text."""
        lines = [
            f"{'source':<40}{'rows':>5}{'MAPE':>8}{'worst':>8}{'bias':>8}{'null':>8}"
            f"{'in 80 %':>9}{'memory':>8}"
        ]
        for name, rows in self.groups().items():
            s = self.summary(rows)
            memory = "" if s.memory_mape is None else f"{s.memory_mape:.1%}"
            lines.append(
                f"{name[:39]:<40}{s.rows:>5}{s.mape:>8.1%}{s.worst:>+8.0%}{s.bias:>+8.1%}"
                f"{s.null_mape:>8.1%}{s.coverage:>9.0%}{memory:>8}"
            )
        rankings = self.rankings()
        if rankings:
            lines += [
                "",
                f"{'order of sweeps':<40}{'sweeps':>7}{'pairs':>7}{'tau':>7}{'regret':>8}",
            ]
            lines += [
                f"{r.source[:39]:<40}{r.sweeps:>7}{r.pairs:>7}{r.tau:>7.2f}{r.regret:>8.1%}"
                for r in rankings
            ]
        if self.failed:
            hits = sum(predicted for _, predicted in self.failed)
            lines += ["", f"out of memory: {hits} of {len(self.failed)} predicted"]
            lines += [
                f"  line {row.line}, {row.source}: {row.name} was predicted to fit"
                for row, predicted in self.failed
                if not predicted
            ]
        if self.skipped:
            lines += ["", "not used:"]
            lines += [f"  line {row.line}, {row.source}: {why}" for row, why in self.skipped]
        return "\n".join(lines)

    def as_json(self) -> str:
        """The score as JSON: summaries, rankings, and every row with the parts of its step."""
        return json.dumps(
            {
                "summaries": {n: vars(self.summary(rows)) for n, rows in self.groups().items()},
                "rankings": [vars(ranking) for ranking in self.rankings()],
                "rows": [_row_as_json(row) for row in self.rows],
                "out_of_memory": [
                    {"line": row.line, "source": row.source, "name": row.name, "predicted": hit}
                    for row, hit in self.failed
                ],
                "skipped": [{"line": row.line, "why": why} for row, why in self.skipped],
            },
            indent=1,
        )


def _row_as_json(row: Scored) -> dict[str, Any]:
    prediction = row.prediction
    return {
        "line": row.row.line,
        "source": row.row.source,
        "name": row.row.name,
        "complete": row.complete,
        "kind": row.kind,
        "measured_seconds": row.measured,
        "predicted_seconds": prediction.step_time,
        "interval": [prediction.low, prediction.high],
        "parts": {part.name: part.seconds for part in prediction.parts},
        "memory": row.memory,
    }


def report(path: Path) -> ScoreReport:
    """The score on a file of published runs.

    Args:
        path: path of a CSV with the columns of `row.COLUMNS`.

    Raises:
        DataError: the file cannot be read.
    """
    rows = read_rows(path)
    cases, skipped = prepare([row for row in rows if not ran_out_of_memory(row)])
    failed = []
    for row in filter(ran_out_of_memory, rows):
        try:
            failed.append((row, _predicts_failure(row, cluster_of(row))))
        except FivefoldError as error:
            skipped.append((row, str(error).splitlines()[0]))
    scored = tuple(score(case) for case in cases)
    return ScoreReport(scored, tuple(skipped), tuple(failed))


def _predicts_failure(row: PublishedRow, cluster: Cluster) -> bool:
    """Whether none of a row's possible configurations fits the memory."""
    return not any(published_fits(row, choice, cluster) for choice in row_layouts(row))


def prepare(
    rows: Sequence[PublishedRow],
) -> tuple[list[Case], list[tuple[PublishedRow, str]]]:
    """The rows that can be predicted, and the reasons for which the others cannot."""
    cases, skipped = [], []
    for row in rows:
        try:
            choices = row_layouts(row)
            measured_bytes(row)  # raises if the unit is unknown
            if measured_seconds(row, choices[0].layout) is None:
                skipped.append((row, "no time was published"))
                continue
            cases.append(Case(row, _that_fit(row, choices, cluster_of(row))))
        except FivefoldError as error:
            skipped.append((row, str(error).splitlines()[0]))
    return cases, skipped


def _that_fit(row: PublishedRow, choices: Sequence[Choice], cluster: Cluster) -> tuple[Choice, ...]:
    if len(choices) == 1:
        return tuple(choices)
    limit = MEMORY_DOUBT * cluster.gpu.memory_bytes
    peaks = [published_peak(row, choice, cluster).reported for choice in choices]
    fitting = [choice for choice, peak in zip(choices, peaks, strict=True) if peak <= limit]
    return tuple(fitting or choices)


def score(case: Case, *, with_memory: bool = True) -> Scored:
    """Predict a row; of several configurations, its authors are assumed to use the fastest.

    If the run can have been of several frameworks, the one in the middle counts, and the interval
    is wider by how far they are apart.
    """
    row, cluster = case.row, cluster_of(case.row)
    fastest: dict[Framework, tuple[Prediction, Choice]] = {}
    for choice in case.choices:
        found = predict(choice.layout, cluster, software_of(row, choice.framework))
        known = fastest.get(choice.framework)
        if known is None or found.step_time < known[0].step_time:
            fastest[choice.framework] = found, choice
    ordered = sorted(fastest.values(), key=lambda each: each[0].step_time)
    best, choice = ordered[(len(ordered) - 1) // 2]
    if len(ordered) > 1:
        time = best.step_time
        apart = max(abs(log(other.step_time / time)) for other, _ in ordered)
        width = hypot(log(best.high / time), apart)
        best = replace(best, low=time * exp(-width), high=time * exp(width))
    measured = measured_seconds(row, best.layout)
    assert measured is not None
    held = measured_bytes(row) if with_memory else None
    memory = None
    if held is not None:
        memory = published_peak(row, choice, cluster).reported, held
    return Scored(row, best, measured, choice.complete, memory)


_SWEEP = ("gpu", "model", "seq")


def ranking(source: str, sweeps: Sequence[Sequence[Scored]]) -> Ranking:
    """Kendall's tau over all pairs inside the sweeps, and the worst regret."""
    signs = [
        _sign(a.predicted_rate - b.predicted_rate) * _sign(a.measured_rate - b.measured_rate)
        for rows in sweeps
        for a, b in combinations(rows, 2)
        if abs(a.measured_rate - b.measured_rate) > TIE * max(a.measured_rate, b.measured_rate)
    ]
    regrets = []
    for rows in sweeps:
        chosen = max(rows, key=lambda row: row.predicted_rate)
        regrets.append(1 - chosen.measured_rate / max(row.measured_rate for row in rows))
    tau = fmean(signs) if signs else 1.0
    return Ranking(source, len(sweeps), len(signs), tau, max(regrets))


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
