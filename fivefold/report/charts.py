"""Charts over the steps of runs, drawn in the browser by uPlot (MIT licence), which is included."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import inf

from fivefold import pages
from fivefold.report.history import LAST, RunHistory, evaluated, validation_set

MOST_POINTS = 4000
"""Most steps that a line shows; of more, the means of equal stretches."""


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: what it shows.
        run: number of the run, which decides the colour.
        values: value by step.
        kind: `line`; `faint` beside its own mean; `points` if now and then.
    """

    name: str
    run: int
    values: Mapping[int, float]
    kind: str = "line"


@dataclass(frozen=True)
class StepChart:
    """Lines with a common unit.

    Attributes:
        title: what is shown.
        unit: its unit, or empty.
        lines: the lines.
    """

    title: str
    unit: str
    lines: Sequence[Line]


def charts_of(histories: Sequence[RunHistory]) -> list[StepChart]:
    """All charts for which a run has values; runs share each of them."""
    found = [StepChart("Loss", "", [*_losses(histories)])]
    for title, unit, name, factor in (
        ("Gradient norm", "", "grad_norm", 1.0),
        ("Learning rate", "", "lr", 1.0),
        ("Throughput", "tokens/s", "tokens_per_second", 1.0),
        ("MFU", "%", "mfu", 100.0),
        ("Time of a step", "s", "seconds", 1.0),
        ("Peak memory of the first rank", "GiB", "memory_bytes", 1 / 2**30),
        ("Tokens of the busiest expert, over the mean", "", "moe_imbalance", 1.0),
        ("Share of tokens that experts had no room for", "%", "moe_drop_rate", 100.0),
    ):
        lines = [
            Line(_named(history, histories, ""), run, values)
            for run, history in enumerate(histories)
            if any((values := {s: factor * v for s, v in history.values(name).items()}).values())
        ]
        found.append(StepChart(title, unit, lines))
    return [chart for chart in found if chart.lines]


def drawn(charts: Sequence[StepChart]) -> Iterator[str]:
    """HTML that draws charts at one scale of steps; to be used once per page."""
    data = {
        "runs": [list(pages.RUN), list(pages.OTHER_RUN)],
        "tones": {"ink": pages.INK, "quiet": pages.QUIET, "line": pages.LINE},
        "charts": [_data(chart) for chart in charts],
    }
    room = files("fivefold.report")
    style, library, page = (
        room.joinpath(name).read_text(encoding="utf-8")
        for name in ("uPlot.min.css", "uPlot.iife.min.js", "charts.html")
    )
    yield f"<style>{style}</style><script>{library}</script>"
    yield page.replace("/*DATA*/", pages.as_script(data))


def _named(history: RunHistory, histories: Sequence[RunHistory], name: str) -> str:
    """A line's label; contains the run's name only if there are two runs."""
    return " ".join([history.name] * (len(histories) > 1) + [name] * bool(name)) or history.name


def _losses(histories: Sequence[RunHistory]) -> Iterator[Line]:
    for run, history in enumerate(histories):
        for name, values, kind in _losses_of(history):
            if values:
                yield Line(_named(history, histories, name), run, values, kind)


def _losses_of(history: RunHistory) -> Iterator[tuple[str, Mapping[int, float], str]]:
    losses = history.values("loss")
    smooth = len(losses) > 3 * LAST
    yield "training", losses, "faint" if smooth else "line"
    if smooth:
        yield f"training, mean of {LAST} steps", _running(losses), "line"
    for name in evaluated(history.evaluations):
        label = f"validation{validation_set(name)}"
        yield label, history.values(name, history.evaluations), "points"


def _running(values: Mapping[int, float]) -> dict[int, float]:
    """The means of the last `LAST` values."""
    found, window, total = {}, [], 0.0
    for step, value in values.items():
        window.append(value)
        total += value
        if len(window) > LAST:
            total -= window.pop(0)
        found[step] = total / len(window)
    return found


def _data(chart: StepChart) -> dict[str, object]:
    lines = [(line, _thinned(line.values)) for line in chart.lines]
    steps = sorted({step for _, values in lines for step in values})
    return {
        "title": chart.title,
        "unit": chart.unit,
        "steps": steps,
        "lines": [
            {
                "name": line.name,
                "run": line.run,
                "kind": line.kind,
                "values": [_rounded(values.get(step)) for step in steps],
            }
            for line, values in lines
        ],
    }


def _thinned(values: Mapping[int, float]) -> dict[int, float]:
    size = -(-len(values) // MOST_POINTS)
    if size <= 1:
        return dict(values)
    steps = [*values]
    stretches = (steps[start : start + size] for start in range(0, len(steps), size))
    return {part[-1]: sum(values[step] for step in part) / len(part) for part in stretches}


def _rounded(value: float | None) -> float | None:
    return None if value is None or abs(value) == inf else float(f"{value:.6g}")
