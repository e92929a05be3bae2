"""A plan as one page that needs nothing else: timeline, memory and waterfall as inline SVG."""

from collections.abc import Iterator, Sequence
from html import escape

from fivefold.errors import ConfigError
from fivefold.pipeline.chart import Chart
from fivefold.pipeline.draw_svg import to_svg
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.simulate import simulate
from fivefold.plan import answer
from fivefold.plan.candidate import Candidate
from fivefold.plan.describe import summary
from fivefold.plan.memory import MemoryPrediction
from fivefold.plan.search import Result
from fivefold.plan.step import Prediction
from fivefold.units import human_bytes, human_count, human_seconds

MOST_ACTS = 6000  # that a timeline shows; longer programs show fewer microbatches
WIDTH = 940  # pixels of a picture
LABEL, ROW, BAR = 190, 22, 15
COLOURS = ("#3b75af", "#8fb8de", "#3a8f5c", "#93cca8", "#d9822b", "#f2c188", "#7b5ea7", "#b9a7d0")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.4em}h2{font-size:1.1em;margin-top:2em}pre{overflow-x:auto;font-size:12px;
line-height:1.45}.wide{overflow-x:auto;border:1px solid #ddd}small{color:#555}
@media(prefers-color-scheme:dark){body{background:#1b1b1b;color:#ddd}small{color:#aaa}
svg{background:#fff}}
""".strip()


def page(result: Result, tokens: float | None) -> str:
    """The page of a plan's best layout."""
    best = result.best
    assert best.prediction is not None
    model = human_count(answer.parameters(result))
    title = f"{model} parameters on {result.request.world:,} x {result.request.cluster.gpu.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _text(answer.question(result)),
        "<h2>The best layout</h2>",
        _text(answer.best(result)),
        "<h2>Where the time goes</h2>",
        waterfall(best.prediction),
        "<h2>Memory by pipeline rank</h2>",
        memory_bars(best.memory),
        *_timeline(best),
        "<h2>Layouts, the best of each mesh</h2>",
        _text([*answer.ranked(result, 20), "", answer.counts(result)]),
        "<h2>Why</h2>",
        _text(answer.explained(result)),
        "<h2>Time for memory</h2>",
        _text(answer.pareto(result)),
        "<h2>A whole run</h2>",
        _text(answer.cost_lines(result, tokens)),
    ]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            *parts,
            "</body></html>\n",
        ]
    )


def waterfall(prediction: Prediction) -> str:
    """Each part of a step as a bar that begins where the last one ended."""
    scale = (WIDTH - LABEL - 140) / prediction.step_time
    shown = [part for part in prediction.parts if abs(part.seconds) >= 5e-4 * prediction.step_time]
    rows: list[str] = []
    clock = 0.0
    for number, part in enumerate(shown):
        start, clock = clock, clock + part.seconds
        left = LABEL + min(start, clock) * scale
        share = f"{human_seconds(part.seconds)}  {part.seconds / prediction.step_time:.1%}"
        rows += _row(number, part.name)
        rows.append(_bar(left, number, abs(part.seconds) * scale, COLOURS[0 if not number else 4]))
        rows.append(_label(LABEL + max(start, clock) * scale + 6, number, share))
    rows += _row(len(shown), "step")
    rows.append(_bar(LABEL, len(shown), prediction.step_time * scale, COLOURS[2]))
    total = human_seconds(prediction.step_time)
    rows.append(_label(LABEL + prediction.step_time * scale + 6, len(shown), total))
    return _svg(rows, len(shown) + 1)


def memory_bars(memory: MemoryPrediction) -> str:
    """What the peak of each pipeline rank is made of, against what a device has."""
    names = list(dict.fromkeys(name for rank in memory.ranks for name in rank.parts))
    most = max(memory.capacity, memory.device_total)
    scale = (WIDTH - LABEL - 90) / most
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    rows: list[str] = []
    for number, rank in enumerate(memory.ranks):
        rows += _row(number, f"rank {rank.pp_rank}")
        left = float(LABEL)
        for name, size in rank.parts.items():
            told = f"{name}: {human_bytes(size)}"
            rows.append(_bar(left, number, size * scale, colours[name], told))
            left += size * scale
        rows.append(_label(left + 6, number, human_bytes(rank.peak)))
    count = len(memory.ranks)
    for size, what in (
        (memory.capacity - memory.reserved, "may be allocated"),
        (memory.capacity, "device"),
    ):
        x = LABEL + size * scale
        rows.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{count * ROW}" stroke="#b00" '
            f'stroke-dasharray="4 3"><title>{what}: {human_bytes(size)}</title></line>'
        )
    for number, name in enumerate(names):
        line, column = count + number // 4, number % 4
        x = 10 + column * (WIDTH - 20) / 4
        rows.append(_bar(x, line, 12, colours[name]))
        rows.append(_label(x + 18, line, name))
    return _svg(rows, count + -(-len(names) // 4))


def _timeline(best: Candidate) -> Iterator[str]:
    layout, prediction = best.layout, best.prediction
    assert prediction is not None
    if layout.grid.pp == 1:
        return
    acts = len(layout.split.stages) * 3
    wanted = layout.num_microbatches
    for count in (wanted, 4 * layout.grid.pp, 2 * layout.grid.pp, layout.grid.pp):
        if count > wanted or (count * acts > MOST_ACTS and count > layout.grid.pp):
            continue
        try:
            program = layout.compute_program(count)
        except ConfigError:
            continue
        program = executed(program, pairs=layout.overlaps_pairs, eager=layout.defers_weights)
        title = f"{layout.schedule}, {count:,} of {wanted:,} microbatches"
        chart = Chart(title, program, simulate(program, prediction.costs), unit="s")
        yield "<h2>The pipeline</h2>"
        yield f"<small>{escape(summary(layout))}</small>"
        yield f'<div class="wide">{to_svg([chart])}</div>'
        return


def _text(lines: Iterator[str] | Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _svg(rows: Sequence[str], count: int) -> str:
    height = count * ROW + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui,sans-serif" font-size="12" fill="#222">'
        + "\n".join(rows)
        + "</svg>"
    )


def _row(number: int, name: str) -> Iterator[str]:
    y = number * ROW + BAR
    yield f'<text x="{LABEL - 8}" y="{y}" text-anchor="end">{escape(name)}</text>'


def _label(x: float, number: int, text: str) -> str:
    return f'<text x="{x:.1f}" y="{number * ROW + BAR}">{escape(text)}</text>'


def _bar(x: float, number: int, width: float, colour: str, told: str = "") -> str:
    title = f"<title>{escape(told)}</title>" if told else ""
    return (
        f'<rect x="{x:.1f}" y="{number * ROW + 3}" width="{max(width, 0.5):.1f}" height="{BAR}" '
        f'fill="{colour}">{title}</rect>'
    )
