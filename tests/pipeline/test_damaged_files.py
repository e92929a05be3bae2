"""Schedules as tables, steps as they were measured, and times that are typed: damaged, all of them.

Each is read, or refused as an error for people; what is read can be timed and drawn.
"""

import contextlib
import io
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import pytest

from fivefold.cli import schedule
from fivefold.errors import ConfigError, FivefoldError
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.measured import (
    MeasuredAct,
    measured_program,
    median_costs,
    read_measured,
    write_measured,
)
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.draw.study import Study, measured_results, run_schedule, timed
from fivefold.pipeline.draw.text import picture
from fivefold.pipeline.exchange import read_csv, to_csv, to_torch_csv
from fivefold.pipeline.ir import ProgramError
from fivefold.pipeline.simulate import simulate
from tests.mutations import mutations

COUNT = 5_000
SOME = 20  # of what is read, one of so many is timed


def chart_of(name: str, **settings: int) -> Chart:
    return run_schedule(Study(2, 4, (1.0, 1.25, 0.75), 0.1, **settings), name).chart


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        to_csv(chart_of("zb_v")),
        to_csv(chart_of("sliced_1f1b", num_slices=2)),
        to_csv(chart_of("dualpipe")),
        to_torch_csv(chart_of("dualpipe_v").program),
    ],
    ids=["zb_v", "slices", "pairs", "torch"],
)
def test_a_table_is_a_program_or_is_refused(text: str, tmp_path: Path) -> None:
    path, read = tmp_path / "program.csv", 0
    for data in mutations(text, COUNT // 4):
        path.write_bytes(data)
        try:
            program = read_csv(path)
        except (ConfigError, ProgramError) as error:
            assert str(path) in str(error), data
            continue
        read += 1
        if read % SOME == 1:
            study = Study(program.num_ranks, program.num_microbatches)
            result = timed(study, program, "read")
            assert 0 < result.bound <= result.chart.simulation.makespan * (1 + 1e-9), data
            assert picture(result.chart, 80, colours=False)
    assert SOME < read < COUNT / 8


@pytest.mark.slow
def test_measured_acts_are_a_step_or_are_refused(tmp_path: Path) -> None:
    source, path, read = tmp_path / "source.jsonl", tmp_path / "step.jsonl", 0
    acts = [
        MeasuredAct(rank, str(t.act.kind), t.act.stage, t.act.mb, 100 + t.start, 100 + t.end)
        for rank, row in enumerate(chart_of("zb_h1").simulation.timeline)
        for t in row
    ]
    write_measured(source, acts)
    for data in mutations(source.read_text(), COUNT // 2):
        path.write_bytes(data)
        try:
            found = read_measured(path)
        except ConfigError as error:
            assert str(path) in str(error), data
            continue
        try:
            program, simulation = measured_program(found)
        except ProgramError:
            continue
        read += 1
        costs = median_costs(program, simulation)
        assert isfinite(simulate(program, costs).makespan), data
        if read % SOME == 1:
            for result in measured_results(found, "step"):
                assert picture(result.chart, 80, colours=False)
    assert SOME < read < COUNT / 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('"rank": -1', "must be in 0"),
        ('"rank": 1.5', "`int`"),
        ('"kind": "STEP"', "none of"),
        ('"kind": 3', "`str`"),
        ('"start": 1e999', "measured act"),
        ('"start": 5', "start 5 s <= end 2 s must hold"),
        ('"start": 1e13, "end": 1e14', "each within 1e+12 s of 0"),
        ('"mb": 1000000000000', "must be in 0"),
        ('"colour": 1', "unexpected field 'colour'"),
    ],
)
def test_a_measured_act_of_another_kind_is_named(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "step.jsonl"
    act = '{"rank": 0, "kind": "F", "stage": 0, "mb": 0, "start": 1, "end": 2, '
    path.write_text(f"{act}{line}}}\n")
    with pytest.raises(ConfigError, match=r"step\.jsonl:1: no measured act") as raised:
        read_measured(path)
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "text",
    ["0F0,0B0,0F1000000,0B1000000\n", "0F0,0B0,0F999999999,0B999999999\n"],
)
def test_microbatches_that_are_left_out_are_not_waited_for(text: str, tmp_path: Path) -> None:
    path = tmp_path / "program.csv"
    path.write_text(text)
    with pytest.raises(ProgramError, match="microbatches must be 0 to the number of"):
        read_csv(path)


def run(line: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        schedule.run(line.split())


TIMES: dict[str, Callable[[str], str]] = {
    "costs": "1f1b --stages 2 --microbatches 2 --costs={}".format,
    "latency": "zb_v --stages 2 --microbatches 2 --costs=1,1.2,0.8 --latency={}".format,
    "cap": "gpipe --stages 2 --microbatches 2 --memory-cap={}".format,
}


@pytest.mark.slow
@pytest.mark.parametrize("flag", TIMES)
def test_times_that_are_typed_are_shown_or_refused(flag: str) -> None:
    usual = {"costs": "1,1.25,0.75", "latency": "0.125", "cap": "4.5"}[flag]
    shown = 0
    for data in mutations(usual, COUNT // 4):
        text = data.decode(errors="replace")
        if text.split() == [text]:
            try:
                run(TIMES[flag](text))
                shown += 1
            except FivefoldError as error:
                assert "--" in str(error) or "cap" in str(error), text
    assert shown


@pytest.mark.parametrize(
    "line",
    [
        "1f1b --costs 1e-320,1,1",
        "1f1b --costs 1,1e-7,1",
        "1f1b --costs 1e308,1e308,1e308",
        "1f1b --costs nan,1,1",
        "1f1b --costs 1,1,inf",
        "1f1b --costs 1,1,-1",
        "zb_v --latency 1e300",
        "zb_v --latency 1e-320",
        "1f1b --memory-cap 0",
        "1f1b --width 99999999999",
        "sliced_1f1b --slices 99999999999",
        "--balance llama3-8b --memory-gib 1e308",
        "--balance llama3-8b --seq-length 0",
        "--balance llama3-8b --layer-costs dense=0",
        "--balance llama3-8b --layer-costs dense=1e-320",
        "--balance deepseek-v3 --layer-costs dense=1,moe=1e9",
    ],
)
def test_times_that_no_clock_holds_are_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        run(line)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e9])
def test_a_unit_of_time_is_a_unit(scale: float) -> None:
    """The same costs in seconds and in years are the same schedule."""
    one = run_schedule(Study(4, 8, (1.0, 1.2, 0.8), 0.1), "zb_v")
    other = run_schedule(Study(4, 8, (scale, 1.2 * scale, 0.8 * scale), 0.1 * scale), "zb_v")
    assert other.chart.simulation.makespan == pytest.approx(one.chart.simulation.makespan * scale)
    assert other.bound == pytest.approx(one.bound * scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e308])
def test_costs_are_finite_and_so_is_their_sum(bad: float) -> None:
    for costs in ((bad, 1.0), (1.0, bad), (bad, bad)):
        with pytest.raises(ConfigError, match="finite"):
            Costs((1e308, 1.0), (1.0, 1.0), costs)
