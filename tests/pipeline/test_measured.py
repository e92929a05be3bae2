from dataclasses import asdict

import pytest

from fivefold.errors import ConfigError
from fivefold.pipeline.costs.measured import (
    FILE,
    MeasuredAct,
    measured_program,
    median_costs,
    read_measured,
    write_measured,
)
from fivefold.pipeline.draw.figures import report
from fivefold.pipeline.draw.study import Study, measured_results, run_schedule
from fivefold.pipeline.ir import ProgramError
from fivefold.pipeline.simulate import Reason
from fivefold.units import human_seconds


def acts_of(name, study, begin=100.0, late=0.0):
    """What a run would leave that goes as simulated, each act `late` after it could."""
    chart = run_schedule(study, name, dx_first=True).chart
    return chart.program, [
        MeasuredAct(
            rank,
            str(timed.act.kind),
            timed.act.stage,
            timed.act.mb,
            begin + timed.start + late,
            begin + timed.end,
        )
        for rank, row in enumerate(chart.simulation.timeline)
        for timed in row
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "interleaved_1f1b"])
def test_a_run_that_goes_as_simulated_is_read_back(name, tmp_path):
    study = Study(4, 8, (1, 1.25, 0.75), 0.125)
    expected, acts = acts_of(name, study)
    write_measured(tmp_path / FILE, reversed(acts))
    program, simulation = measured_program(read_measured(tmp_path))
    assert program == expected
    chart = run_schedule(study, name, dx_first=True).chart
    assert simulation.makespan == pytest.approx(chart.simulation.makespan)
    for reason, time in chart.simulation.idle.items():
        assert simulation.idle[reason] == pytest.approx(time, abs=1e-6), reason
    costs = median_costs(program, simulation)
    assert costs.hop == pytest.approx(0.125)
    assert costs.f == pytest.approx(study.costs(program.placement).f)
    measured, again = measured_results(acts, "run")
    assert again.chart.simulation.makespan == pytest.approx(measured.chart.simulation.makespan)
    assert measured.chart.unit == "s"
    makespan = human_seconds(simulation.makespan)
    assert ("flush makespan", makespan) in [row[:2] for row in report(measured)]
    assert f"makespan {makespan}, " in measured.chart.figures


def test_time_that_nothing_explains_is_named():
    _, acts = acts_of("1f1b", Study(2, 4), late=0.1)
    _, simulation = measured_program(acts)
    assert simulation.idle[Reason.READY] > 0


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "no measured act"), ("{}", "missing"), ('{"rank": 0, "colour": 1}', "unexpected")],
)
def test_a_damaged_file_is_named(line, message, tmp_path):
    _, acts = acts_of("1f1b", Study(2, 2))
    write_measured(tmp_path / FILE, acts[:1])
    with (tmp_path / FILE).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_measured(tmp_path)
    assert f"{FILE}:2" in str(caught.value)


def test_what_is_not_a_whole_step_is_refused(tmp_path):
    _, acts = acts_of("1f1b", Study(2, 2))
    with pytest.raises(ProgramError):
        measured_program(acts[:-1])
    with pytest.raises(ProgramError, match="ranks must be"):
        measured_program([])
    with pytest.raises(ConfigError, match="holds no profiled step"):
        read_measured(tmp_path)
    assert asdict(acts[0])["part"] == 0
