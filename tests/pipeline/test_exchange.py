import csv
import json

import pytest

from fivefold.errors import ConfigError
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.draw.chart import Chart
from fivefold.pipeline.exchange import read_csv, to_csv, to_torch_csv, to_trace
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import COMPUTE, ProgramError, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.simulate import simulate


def program_of(name, **options):
    placements = {Shape.V: v_placement(2, 4), Shape.LOOP: loop_placement(2, 4)}
    return build_program(name, placements.get(SCHEDULES[name].shape, (0, 1)), 4, **options)


def chart_of(program):
    return Chart("title", program, simulate(program, Costs.uniform(program.num_stages)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_program_survives_our_table(name, tmp_path):
    program = program_of(name, **({"num_slices": 2} if name == "sliced_1f1b" else {}))
    for variant in (program, eager_dx(program)):
        file = tmp_path / "program.csv"
        file.write_text(to_csv(chart_of(variant)))
        assert read_csv(file) == variant


def test_times_are_in_the_table():
    rows = list(csv.DictReader(to_csv(chart_of(program_of("1f1b"))).splitlines()))
    assert rows[0] == {
        "rank": "0",
        "kind": "F",
        "stage": "0",
        "microbatch": "0",
        "slice": "0",
        "part": "0",
        "start": "0",
        "end": "1",
    }


@pytest.mark.parametrize("name", [n for n in SCHEDULES if SCHEDULES[n].num_copies == 1])
def test_torch_reads_what_is_written_and_the_other_way_round(name, tmp_path):
    """With torch's own parser and writer, and its own validation."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    program = program_of(name)
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_torch_csv(program))
    with ours.open(newline="") as file:
        actions = {
            rank: [schedules._Action.from_str(cell) for cell in row]
            for rank, row in enumerate(csv.reader(file))
        }
    with theirs.open("w", newline="") as file:
        csv.writer(file).writerows(actions.values())
    assert read_csv(theirs) == read_csv(ours) == program
    ranks = schedules._validate_schedule(actions, 2, program.num_stages, 4)
    assert ranks == dict(enumerate(program.placement))
    words = [word for row in actions.values() for word in row]
    assert len(words) == sum(act.kind in COMPUTE for acts in program.ranks for act in acts)


def test_torchs_idle_cells_and_communication_are_passed_over(tmp_path):
    file = tmp_path / "comms.csv"
    file.write_text("0UNSHARD,0F0,0SEND_F0,,,0RECV_B0,0B0\n,1RECV_F0,1F0,1I0,1SEND_B0,1W0,\n")
    program = read_csv(file)
    assert [[str(act.kind) for act in acts] for acts in program.ranks] == [["F", "BW"], list("FBW")]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ProgramError, "ranks must be"),
        ("0F0,0X0\n", ConfigError, "file.csv:1: '0F0,0X0' is no line of a schedule"),
        ("rank,kind,stage,microbatch,slice,part\n0,F,zero,0,0,0\n", ConfigError, "file.csv:2"),
        ("rank,kind,stage,microbatch,slice,part\n0,F\n", ConfigError, "file.csv:2"),
        ("0F0,0B0\n1F0,1B0\n0F1\n", ProgramError, "on rank 2"),
        ("0F0,0B0\n2F0,2B0\n", ProgramError, "stages must be 0"),
        ("0B0,0F0\n", ProgramError, "file.csv"),
        ("0F0,0B0,0F0,0B0\n", ProgramError, "file.csv"),
    ],
)
def test_what_is_no_schedule_is_refused(text, error, message, tmp_path):
    file = tmp_path / "file.csv"
    file.write_text(text)
    with pytest.raises(error) as caught:
        read_csv(file)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (program_of("dualpipe"), "two copies of a model"),
        (with_recompute(program_of("1f1b"), 1), "no notation for R of stage 0"),
        (program_of("sliced_1f1b", num_slices=2), "no notation for"),
    ],
)
def test_what_torch_cannot_say(program, reason):
    with pytest.raises(ConfigError, match=reason):
        to_torch_csv(program)


def test_a_trace_holds_every_act_and_all_idle_time():
    chart = chart_of(program_of("zb_v"))
    events = json.loads(to_trace([chart, chart]))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    total = sum(event["dur"] for event in spans)
    assert total == pytest.approx(2 * chart.simulation.makespan * 1e3)
    acts = [event for event in spans if event["cat"] != "idle"]
    assert len(acts) == sum(len(acts) for acts in chart.program.ranks)
    assert {event["name"] for event in events if event["ph"] == "C"} == {
        "rank 0 holds",
        "rank 1 holds",
    }
