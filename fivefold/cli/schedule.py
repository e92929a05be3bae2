"""`fivefold schedule`: draw and time a pipeline."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, prod
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.check import check
from fivefold.cli.schedule_options import OF_A_MODEL, Options, asked_study
from fivefold.cli.style import note, paint, shows_styles
from fivefold.config.flags import choice_meant
from fivefold.config.presets import resolve_model
from fivefold.config.settings import changed
from fivefold.config.sources import load_options
from fivefold.counts.derived import as_table
from fivefold.errors import ConfigError, Mistake
from fivefold.files import telling_unwritable, write_atomic
from fivefold.mesh.degrees import DEGREES
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
LONG = 1 << 13  # stages x microbatches that take seconds to compare
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


def run(argv: Sequence[str]) -> int:
    """Run the command with the arguments that follow its name."""
    options = load_options(argv, Options)
    try:
        return _run(options)
    except ConfigError as error:
        raise error.spelled(_as_typed) from error


def _as_typed(choice: str) -> tuple[str, ...]:
    """The flags to suggest for values that a schedule offers."""
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
    study, measured = asked_study(options), _measured(options)
    if measured and options.latency is None:
        study = replace(study, hop=measured.hop)
    cut = _cut(options, study, measured)
    if cut is not None:
        alone = options.name is None and not options.compare
        if alone and options.json:
            print(json.dumps(cut_figures(cut), indent=2))
        elif not options.json:
            derived = [] if measured is None else [*measured.lines(), ""]
            print("\n".join([*derived, *cut_lines(cut), *([] if alone else [""])]))
        if alone:
            return 0
        study = _of_cut(study, cut, measured)
    if options.compare:
        _compare(options, study)
    elif options.name is None:
        print("\n".join([*listing(), "", "try: fivefold schedule 1f1b", *_MORE]))
    else:
        _draw(options, study, options.name)
    return 0


def _of_cut(study: Study, cut: Cut, measured: "MeasuredPieces | None") -> Study:
    """The study of a model's stages; measured times in its heading are means over ranks."""
    stages, times = cut.stages, study.times
    if measured:
        whole, ranks = joined(stages), study.num_ranks
        times = (whole.f / ranks, whole.b / ranks, whole.w / ranks)
    return replace(study, placement=cut.balance.split.placement, stages=stages, times=times)


def _compare(options: Options, study: Study) -> None:
    """Print a table of all schedules."""
    if study.num_ranks * study.num_microbatches >= LONG:
        note(f"times {len(SCHEDULES) + 1} schedules, of {_heading(study)}")
    found = list(compare(study))
    _write(options, [result.chart for _, result in found if isinstance(result, StudyResult)])
    if options.json:
        print(json.dumps(comparison_json(found), indent=2))
    else:
        print("\n".join([_heading(study), "", *comparison(found), "", *_COLUMNS]))


def _draw(options: Options, study: Study, name: str) -> None:
    """Print the pictures and figures of one schedule."""
    results = _results(options, study, name)
    _write(options, [result.chart for result in results])
    if options.json:
        every = [figures(result) for result in results]
        print(json.dumps(every[0] if len(every) == 1 else every, indent=2))
    else:
        print("\n".join(line for result in results for line in _shown(options, study, result)))


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
        what = f"{folder} was profiled with stages other than those of its settings"
        raise ConfigError(Mistake(what, attempt="a profiled run: fivefold train --profile"))
    stages = layout.split.stages
    return measured_pieces(config.model, stages, median_costs(program, simulation))


def _cut(options: Options, study: Study, measured: "MeasuredPieces | None") -> Cut | None:
    """The cut of the model of --balance into stages, if one is given."""
    if options.balance is None:
        if given := changed(options, OF_A_MODEL):
            flags = " and ".join(setting.flag for setting in given)
            what = f"{flags} needs a model, and there is no --balance"
            if options.measured is not None:  # most models have layers that the run lacks
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


def _results(options: Options, study: Study, asked: str) -> list[StudyResult]:
    """One result for a schedule or a file; for a run, the measured one and the simulated one."""
    path = Path(asked)
    if path.is_dir() or path.suffix == ".jsonl":
        return measured_results(read_measured(path), path.resolve().name)
    if path.suffix == ".csv" or path.is_file():
        program = read_csv(path)
        return [timed(_resized(study, program), program, path.name, dx_first=options.dx_first)]
    name = _schedule_name(asked)
    if name not in (*SCHEDULES, AUTO):
        close = choice_meant("pipeline_schedule", name, (*SCHEDULES, AUTO))
        raise ConfigError(
            Mistake(
                f"unknown schedule {asked!r}{close}",
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
        raise ConfigError(
            "--csv and --torch-csv write one schedule, and --compare has several: name one instead"
        )
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
