"""`fivefold schedule`: draw and time a pipeline."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.check import check
from fivefold.cli.style import note, paint, shows_styles
from fivefold.config.flags import choice_meant
from fivefold.config.presets import resolve_model
from fivefold.config.settings import argument, option, settings_of
from fivefold.config.sources import load_options
from fivefold.counts.derived import as_table
from fivefold.errors import ConfigError, Mistake, Mistakes
from fivefold.files import telling_unwritable, write_atomic
from fivefold.mesh.degrees import DEGREES
from fivefold.pipeline.costs.costs import times_problem
from fivefold.pipeline.costs.measured import measured_program, median_costs, read_measured
from fivefold.pipeline.costs.parts import joined, read_costs
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.draw.figures import comparison, comparison_json, figures, listing, report
from fivefold.pipeline.draw.html import to_html
from fivefold.pipeline.draw.study import (
    AUTO,
    Study,
    StudyResult,
    compare,
    measured_results,
    run_schedule,
    timed,
)
from fivefold.pipeline.draw.svg import to_svg
from fivefold.pipeline.draw.text import picture
from fivefold.pipeline.exchange import read_csv, to_csv, to_torch_csv, to_trace
from fivefold.pipeline.ir import Program
from fivefold.pipeline.rules import read_choice
from fivefold.pipeline.schedules.registry import SCHEDULES
from fivefold.pipeline.split.balance_study import Cut, cut_figures, cut_lines, cut_model
from fivefold.report.settings import run_config
from fivefold.train.folder.run_folder import RunFolder
from fivefold.units import wrapped

if TYPE_CHECKING:
    from fivefold.pipeline.costs.measured_parts import MeasuredPieces

PLAIN_WIDTH = 120  # characters per line of a picture that is not shown on a terminal
MOST, LONG = 1 << 18, 1 << 13  # stages x microbatches: at most; that take seconds to compare
WIDEST, MOST_GIB, LONGEST_SEQUENCE = 10_000, 1e9, 1 << 40
_OF_A_MODEL = ("layout", "layer_costs", "measured", "memory_gib", "seq_length")
_DRAWN = ("svg", "html", "csv", "torch_csv", "trace", "width", "dx_first")
_MORE = (
    "     fivefold schedule zb_v --stages 8 --microbatches 24 --html zb_v.html",
    "     fivefold schedule --compare --stages 8 --microbatches 24 --costs 1,1.2,0.8 --latency 0.1",
)
_ROW = "each row is a rank, time runs to the right; - continues an action, . is idle"
_COLUMNS = (
    "V: stages per rank. makespan: first start to last end; * is the best. dX first: makespan if",
    "each dX is sent before its dW is computed, as in training. bubble: idle share. span: longest",
    "time of one rank. held: most microbatches in flight on a rank. bound: no schedule is faster.",
)


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
    stages: int = option(4, "pipeline ranks (P), each with --chunks stages")
    microbatches: int | None = option(
        None, "microbatches of a step (M); default: 8, or twice the ranks if that is more"
    )
    chunks: int | None = option(None, "stages per rank (default: what the schedule needs)")
    costs: str = option("1,1,1", "times F,B,W of a rank for a microbatch: forward, dX and dW")
    latency: float | None = option(
        None,
        "time of a message from one rank to the next (default: 0, with --measured that of the run)",
    )
    memory_cap: float | None = option(
        None, "most microbatches a rank may hold for backward; in one of V stages each counts 1/V"
    )
    slices: int = option(1, "causal slices of each sequence (sliced_1f1b)")
    dx_first: bool = option(False, "send each dX before its dW is computed, as training does")
    compare: bool = option(False, "print a table of all schedules on the same pipeline")
    json: bool = option(False, "print the figures as JSON")
    balance: str | None = option(
        None, "cut this model (a preset, or the path of a config.json) into stages of equal times"
    )
    layout: str | None = option(None, "with --balance: evaluate this layout instead of cutting")
    layer_costs: str | None = option(
        None,
        "with --balance: relative costs such as dense=0.55,moe=1,mtp=1.8,head=0.7, where --costs "
        "are times at cost 1; by default costs follow from FLOPs, and --costs are a rank's mean",
    )
    measured: str | None = option(
        None,
        "with --balance: run folder of fivefold train --profile with such layers, to take measured "
        "times from instead of --costs",
    )
    seq_length: int = option(4096, "with --balance: tokens of a microbatch")
    memory_gib: float | None = option(
        None, "with --balance: memory limit of a rank, at 18 bytes per parameter"
    )
    width: int | None = option(None, "width of the picture in characters (default: the terminal's)")
    svg: str | None = option(None, "write a picture to this file")
    html: str | None = option(None, "write an interactive page to this file")
    csv: str | None = option(None, "write every pipeline action and its times to this file")
    torch_csv: str | None = option(
        None, "write the schedule to this file in the format of torch.distributed.pipelining"
    )
    trace: str | None = option(None, "write a trace for chrome://tracing or Perfetto to this file")


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    try:
        return _run(options)
    except ConfigError as error:
        raise error.spelled(_as_typed) from error


def _as_typed(choice: str) -> tuple[str, ...]:
    """The flags to suggest for a choice of values that a schedule offers."""
    kind, value = read_choice(choice)
    match kind:
        case "microbatches" | "groups":
            return (f"--microbatches {value}",)
        case "ranks":
            return (f"--stages {value}",)
        case "slices":
            return (f"--slices {value}",)
        case "cap":
            return (f"--memory-cap {value}",)
        case "shape":
            return ()
    return () if choice.startswith("--microbatch-group-size") else (choice,)


def _run(options: Options) -> int:
    study = _study(options)
    measured = _measured(options)
    if measured and options.latency is None:
        study = replace(study, hop=measured.hop)
    cut = _cut(options, study, measured)
    if cut:
        placement, stages = cut.balance.split.placement, cut.stages
        times = study.times
        if measured:
            whole = joined(stages)
            ranks = study.num_ranks
            times = (whole.f / ranks, whole.b / ranks, whole.w / ranks)
        study = replace(study, placement=placement, stages=stages, times=times)
        alone = options.name is None and not options.compare
        if alone and options.json:
            print(json.dumps(cut_figures(cut), indent=2))
        elif not options.json:
            derived = [] if measured is None else [*measured.lines(), ""]
            print("\n".join([*derived, *cut_lines(cut), *([] if alone else [""])]))
        if alone:
            return 0
    if options.compare:
        if study.num_ranks * study.num_microbatches >= LONG:
            note(f"times {len(SCHEDULES) + 1} schedules, of {_heading(study)}")
        found = list(compare(study))
        _write(options, [result.chart for _, result in found if isinstance(result, StudyResult)])
        if options.json:
            print(json.dumps(comparison_json(found), indent=2))
        else:
            print("\n".join([_heading(study), "", *comparison(found), "", *_COLUMNS]))
        return 0
    if options.name is None:
        print("\n".join([*listing(), "", "try: fivefold schedule 1f1b", *_MORE]))
        return 0
    results = _results(options, study)
    _write(options, [result.chart for result in results])
    if options.json:
        every = [figures(result) for result in results]
        print(json.dumps(every[0] if len(every) == 1 else every, indent=2))
    else:
        print("\n".join(line for result in results for line in _shown(options, study, result)))
    return 0


def _study(options: Options) -> Study:
    """The study that the options ask for, checked."""
    mistakes = Mistakes()
    for flag, value in (
        ("--stages", options.stages),
        ("--microbatches", options.microbatches),
        ("--chunks", options.chunks),
        ("--slices", options.slices),
        ("--width", options.width),
    ):
        if value is not None and value < 1:
            mistakes.add(f"{flag} must be at least 1, not {value}")
    microbatches = options.microbatches or max(8, 2 * options.stages)
    work = options.stages * (options.chunks or 2) * microbatches * options.slices
    if work > MOST:
        cut = f" x --slices {options.slices}" if options.slices > 1 else ""
        mistakes.add(
            f"{work:,} forwards in a step are too many to draw",
            f"--stages {options.stages} x --chunks {options.chunks or 2} x --microbatches "
            f"{microbatches}{cut}, at most {MOST:,}",
        )
    if options.width is not None and options.width > WIDEST:
        mistakes.add(f"--width must be at most {WIDEST:,}, not {options.width:,}")
    if options.memory_cap is not None and options.memory_cap <= 0:
        mistakes.add(f"--memory-cap must be positive, not {options.memory_cap:g}")
    if options.memory_gib is not None and not 0 < options.memory_gib <= MOST_GIB:
        mistakes.add(f"--memory-gib must be in (0, {MOST_GIB:,.0f}], not {options.memory_gib:g}")
    if not 1 <= options.seq_length <= LONGEST_SEQUENCE:
        mistakes.add(f"--seq-length must be in 1 .. {LONGEST_SEQUENCE:,}, not {options.seq_length}")
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
    """Add what is asked for and would not be shown."""
    if options.name is None and not options.compare:
        for setting in settings_of(Options):
            unused = setting.name in _DRAWN or (
                options.balance is None and setting.name not in _OF_A_MODEL
            )
            if unused and getattr(options, setting.name) != setting.default:
                works = ("1f1b",) if setting.name in ("csv", "torch_csv") else ("1f1b", "--compare")
                mistakes.add(f"{setting.flag} is of a schedule, and none is named", works=works)
    if options.compare and options.name is not None and options.balance is None:
        what = f"--compare shows all schedules, not {options.name} alone"
        mistakes.add(what, works=("--no-compare",))
    if options.compare and options.dx_first:
        mistakes.add("--compare shows both orders of dX and dW", works=("--no-dx-first",))


def _times(options: Options, mistakes: Mistakes) -> tuple[float, float, float]:
    """The times of --costs, checked together with --latency."""
    latency = options.latency or 0.0
    if not latency >= 0:
        mistakes.add(f"--latency must be 0 or more, not {latency:g}")
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
    elif problem := times_problem((forward, dx, dw, abs(latency))):
        mistakes.add(f"--latency {latency:g} and --costs {options.costs}: {problem}")
    return forward, dx, dw


def _measured(options: Options) -> "MeasuredPieces | None":
    """The times of layers, embedding and head fitted to a profiled run, if one is given."""
    if options.measured is None or options.balance is None:
        return None
    if options.layer_costs is not None or options.costs != Options.costs:
        raise ConfigError("--measured gives all costs: leave out --layer-costs and --costs")
    # These imports load numpy, which nothing else in this command needs.
    from fivefold.pipeline.costs.measured_parts import check_same_pieces, measured_pieces

    folder = Path(options.measured)
    config = run_config(folder, RunFolder(folder).profile)
    world = prod(getattr(config.parallel, name) for name in DEGREES.values())
    layout = check(config, world, planned=True)
    check_same_pieces(config.model, resolve_model(options.balance))
    program, simulation = measured_program(read_measured(folder))
    if program.placement != layout.order().program().placement:
        what = f"{folder} was profiled with other stages than those of its settings"
        raise ConfigError(Mistake(what, attempt="a profiled run: fivefold train --profile"))
    stages = layout.split.stages
    return measured_pieces(config.model, stages, median_costs(program, simulation))


def _cut(options: Options, study: Study, measured: "MeasuredPieces | None") -> Cut | None:
    """The cut of the model of --balance into stages, if one is given."""
    if options.balance is None:
        about_a_model = (s for s in settings_of(Options) if s.name in _OF_A_MODEL)
        given = [s.flag for s in about_a_model if getattr(options, s.name) != s.default]
        if given:
            what = f"{' and '.join(given)} needs a model, and there is no --balance"
            if options.measured is not None:  # of which most models have other layers
                attempt = "--balance MODEL, whose layers are those of the run"
                raise ConfigError(Mistake(what, attempt=attempt))
            raise ConfigError(Mistake(what, works=("--balance deepseek-v3",)))
        return None
    return cut_model(
        resolve_model(options.balance),
        study,
        schedule=_schedule_name(options.name or ""),
        layout=options.layout,
        costs=None if options.layer_costs is None else read_costs(options.layer_costs),
        measured=None if measured is None else measured.kinds,
        seq_length=options.seq_length,
        memory=inf if options.memory_gib is None else options.memory_gib * 2**30,
    )


def _results(options: Options, study: Study) -> list[StudyResult]:
    """One result for a schedule or a file; for a run, the measured and the simulated one."""
    assert options.name is not None
    path = Path(options.name)
    if path.is_dir() or path.suffix == ".jsonl":
        return measured_results(read_measured(path), path.resolve().name)
    if path.suffix == ".csv" or path.is_file():
        program = read_csv(path)
        return [timed(_resized(study, program), program, path.name, dx_first=options.dx_first)]
    name = _schedule_name(options.name)
    if name not in (*SCHEDULES, AUTO):
        close = choice_meant("pipeline_schedule", name, (*SCHEDULES, AUTO))
        raise ConfigError(
            Mistake(
                f"unknown schedule {options.name!r}{close}",
                works=(*SCHEDULES, AUTO, "the path of a .csv file", "the folder of a profiled run"),
            )
        )
    return [run_schedule(study, name, dx_first=options.dx_first)]


def _schedule_name(name: str) -> str:
    return name.lower().replace("-", "_")


def _resized(study: Study, program: Program) -> Study:
    """The study with the ranks, stages and microbatches of a program read from a file."""
    return replace(
        study,
        num_ranks=program.num_ranks,
        num_microbatches=program.num_microbatches,
        num_chunks=None,
    )


def _write(options: Options, charts: Sequence[Chart]) -> None:
    if (options.csv or options.torch_csv) and len(charts) != 1:
        raise ConfigError("--csv and --torch-csv write one schedule, here are several")
    for name, text in (
        (options.svg, lambda: to_svg(charts)),
        (options.html, lambda: to_html(charts)),
        (options.csv, lambda: to_csv(charts[0])),
        (options.torch_csv, lambda: to_torch_csv(charts[0].program)),
        (options.trace, lambda: to_trace(charts)),
    ):
        if name is not None:
            with telling_unwritable(name):
                write_atomic(name, text())
            print(f"wrote {name}", file=sys.stderr)


def _shown(options: Options, study: Study, result: StudyResult) -> Iterator[str]:
    chart = result.chart
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else PLAIN_WIDTH
    width = options.width or terminal
    yield paint(chart.title, "bold", sys.stdout)
    if not chart.unit:
        yield _heading(_resized(study, chart.program))
    yield ""
    yield from picture(chart, width, colours=shows_styles(sys.stdout))
    yield ""
    yield from (line for part in (chart.legend, _ROW) for line in wrapped(part, width))
    yield ""
    yield as_table(report(result))
    yield ""


def _heading(study: Study) -> str:
    forward, dx, dw = study.times
    cap = "" if study.cap == inf else f", at most {study.cap:g} held"
    return (
        f"{study.num_ranks} ranks, {study.num_microbatches} microbatches, a rank's F {forward:g} "
        f"B {dx:g} W {dw:g}, latency {study.hop:g}{cap}"
    )
