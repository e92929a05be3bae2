import pytest

from fivefold.errors import ConfigError
from fivefold.pipeline.costs import Costs, Footprint
from fivefold.pipeline.ir import Act, Kind, Program, ProgramError, loop_placement
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.simulate import peak_in_flight, simulate


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
