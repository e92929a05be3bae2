"""Draws programs on an HTML page with zoom and details: what runs, when, and why a rank waits."""

from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any

from fivefold.pages import HELD, IDLE, LINE, QUIET, Tone, as_script, document
from fivefold.pipeline.draw.chart import COLOURS, HELD_MEANING, MEANINGS, Chart
from fivefold.pipeline.ir import Act
from fivefold.pipeline.simulate import Reason

_GAPS = {
    Reason.FILL: (IDLE, "its first input has not arrived"),
    Reason.DRAIN: (IDLE, "all its work is done"),
    Reason.UPSTREAM: (
        Tone("#f6d5d5", "#54282c"),
        "the rank that produces its input has not finished",
    ),
    Reason.STREAM: (
        Tone("#e3d3ee", "#43304f"),
        "its input is ready, but queued behind another message",
    ),
    Reason.IN_FLIGHT: (Tone("#fbe9c8", "#4f4120"), "its input is in flight"),
    Reason.READY: (Tone("#d9d9d9", "#3f434b"), "its input has arrived, but it has not started"),
}
_DIGITS = 7  # significant digits of a time


def to_html(charts: Sequence[Chart]) -> str:
    """A self-contained page that shows one or several programs."""
    title = charts[0].title if len(charts) == 1 else f"{len(charts)} pipelines"
    return document(title, timelines(charts))


def timelines(charts: Sequence[Chart]) -> Iterator[str]:
    """HTML that shows programs at one time scale; to be used once per page."""
    data = {
        "colours": COLOURS,
        "gaps": {reason: tone for reason, (tone, _) in _GAPS.items()},
        "tones": {"quiet": QUIET, "line": LINE},
        "held": [HELD, HELD_MEANING],
        "charts": [_chart(chart) for chart in charts],
    }
    page = files("fivefold.pipeline.draw").joinpath("timeline.html").read_text(encoding="utf-8")
    yield page.replace("/*DATA*/", as_script(data))


def _chart(chart: Chart) -> dict[str, Any]:
    simulation = chart.simulation
    critical = {(step.rank, step.act) for step in simulation.critical_path if step.act}
    rows: list[dict[str, Any]] = [
        {
            "acts": [
                {
                    "start": _rounded(timed.start),
                    "end": _rounded(timed.end),
                    "what": str(timed.act),
                    "critical": (rank, timed.act) in critical,
                    "kids": [_kid(chart, kid) for kid in timed.act.elementary],
                }
                for timed in row
            ],
            "gaps": [],
            "memory": [[_rounded(time), _rounded(held)] for time, held in chart.memory[rank]],
        }
        for rank, row in enumerate(simulation.timeline)
    ]
    for gap in simulation.gaps:
        rows[gap.rank]["gaps"].append(
            {
                "start": _rounded(gap.start),
                "end": _rounded(gap.end),
                "reason": gap.reason,
                "why": _GAPS[gap.reason][1],
            }
        )
    return {
        "title": chart.title,
        "figures": chart.figures,
        "legend": {kind: MEANINGS[kind] for kind in chart.parts},
        "note": chart.note,
        "unit": chart.unit,
        "makespan": simulation.makespan,
        "highest": max(chart.peaks) or 1.0,
        "rows": rows,
    }


def _kid(chart: Chart, act: Act) -> dict[str, Any]:
    return {"kind": act.kind, "chunk": chart.chunk(act), "label": chart.label(act)}


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
