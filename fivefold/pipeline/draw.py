"""A program as text: a row a rank, time to the right."""

from statistics import median_low
from string import ascii_lowercase

from fivefold.pipeline.costs import Costs
from fivefold.pipeline.ir import Act, Program
from fivefold.pipeline.simulate import Timed, simulate


def draw(program: Program, costs: Costs | None = None) -> str:
    """A picture of the compute acts against the clock, and a line of figures.

    A cell is `F3` (kind, microbatch), followed by a, b, c... for the chunk where a rank holds
    several, and by .0, .1... for the slice where sequences are cut; `F3&B1` is an overlapped pair.
    `-` continues an act and `.` is idle time. With `costs` None a forward takes one cell and a
    backward two; otherwise the median act takes one cell, and a shorter one may be cut off.
    """
    simulation = simulate(program, costs or Costs.uniform(program.num_stages))
    times = [timed.end - timed.start for row in simulation.timeline for timed in row]
    unit = median_low(times) if costs else 1.0 / program.num_slices
    chunk_of = {
        stage: chunk
        for rank in range(program.num_ranks)
        for chunk, stage in enumerate(program.stages_of(rank))
    }
    several = program.num_stages > program.num_ranks

    def label(act: Act) -> str:
        if act.kids:
            return "&".join(label(kid) for kid in act.kids)
        chunk = ascii_lowercase[chunk_of[act.stage] % 26] if several else ""
        piece = f".{act.slice}" if program.num_slices > 1 else ""
        return f"{act.kind[0]}{act.mb}{chunk}{piece}"

    labels = [[label(timed.act) for timed in row] for row in simulation.timeline]
    cells = max(
        (1 + len(text)) / max(timed.end - timed.start, unit)
        for row, texts in zip(simulation.timeline, labels, strict=True)
        for timed, text in zip(row, texts, strict=True)
    )
    margin = len(str(program.num_ranks - 1))
    lines = [
        f"rank {rank:>{margin}} " + _row(row, texts, cells)
        for rank, (row, texts) in enumerate(zip(simulation.timeline, labels, strict=True))
    ]
    peaks = " ".join(f"{peak:g}" for peak in simulation.peaks)
    lines.append(
        f"makespan {simulation.makespan:g}, span {simulation.span:g}, "
        f"bubble {simulation.bubble:.1%}, in flight {peaks}"
    )
    return "\n".join(lines)


def _row(row: tuple[Timed, ...], labels: list[str], cells: float) -> str:
    """The acts of one rank; `cells` is characters per unit of time."""
    text = ""
    for timed, label in zip(row, labels, strict=True):
        start, end = round(timed.start * cells), round(timed.end * cells)
        text = text.ljust(start, ".")[:start] + label.ljust(end - start, "-")[: end - start]
    return text
