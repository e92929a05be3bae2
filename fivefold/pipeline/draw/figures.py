"""The figures of scheduled pipelines, as text and as JSON."""

from collections.abc import Iterable
from typing import Any

from fivefold.errors import ConfigError
from fivefold.pipeline.draw.study import AUTO, StudyResult
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.steady_state import steady_state
from fivefold.units import table

_DIGITS = 9  # significant digits in JSON, to hide rounding noise


def figures(result: StudyResult) -> dict[str, Any]:
    """All figures of a schedule: times in the unit of its costs, bubbles as fractions of 1."""
    chart, program = result.chart, result.chart.program
    simulation, steady = chart.simulation, steady_state(program, result.costs)
    return {
        "schedule": result.name,
        "found": chart.title,
        "stages": program.num_ranks,
        "microbatches": program.num_microbatches,
        "chunks": result.chunks,
        "placement": list(program.placement),
        "flush_makespan": _rounded(simulation.makespan),
        "span": _rounded(simulation.span),
        "flush_bubble": _rounded(simulation.bubble),
        "span_bubble": _rounded(simulation.span_bubble),
        "dx_first_makespan": _rounded(result.dx_first),
        "lower_bound": _rounded(result.bound),
        "above_lower_bound": _rounded(simulation.makespan / result.bound - 1),
        "work": _rounded(simulation.busy),
        "peak_in_flight": _rounded(max(chart.peaks)),
        "peak_in_flight_by_rank": [_rounded(peak) for peak in chart.peaks],
        "peak_stages_in_flight_by_rank": [_rounded(peak) for peak in simulation.peaks],
        "idle": {str(reason): _rounded(time) for reason, time in simulation.idle.items()},
        "steady_state_per_microbatch": steady and _rounded(steady.per_microbatch),
    }


def report(result: StudyResult) -> list[tuple[str, str, str]]:
    """The figures of a schedule: (name, value, meaning)."""
    chart, simulation = result.chart, result.chart.simulation
    rows = [
        (
            "flush makespan",
            chart.said(simulation.makespan),
            "first start to last end over all ranks: a step that ends with a gradient norm",
        ),
        ("span", chart.said(simulation.span), "the longest of one rank, which papers report"),
        ("flush bubble", f"{simulation.bubble:.2%}", "idle share of the makespan"),
        ("span bubble", f"{simulation.span_bubble:.2%}", "idle share of the span"),
        (
            "lower bound",
            chart.said(result.bound),
            f"no schedule with these stages is faster; this one is "
            f"{simulation.makespan / result.bound - 1:.1%} above",
        ),
    ]
    if result.dx_first < simulation.makespan * (1 - 1e-9):
        why = "if each dX leaves before dW is computed, as in training (--dx-first)"
        rows.append(("dX first", chart.said(result.dx_first), why))
    peaks = " ".join(f"{peak:.3g}" for peak in chart.peaks)
    rows.append(
        ("peak in flight", f"{max(chart.peaks):.3g}", f"microbatches held, by rank: {peaks}")
    )
    total = sum(simulation.idle.values())
    idle = ", ".join(
        f"{reason} {time / total:.0%}"
        for reason, time in simulation.idle.items()
        if time > 0.005 * total
    )
    if idle:
        rows.append(("idle", chart.said(total / len(chart.peaks)), f"a rank on average: {idle}"))
    return rows


def comparison(results: Iterable[tuple[str, StudyResult | ConfigError]]) -> list[str]:
    """A table of schedules on the same pipeline, the fastest marked; errors of infeasible ones."""
    results = list(results)
    makespans = [r.chart.simulation.makespan for _, r in results if isinstance(r, StudyResult)]
    width = max(map(len, ("schedule", *(name for name, _ in results))))
    head = ("V", "makespan", "dX first", "bubble", "span", "bubble", "held", "bound")
    rows: list[tuple[str, ...]] = [("schedule".ljust(width), *head)]
    for name, result in results:
        if isinstance(result, ConfigError):
            continue
        simulation = result.chart.simulation
        best = simulation.makespan <= min(makespans) * (1 + 1e-9)
        rows.append(
            (
                name.ljust(width),
                f"{result.chunks}",
                f"{simulation.makespan:.6g}{'*' if best else ' '}",
                f"{result.dx_first:.6g}",
                f"{simulation.bubble:.2%}",
                f"{simulation.span:.6g}",
                f"{simulation.span_bubble:.2%}",
                f"{max(result.chart.peaks):.3g}",
                f"{result.bound:.6g}",
            )
        )
    first, *lines = table(rows, right=range(1, len(rows[0])))
    found = iter(lines)
    return [
        first,
        *(
            f"{name:<{width}}  cannot: {result.mistakes[0].what}"
            if isinstance(result, ConfigError)
            else next(found)
            for name, result in results
        ),
    ]


def comparison_json(
    results: Iterable[tuple[str, StudyResult | ConfigError]],
) -> list[dict[str, Any]]:
    """The same as JSON-serialisable values: the figures of each schedule, or its error."""
    return [
        figures(result)
        if isinstance(result, StudyResult)
        else {"schedule": name, "error": str(result)}
        for name, result in results
    ]


def listing() -> list[str]:
    """One line per schedule."""
    rows = [(name, schedule.about) for name, schedule in SCHEDULES.items()]
    rows.append((AUTO, "the best that a search finds for the costs and the memory cap"))
    return table(rows)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
