"""A plan as a self-contained HTML page: time, memory by rank, the pipeline, the reasons."""

from collections.abc import Iterator, Sequence
from html import escape

from fivefold import pages
from fivefold.errors import ConfigError
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.draw.html import timelines
from fivefold.pipeline.simulate import simulate
from fivefold.predict.memory.peak import MemoryPrediction
from fivefold.predict.prediction import Prediction
from fivefold.search.candidate import Candidate
from fivefold.search.search import SearchResult
from fivefold.tell import answer, report
from fivefold.tell.describe import summary
from fivefold.tell.effects import effects
from fivefold.tell.explain import sensitivities
from fivefold.units import human_bytes, human_seconds

MOST_ACTS = 6000  # most pipeline actions in the timeline; it shows fewer microbatches if needed


def page(result: SearchResult, model: str, tokens: float | None) -> str:
    """The page of a plan's best layout.

    Args:
        result: what the search found.
        model: the name of the model.
        tokens: tokens of a whole run; None: those of the request's steps.
    """
    best = result.best
    title = answer.title(result, model)
    changes = sensitivities(result)
    head, *ranked = report.ranked(result, 20)
    sizes, *traded = report.traded(result)
    change, *effect = effects(result, changes)
    body = [
        f"<h1>{escape(title)}</h1>",
        pages.table(answer.answer(result)),
        "<h2>Why</h2>",
        pages.table(answer.reasons(result, changes)),
        "<h2>Where the time goes</h2>",
        *waterfall(best.predicted),
        "<h2>Memory by pipeline rank</h2>",
        *memory_bars(best.memory),
        *_timeline(best),
        "<h2>Layouts, the best of each mesh</h2>",
        pages.table(ranked, head, report.NUMBERS),
        _prose([report.counts(result)]),
        *_others(result),
        "<h2>Changes</h2>",
        pages.table(effect, change, (1,)),
        "<h2>Time for memory</h2>",
        pages.table(traded, sizes, (0, 1, 2)),
        "<h2>A whole run</h2>",
        _prose(report.cost_lines(result, tokens)),
    ]
    return pages.document(title, body)


def waterfall(prediction: Prediction) -> Iterator[str]:
    """The parts of the step time as bars, each beginning where the one before ends."""
    step = prediction.step_time
    clock = 0.0
    spans = []
    for part in prediction.parts:
        start, clock = clock, clock + part.seconds
        if abs(part.seconds) >= 5e-4 * step:
            spans.append((part.name, min(start, clock), part.seconds))
    longest = max([step, *(start + abs(seconds) for _, start, seconds in spans)])
    for name, start, seconds in (*spans, ("step", 0.0, step)):
        label = f"{human_seconds(seconds)}  {seconds / step:.1%}"
        drawn = pages.bar(start / longest, abs(seconds) / longest, pages.STEP[name], label)
        yield pages.row(name, [drawn], label)


def memory_bars(memory: MemoryPrediction) -> Iterator[str]:
    """The parts of each pipeline rank's peak memory as bars, with the memory of a device."""
    names = dict.fromkeys(name for rank in memory.ranks for name in rank.parts)
    room = memory.cluster.room
    limits = {
        f"may be allocated: {human_bytes(room)}": False,
        f"the device has {human_bytes(memory.capacity)}": True,
    }
    most = max(memory.capacity, memory.device_total)
    marks = [
        pages.mark(size / most, label, hard=hard)
        for size, (label, hard) in zip((room, memory.capacity), limits.items(), strict=True)
    ]
    for rank in memory.ranks:
        bars, left = [], 0.0
        for name, size in rank.parts.items():
            label = f"{name}: {human_bytes(size)}"
            bars.append(pages.bar(left / most, size / most, pages.MEMORY[name], label))
            left += size
        yield pages.row(f"rank {rank.pp_rank}", [*bars, *marks], human_bytes(rank.peak))
    yield pages.legend({name: pages.MEMORY[name] for name in names}, limits)


def _timeline(best: Candidate) -> Iterator[str]:
    layout = best.layout
    if layout.grid.pp == 1:
        return
    acts = len(layout.split.stages) * 3
    wanted = layout.num_microbatches
    for count in (wanted, 4 * layout.grid.pp, 2 * layout.grid.pp, layout.grid.pp):
        if count > wanted or (count * acts > MOST_ACTS and count > layout.grid.pp):
            continue
        try:
            program = layout.order(count).executed(
                pairs=layout.overlaps_pairs, eager=layout.sends_dx_first
            )
        except ConfigError:
            continue
        title = f"{layout.schedule}, {count:,} of {wanted:,} microbatches"
        chart = Chart(title, program, simulate(program, best.predicted.costs), unit="s")
        yield "<h2>The pipeline</h2>"
        yield f"<small>{escape(summary(layout))}</small>"
        yield from timelines([chart])
        return


def _prose(lines: Iterator[str] | Sequence[str]) -> str:
    return f'<pre class="prose">{escape(chr(10).join(lines))}</pre>'


def _others(result: SearchResult) -> Iterator[str]:
    """The layouts that were not chosen, and the kinds of context parallelism, if there are any."""
    if others := report.others(result):
        yield "<h2>Not chosen</h2>"
        yield pages.table(others, ("layout", "because"))
    if lines := list(report.context(result)):
        yield "<h2>Context parallelism</h2>"
        yield f"<pre>{escape(chr(10).join(lines))}</pre>"
