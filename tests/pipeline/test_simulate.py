from itertools import pairwise

import pytest

from fivefold.errors import ConfigError
from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import Act, Kind, Program, ProgramError, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import Gap, Reason, memory_curve, peak_in_flight, simulate


@pytest.mark.parametrize(
    ("name", "virtual", "fused", "eager"),
    [("gpipe", 1, 93, 86), ("1f1b", 1, 93, 86), ("interleaved_1f1b", 2, 82.5, 79)],
)
def test_makespans_of_eight_ranks(name, virtual, fused, eager):
    """Work 72; the bubble is 7 (F+B+W) / V, and 7 (F+B) / V once dX leaves before dW."""
    stages = 8 * virtual
    costs = Costs.uniform(stages, *[1 / virtual] * 3)
    program = build_program(name, loop_placement(8, stages), 24)
    assert simulate(program, costs).makespan == pytest.approx(fused)
    assert simulate(eager_dx(program), costs).makespan == pytest.approx(eager)


def test_timeline_of_a_small_pipeline():
    costs = Costs(f=(1, 2), b=(3, 4), w=(5, 6), hop=0.5)
    result = simulate(build_program("1f1b", range(2), 1), costs)
    times = [[(str(t.act.kind), t.start, t.end) for t in row] for row in result.timeline]
    assert times == [
        [("F", 0, 1), ("BW", 14, 22)],
        [("F", 1.5, 3.5), ("BW", 3.5, 13.5)],
    ]
    assert (result.makespan, result.span) == (22, 22)
    assert result.busy == (9 + 12) / 2
    assert result.bubble == 1 - 10.5 / 22


def test_dx_leaves_after_b_when_eager():
    costs = Costs(f=(1, 2), b=(3, 4), w=(5, 6), hop=0.5)
    result = simulate(eager_dx(build_program("1f1b", range(2), 1)), costs)
    assert [(str(t.act.kind), t.start, t.end) for t in result.timeline[1]] == [
        ("F", 1.5, 3.5),
        ("B", 3.5, 7.5),
        ("W", 7.5, 13.5),
    ]
    assert result.timeline[0][1].start == 8


def test_span_is_shorter_than_the_makespan_where_ranks_start_late():
    result = simulate(build_program("1f1b", range(4), 2, forward_only=True), Costs.uniform(4))
    assert (result.makespan, result.span) == (5, 2)
    assert result.peaks == (0, 0, 0, 0)


def test_local_hand_over_needs_no_hop():
    program = build_program("gpipe", (0, 1, 1, 0), 1)
    assert simulate(program, Costs.uniform(4, hop=10)).makespan == 4 + 8 + 4 * 10


def test_memory_counts_each_half_of_the_backward():
    program = eager_dx(build_program("1f1b", range(2), 3))
    assert peak_in_flight(program, Footprint((2.0, 10.0))) == (4.0, 10.0)
    order = [(Kind.F, 0), (Kind.B, 0), (Kind.F, 1), (Kind.B, 1), (Kind.W, 0), (Kind.W, 1)]
    program = Program((0,), 2, (tuple(Act(kind, 0, mb) for kind, mb in order),))
    assert peak_in_flight(program, Footprint(freed_by_b=0.25)) == (1.75,)
    assert peak_in_flight(program, Footprint(freed_by_b=1.0)) == (1.0,)


def test_weight_parts_share_the_cost_of_w():
    acts = (
        Act(Kind.F, 0),
        Act(Kind.B, 0),
        Act(Kind.W, 0, part=0),
        Act(Kind.W, 0, part=1),
    )
    assert simulate(Program((0,), 1, (acts,)), Costs.uniform(1)).makespan == 3


def test_an_overlapped_pair_runs_as_one():
    pair = Act(Kind.FB, 0, kids=(Act(Kind.F, 0, 1), Act(Kind.BW, 0, 0)))
    acts = (Act(Kind.F, 0, 0), pair, Act(Kind.BW, 0, 1))
    result = simulate(Program((0,), 2, (acts,)), Costs.uniform(1))
    assert [(t.start, t.end) for t in result.timeline[0]] == [(0, 1), (1, 4), (4, 6)]


def test_a_circular_wait_is_spelt_out():
    first, second = build_program("1f1b", range(2), 2).ranks
    program = Program(
        (0, 1), 2, ((first[0], first[2], first[1], first[3]), second[2:] + second[:2])
    )
    with pytest.raises(ProgramError, match=r"circular wait: .* waits for .* on rank"):
        simulate(program, Costs.uniform(2))


def test_impossible_costs():
    with pytest.raises(ConfigError, match="must be positive"):
        Costs.uniform(2, f=0)
    with pytest.raises(ConfigError, match="hop not negative"):
        Costs.uniform(2, hop=-1)


def test_slices_share_the_time_of_their_microbatch():
    program = build_program("sliced_1f1b", (0,), 2, num_slices=4)
    result = simulate(program, Costs((1,), (2,), (3,)))
    assert result.makespan == 12
    assert result.peaks == (1,)


def test_every_gap_has_a_reason():
    costs = Costs(f=(1, 2), b=(3, 4), w=(5, 6), hop=0.5)
    result = simulate(build_program("1f1b", range(2), 1), costs)
    assert result.gaps == (
        Gap(0, 1, 13.5, Reason.UPSTREAM),
        Gap(0, 13.5, 14, Reason.IN_FLIGHT),
        Gap(1, 0, 1.5, Reason.FILL),
        Gap(1, 13.5, 22, Reason.DRAIN),
    )
    assert result.idle[Reason.DRAIN] == 8.5


def test_a_message_behind_another_is_told_apart():
    costs = Costs((1, 1), (1, 1), (1, 1), hop=3)
    lowered = lower(build_program("gpipe", range(2), 2, forward_only=True), costs)
    result = simulate(lowered, costs, one_stream=True)
    assert [gap for gap in result.gaps if gap.rank == 1] == [
        Gap(1, 0, 4, Reason.FILL),
        Gap(1, 5, 7, Reason.IN_FLIGHT),
    ]
    four = lower(build_program("gpipe", (0, 1, 0), 3, forward_only=True), Costs.uniform(3, hop=3))
    costs = Costs.uniform(3, hop=3)
    assert simulate(four, costs, one_stream=True).idle[Reason.STREAM] > 0
    assert simulate(four, costs).idle[Reason.STREAM] == 0


@pytest.mark.parametrize("one_stream", [False, True])
@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("1f1b", loop_placement(4, 4)),
        ("zb_v", v_placement(4, 8)),
        ("dualpipe", loop_placement(4, 4)),
        ("interleaved_1f1b", loop_placement(4, 8)),
    ],
)
def test_gaps_and_acts_fill_the_step_and_the_critical_path_is_as_long(name, placement, one_stream):
    program = build_program(name, placement, 8)
    costs = Costs(*[tuple(1 + 0.1 * (i % 3) for i in range(program.num_stages))] * 3, 0.4)
    result = simulate(lower(program, costs), costs, one_stream=one_stream)
    idle = sum(result.idle.values())
    assert idle == pytest.approx(4 * result.makespan - 4 * result.busy)
    for rank, row in enumerate(result.timeline):
        pieces = [(t.start, t.end) for t in row]
        pieces += [(gap.start, gap.end) for gap in result.gaps if gap.rank == rank]
        pieces.sort()
        assert [end for _, end in pieces[:-1]] == pytest.approx([start for start, _ in pieces[1:]])
    path = result.critical_path
    assert path[0].start == 0
    assert path[-1].end == result.makespan
    for step, after in pairwise(path):
        assert step.end == pytest.approx(after.start)
    assert any(step.message for step in path)


def test_memory_over_time():
    program = build_program("1f1b", range(2), 2)
    result = simulate(program, Costs.uniform(2))
    assert memory_curve(program, result)[0] == ((0, 0), (0, 1), (1, 2), (6, 1), (9, 0))
    footprint = Footprint((3.0, 5.0))
    curve = memory_curve(program, result, footprint)
    peaks = tuple(max(held for _, held in points) for points in curve)
    assert peaks == peak_in_flight(program, footprint) == (6, 5)
