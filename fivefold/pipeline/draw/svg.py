"""Draws programs as SVG: one row per rank, with its activation memory below."""

from collections.abc import Iterator, Sequence
from statistics import median_low
from xml.sax.saxutils import escape

from fivefold.pages import HELD, IDLE, INK, LINE, PAPER, QUIET, rules
from fivefold.pipeline.draw.chart import COLOURS, HELD_MEANING, MEANINGS, Chart
from fivefold.pipeline.ir import Act
from fivefold.pipeline.simulate import Timed

# Pixels.
_LEFT, _RIGHT, _ROW, _MEMORY, _SPACE = 64, 24, 24, 14, 6
_HEAD, _FOOT, _LINE = 40, 44, 16  # above the first rank; below the last; a line of the legend
_CHARACTER = 6.2  # width of a label's character
_WORDS = 6.4  # maximum width of a character of titles, figures and legends
_LEAST, _MOST = 480, 6000  # width; labels that do not fit are omitted

_STYLE = (
    "text{font:10px ui-monospace,Menlo,Consolas,monospace;fill:#222}"
    ".t{font:bold 13px system-ui,sans-serif}.n{font:11px system-ui,sans-serif}"
    f".d{{fill:#fff}}.m{{fill:{HELD}}}"
) + rules(
    [
        (".p", "fill", PAPER),
        (".t", "fill", INK),
        (".n", "fill", QUIET),
        (".h", "fill", IDLE),
        (".g", "stroke", LINE),
    ]
)


def to_svg(charts: Sequence[Chart]) -> str:
    """A drawing of one or several programs, one below the other, at one time scale."""
    longest = max(chart.simulation.makespan for chart in charts)
    scale = min(max(map(_scale, charts)), _MOST / longest)
    heads = (len(text) * _WORDS for chart in charts for text in (chart.title, chart.figures))
    width = _LEFT + max(longest * scale, _LEAST, *heads) + _RIGHT
    body: list[str] = []
    top = 8.0
    for chart in charts:
        body += _chart(chart, scale, top, width)
        top += _height(chart, width)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top:.0f}" '
            f'viewBox="0 0 {width:.0f} {top:.0f}">',
            f'<style>{_STYLE}</style><rect class="p" width="100%" height="100%"/>',
            *body,
            "</svg>\n",
        ]
    )


def _scale(chart: Chart) -> float:
    """Pixels per unit of time, so that the label of the median action fits."""
    acts = [timed for row in chart.simulation.timeline for timed in row]
    label = max(len(chart.label(kid)) for timed in acts for kid in timed.act.elementary)
    return (label * _CHARACTER + 4) / median_low(timed.end - timed.start for timed in acts)


def _height(chart: Chart, width: float) -> float:
    rows = chart.program.num_ranks * (_ROW + _MEMORY + _SPACE)
    return _HEAD + rows + _FOOT + _LINE * (len(_legend_lines(chart, width)) - 1)


def _chart(chart: Chart, scale: float, top: float, whole: float) -> Iterator[str]:
    simulation = chart.simulation
    width, rows = simulation.makespan * scale, chart.program.num_ranks
    yield _text(_LEFT, top + 14, chart.title, "t")
    yield _text(_LEFT, top + 30, chart.figures, "n")
    first = top + _HEAD
    bottom = first + rows * (_ROW + _MEMORY + _SPACE)
    yield from _clock(chart, scale, first, bottom)
    highest = max(chart.peaks) or 1.0
    for rank, row in enumerate(simulation.timeline):
        y = first + rank * (_ROW + _MEMORY + _SPACE)
        yield _text(8, y + 15, f"rank {rank}", "n")
        yield f'<rect class="h" x="{_LEFT}" y="{y:.1f}" width="{width:.1f}" height="{_ROW}"/>'
        for timed in row:
            yield from _act(chart, timed, scale, y)
        yield _held(chart.memory[rank], simulation.makespan, scale, y + _ROW, highest)
    yield from _legend(chart, bottom + 26, whole)


def _act(chart: Chart, timed: Timed, scale: float, y: float) -> Iterator[str]:
    """A box per action; for an overlapped pair two half-height boxes."""
    x, width = _LEFT + timed.start * scale, (timed.end - timed.start) * scale
    kids = timed.act.elementary
    height = _ROW / len(kids)
    for place, kid in enumerate(kids):
        top = y + place * height
        shade = min(chart.chunk(kid), 1)
        yield (
            f'<rect x="{x:.2f}" y="{top:.1f}" width="{max(width - 0.6, 0.2):.2f}" '
            f'height="{height - 0.6:.1f}" fill="{COLOURS[kid.kind][shade]}">'
            f"<title>{escape(_tooltip(chart, timed, kid))}</title></rect>"
        )
        label = chart.label(kid)
        if len(label) * _CHARACTER + 2 <= width:
            kind = "" if shade else "d"
            middle = top + height / 2 + 3.5
            yield _text(x + (width - len(label) * _CHARACTER) / 2, middle, label, kind)


def _tooltip(chart: Chart, timed: Timed, act: Act) -> str:
    unit = chart.unit
    return f"{act}: {timed.start:.6g}{unit} to {timed.end:.6g}{unit}"


def _held(
    curve: Sequence[tuple[float, float]], makespan: float, scale: float, y: float, highest: float
) -> str:
    """A filled step curve of the activation memory; `highest` fills the whole strip."""
    base = y + _MEMORY
    path = [f"M{_LEFT} {base:.1f}"]
    for time, held in curve:
        path.append(f"H{_LEFT + time * scale:.2f}V{base - held / highest * (_MEMORY - 1):.2f}")
    path.append(f"H{_LEFT + makespan * scale:.2f}V{base:.1f}Z")
    return f'<path class="m" d="{"".join(path)}"/>'


def _clock(chart: Chart, scale: float, first: float, bottom: float) -> Iterator[str]:
    for time in chart.ticks(chart.simulation.makespan * scale / 60):
        x = _LEFT + time * scale
        yield f'<line class="g" x1="{x:.1f}" y1="{first}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
        yield _text(x, bottom + 10, f"{time:g}{chart.unit}", "n")


def _legend(chart: Chart, top: float, width: float) -> Iterator[str]:
    for number, line in enumerate(_legend_lines(chart, width)):
        x, y = float(_LEFT), top + number * _LINE
        for colour, text in line:
            if colour:
                yield f'<rect x="{x:.0f}" y="{y - 9}" width="11" height="11" fill="{colour}"/>'
            yield _text(x + 15 * bool(colour), y, text, "n")
            x += _entry_width(text)


def _legend_lines(chart: Chart, width: float) -> list[list[tuple[str, str]]]:
    """(colour, meaning) of each legend entry, wrapped to the width of the drawing."""
    entries = [(COLOURS[kind][0], f"{kind[0]} {MEANINGS[kind]}") for kind in chart.parts]
    entries.append((HELD, f"{HELD_MEANING}, at most {max(chart.peaks):.3g} on a rank"))
    if chart.note:
        entries.append(("", chart.note))
    lines: list[list[tuple[str, str]]] = [[]]
    x = float(_LEFT)
    for colour, text in entries:
        if lines[-1] and x + _entry_width(text) > width:
            lines.append([])
            x = float(_LEFT)
        lines[-1].append((colour, text))
        x += _entry_width(text)
    return lines


def _entry_width(text: str) -> float:
    return 30 + len(text) * _WORDS


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
