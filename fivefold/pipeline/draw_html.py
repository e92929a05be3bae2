"""Programs as a page of their own: zoom, and hover to see what runs, when, and why a rank waits."""

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from fivefold.pipeline.chart import COLOURS, MEANINGS, Chart
from fivefold.pipeline.ir import Act
from fivefold.pipeline.simulate import Reason

_GAPS = {
    Reason.FILL: ("#f1f1f1", "nothing has arrived yet"),
    Reason.DRAIN: ("#f1f1f1", "all its work is done"),
    Reason.UPSTREAM: ("#f6d5d5", "the rank that makes what it needs is not ready"),
    Reason.STREAM: ("#e3d3ee", "what it needs is ready, another message is in its way"),
    Reason.IN_FLIGHT: ("#fbe9c8", "what it needs is on its way"),
    Reason.MEMORY: ("#d3e9ec", "activations are on their way to or from host memory"),
    Reason.READY: ("#d9d9d9", "what it needs is there, and it has not begun"),
}
_DIGITS = 7  # significant ones of a time


def to_html(charts: Sequence[Chart]) -> str:
    """A page without any other file, showing one or several programs."""
    data = {
        "colours": COLOURS,
        "gaps": {reason: colour for reason, (colour, _) in _GAPS.items()},
        "charts": [_chart(chart) for chart in charts],
    }
    # "</" would end the script.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    page = files("fivefold.pipeline").joinpath("timeline.html").read_text(encoding="utf-8")
    return page.replace("/*DATA*/", text)


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
