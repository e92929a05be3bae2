"""The flags of `fivefold schedule`, and the study that they ask for."""

from dataclasses import dataclass
from math import inf
from typing import Annotated

from fivefold.config.settings import (
    Allowed,
    Count,
    NonNegative,
    Positive,
    argument,
    changed,
    option,
)
from fivefold.errors import Mistakes
from fivefold.pipeline.costs.costs import times_problem
from fivefold.pipeline.draw.study import Study
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape

MOST = 1 << 18  # stages x microbatches
_CHUNKS = {Shape.LINE: 1, Shape.V: 2}  # stages per rank that a schedule needs
WIDEST, MOST_GIB, LONGEST = 10_000, 1e9, 1 << 40
Width = Annotated[int, Allowed(lambda v: 1 <= v <= WIDEST, f"in 1 .. {WIDEST:,}")]
Gib = Annotated[float, Allowed(lambda v: 0 < v <= MOST_GIB, f"in (0, {MOST_GIB:,.0f}]")]
Length = Annotated[int, Allowed(lambda v: 1 <= v <= LONGEST, f"in 1 .. {LONGEST:,}")]
OF_A_MODEL = ("layout", "layer_costs", "measured", "memory_gib", "seq_length")
_DRAWN = ("svg", "html", "csv", "torch_csv", "trace", "width", "dx_first")


@dataclass(frozen=True)
class Options:
    """Draw and time a pipeline schedule, or compare all of them.

    Times are in any unit. They are for all stages of a rank and one microbatch, so that schedules
    with one and with several stages per rank do the same work.
    """

    name: str | None = argument(
        "a schedule, auto (search for the best), a .csv file, or the folder of a profiled run; "
        "without it, the schedules are listed",
        None,
    )
    stages: Count = option(4, "pipeline ranks (P), each with --chunks stages")
    microbatches: Count | None = option(
        None, "microbatches of a step (M); default: 8, or twice the ranks if that is more"
    )
    chunks: Count | None = option(None, "stages per rank (default: what the schedule needs)")
    costs: str = option("1,1,1", "times F,B,W of a rank for a microbatch: forward, dX and dW")
    latency: NonNegative | None = option(
        None,
        "time of a message from one rank to the next (default: 0, with --measured that of the run)",
    )
    memory_cap: Positive | None = option(
        None, "most microbatches a rank may hold for backward; in one of V stages each counts 1/V"
    )
    slices: Count = option(1, "causal slices of each sequence (sliced_1f1b)")
    dx_first: bool = option(False, "send each dX before its dW is computed, as training does")
    compare: bool = option(False, "print a table of all schedules on the same pipeline")
    json: bool = option(False, "print the figures as JSON")
    balance: str | None = option(
        None, "cut this model (a preset, or the path of a config.json) into stages of equal times"
    )
    layout: str | None = option(None, "with --balance: evaluate this layout instead of cutting")
    layer_costs: str | None = option(
        None,
        "with --balance: relative costs such as dense=0.55,moe=1,mtp=1.8,head=0.7; --costs are "
        "the times at cost 1 (default: costs from FLOPs, and --costs are a rank's mean)",
    )
    measured: str | None = option(
        None,
        "with --balance: take measured times from this run folder of fivefold train --profile, "
        "with the same kinds of layers, instead of --costs",
    )
    seq_length: Length = option(4096, "with --balance: tokens of a microbatch")
    memory_gib: Gib | None = option(
        None, "with --balance: memory limit of a rank, at 18 bytes per parameter"
    )
    width: Width | None = option(
        None, "width of the picture in characters (default: the terminal's)"
    )
    svg: str | None = option(None, "write a picture to this file")
    html: str | None = option(None, "write an interactive page to this file")
    csv: str | None = option(None, "write every pipeline action and its times to this file")
    torch_csv: str | None = option(
        None, "write the schedule to this file in the format of torch.distributed.pipelining"
    )
    trace: str | None = option(None, "write a trace for chrome://tracing or Perfetto to this file")


def asked_study(options: Options) -> Study:
    """The study that the options ask for, checked."""
    mistakes = Mistakes()
    microbatches = options.microbatches or max(8, 2 * options.stages)
    work = options.stages * (options.chunks or 2) * microbatches * options.slices
    if work > MOST:
        cut = f" x --slices {options.slices}" if options.slices > 1 else ""
        mistakes.add(
            f"{work:,} forwards in a step are too many to draw",
            f"--stages {options.stages} x --chunks {options.chunks or 2} x --microbatches "
            f"{microbatches}{cut}, at most {MOST:,}",
        )
    times = _times(options, mistakes)
    _check_used(options, mistakes)
    mistakes.raise_if_any()
    return Study(
        options.stages,
        microbatches,
        times,
        options.latency or 0.0,
        inf if options.memory_cap is None else options.memory_cap,
        options.chunks,
        options.slices,
    )


def _check_used(options: Options, mistakes: Mistakes) -> None:
    """Add options that would have no effect on the output."""
    if options.name is None and not options.compare:
        for setting in changed(options):
            of_a_model = options.balance is not None or setting.name in OF_A_MODEL
            if setting.name in _DRAWN or not of_a_model:
                works = ("1f1b",) if setting.name in ("csv", "torch_csv") else ("1f1b", "--compare")
                mistakes.add(f"{setting.flag} is of a schedule, and none is named", works=works)
    schedule = SCHEDULES.get(options.name or "")
    if schedule is not None and options.balance is None and options.chunks is not None:
        needs, chunks = _CHUNKS.get(schedule.shape), options.chunks
        if needs not in (None, chunks):
            what = f"the {options.name} schedule {schedule.shape.value}, and --chunks is {chunks}"
            fit = [
                name for name, of in SCHEDULES.items() if _CHUNKS.get(of.shape, chunks) == chunks
            ]
            mistakes.add(what, works=(f"--chunks {needs}", *fit))
    if options.compare and options.name is not None and options.balance is None:
        what = f"--compare shows all schedules, not {options.name} alone"
        mistakes.add(what, works=("--no-compare",))
    if options.compare and options.dx_first:
        mistakes.add("--compare shows both orders of dX and dW", works=("--no-dx-first",))


def _times(options: Options, mistakes: Mistakes) -> tuple[float, float, float]:
    """The times of --costs, checked together with --latency."""
    latency = options.latency or 0.0
    works = ("1,1,1", "18.5,18.1,9.3")
    try:
        forward, dx, dw = (float(text) for text in options.costs.split(","))
        if not (forward > 0 and dx > 0 and dw >= 0):
            raise ValueError
    except ValueError:
        mistakes.add(
            f"--costs must be three times F,B,W, not {options.costs!r}",
            "forward and dX are positive, dW may be 0",
            works=works,
        )
        return 1.0, 1.0, 1.0
    if problem := times_problem((forward, dx, dw)):
        mistakes.add(f"--costs {options.costs}: {problem}", works=works)
    elif problem := times_problem((forward, dx, dw, latency)):
        mistakes.add(f"--latency {latency:g} and --costs {options.costs}: {problem}")
    return forward, dx, dw
