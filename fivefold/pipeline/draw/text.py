"""Draws a program as text: one row per rank, time to the right."""

from collections.abc import Iterator
from itertools import groupby
from math import ceil
from statistics import median_low
from typing import NamedTuple

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.ir import Act, Kind, Program
from fivefold.pipeline.simulate import Timed, simulate

MAX_PANELS = 6  # maximum panels of a drawing; a longer one is compressed, without labels
_TICK = 12  # minimum number of characters between clock marks

# 256-colour terminal backgrounds: for a rank's first stage, for its other stages.
_BACKGROUNDS = {
    Kind.F: (25, 67),
    Kind.B: (28, 71),
    Kind.BW: (28, 71),
    Kind.W: (130, 172),
    Kind.FB: (91, 133),
    Kind.R: (240, 246),
}
_INK = 231


class _Cell(NamedTuple):
    """One character of a row, and the action it shows."""

    char: str
    act: Act | None


_IDLE = _Cell(".", None)


def draw(program: Program) -> str:
    """A drawing of the compute actions over time, and a line of figures.

    A label is `F3` (kind, microbatch), followed by a, b, c... for the stage if a rank holds
    several, and by .0, .1... for the slice if sequences are sliced; `F3&B1` is an overlapped pair.
    `-` continues an action and `.` is idle time. A forward takes one cell and a backward two.
    """
    simulation = simulate(program, Costs.uniform(program.num_stages))
    chart = Chart("", program, simulation)
    labels = _labels(chart, colours=False)
    scale = _scale(chart, labels, 1.0 / program.num_slices)
    lines = [
        name + "".join(cell.char for cell in _row(row, texts, scale))
        for name, row, texts in zip(_names(program), simulation.timeline, labels, strict=True)
    ]
    peaks = " ".join(f"{peak:g}" for peak in simulation.peaks)
    lines.append(
        f"makespan {simulation.makespan:g}, span {simulation.span:g}, "
        f"bubble {simulation.bubble:.1%}, in flight {peaks}"
    )
    return "\n".join(lines)


def picture(chart: Chart, width: int, *, colours: bool) -> list[str]:
    """The lines of a drawing no wider than `width` characters, with a clock.

    A long drawing is broken into panels, one below the other. One that would need more than
    `MAX_PANELS` is compressed into one panel, where each character is the kind of the action that
    runs at that time. With colours the background shows the kind, so labels omit it.
    """
    labels = _labels(chart, colours)
    timeline, makespan = chart.simulation.timeline, chart.simulation.makespan
    names = _names(chart.program)
    room = max(width - len(names[0]), 2 * _TICK)
    times = (timed.end - timed.start for row in timeline for timed in row)
    scale = _scale(chart, labels, median_low([time for time in times if time > 0] or [makespan]))
    if makespan * scale > MAX_PANELS * room:
        scale = room / makespan
        rows = [_sampled(row, scale, room) for row in timeline]
    else:
        rows = [_row(row, texts, scale) for row, texts in zip(timeline, labels, strict=True)]
    length = ceil(makespan * scale - 1e-9)
    rows = [row + [_IDLE] * (length - len(row)) for row in rows]
    lines: list[str] = []
    for start in range(0, length, room):
        if start:
            lines.append("")
        clock = _clock(chart, start, min(room, length - start), scale)
        lines.append(f"{'time':<{len(names[0])}}{clock}{chart.unit}".rstrip())
        lines += [
            name + _painted(row[start : start + room], chart, colours)
            for name, row in zip(names, rows, strict=True)
        ]
    return lines


def _names(program: Program) -> list[str]:
    margin = len(str(program.num_ranks - 1))
    return [f"rank {rank:>{margin}} " for rank in range(program.num_ranks)]


def _labels(chart: Chart, colours: bool) -> list[list[str]]:
    def text(act: Act) -> str:
        return "&".join(map(chart.place, act.elementary)) if colours else chart.label(act)

    return [[text(timed.act) for timed in row] for row in chart.simulation.timeline]


def _scale(chart: Chart, labels: list[list[str]], unit: float) -> float:
    """Characters per unit of time, so that labels fit into actions at least as long as `unit`;
    shorter ones may be cut off."""
    return max(
        (1 + len(text)) / max(timed.end - timed.start, unit)
        for row, texts in zip(chart.simulation.timeline, labels, strict=True)
        for timed, text in zip(row, texts, strict=True)
    )


def _row(row: tuple[Timed, ...], labels: list[str], scale: float) -> list[_Cell]:
    """The actions of one rank, up to its last; `scale` is characters per unit of time."""
    cells: list[_Cell] = []
    for timed, label in zip(row, labels, strict=True):
        start, end = round(timed.start * scale), round(timed.end * scale)
        cells = (cells + [_IDLE] * (start - len(cells)))[:start]
        cells += [_Cell(char, timed.act) for char in label.ljust(end - start, "-")[: end - start]]
    return cells


def _sampled(row: tuple[Timed, ...], scale: float, length: int) -> list[_Cell]:
    """The action that one rank runs at the middle of each character's time."""
    cells, acts = [], iter(row)
    timed = next(acts, None)
    for column in range(length):
        time = (column + 0.5) / scale
        while timed and timed.end <= time:
            timed = next(acts, None)
        running = timed and timed.start <= time
        cells.append(_Cell(timed.act.kind[0], timed.act) if timed and running else _IDLE)
    return cells


def _clock(chart: Chart, start: int, length: int, scale: float) -> str:
    """Round times at their columns, from column `start` of the picture."""
    text = ""
    for time in chart.ticks(chart.simulation.makespan * scale / _TICK):
        column = round(time * scale) - start
        if 0 <= column < length:
            text = text.ljust(column) + f"{time:g}"
    return text


def _painted(cells: list[_Cell], chart: Chart, colours: bool) -> str:
    if not colours:
        return "".join(cell.char for cell in cells)
    return "".join(_runs(cells, chart))


def _runs(cells: list[_Cell], chart: Chart) -> Iterator[str]:
    """Pieces of a row, each action on its background colour."""
    for act, group in groupby(cells, key=lambda cell: cell.act):
        text = "".join(cell.char for cell in group)
        if act is None:
            yield f"\033[2m{text}\033[0m"
        else:
            shade = _BACKGROUNDS[act.kind][min(chart.chunk(act), 1)]
            yield f"\033[48;5;{shade};38;5;{_INK}m{text.replace('-', ' ')}\033[0m"
