import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.pipeline.costs import Costs, Footprint
from fivefold.pipeline.graph import Stream
from fivefold.pipeline.holding import with_offload, with_recompute
from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import Reason, memory_curve, peak_in_flight, simulate
from fivefold.pipeline.validate import validate


def words(acts):
    return " ".join(f"{act.kind}{act.mb}" for act in acts)


def test_recompute_stands_before_the_backward():
    program = with_recompute(build_program("1f1b", range(2), 2))
    assert words(program.ranks[1]) == "F0 R0 BW0 F1 R1 BW1"
    validate(program)
    only_first = with_recompute(eager_dx(build_program("1f1b", range(2), 1)), stages=[0])
    assert words(only_first.ranks[0]) == "F0 R0 BW0"
    assert words(only_first.ranks[1]) == "F0 B0 W0"


def test_recompute_runs_while_the_gradient_is_on_its_way():
    program = build_program("1f1b", range(2), 1)
    costs = Costs.uniform(2, hop=2)
    plain = simulate(program, costs).makespan
    assert simulate(with_recompute(program, stages=[0]), costs).makespan == plain
    assert simulate(lower(with_recompute(program, [0]), costs), costs, Stream.RANK).makespan == (
        plain
    )


def test_a_checkpoint_is_all_that_waits_for_backward():
    program = with_recompute(build_program("1f1b", range(4), 8))
    assert peak_in_flight(program, Footprint(checkpoint=0.1)) == pytest.approx((1.3, 1.2, 1.1, 1.0))
    assert peak_in_flight(program, Footprint(checkpoint=1.0)) == (4, 3, 2, 1)


def test_copies_run_beside_compute():
    program = with_offload(build_program("gpipe", (0,), 5))
    assert words(program.ranks[0]) == (
        "F0 OFFLOAD0 F1 OFFLOAD1 F2 OFFLOAD2 F3 OFFLOAD3 RELOAD0 F4 OFFLOAD4 RELOAD1 BW0 "
        "RELOAD2 BW1 RELOAD3 BW2 RELOAD4 BW3 BW4"
    )
    validate(program)
    costs = Costs((1.0,), (1.0,), (1.0,), copy=(0.5,))
    assert simulate(program, costs).makespan == 15
    slow = simulate(program, Costs((1.0,), (1.0,), (1.0,), copy=(1.5,)))
    assert slow.makespan > 15
    assert slow.idle[Reason.MEMORY] == pytest.approx(slow.makespan - 15)


def test_an_offload_makes_room_two_acts_later():
    program = with_offload(build_program("gpipe", (0,), 8))
    assert peak_in_flight(build_program("gpipe", (0,), 8)) == (8,)
    assert peak_in_flight(program) == (3,)  # made, leaving, coming
    assert peak_in_flight(program, Footprint(offloaded=0.5)) == (5.5,)
    simulation = simulate(program, Costs.uniform(1))
    assert max(held for _, held in memory_curve(program, simulation)[0]) == 3


def test_what_is_needed_soon_stays():
    program = build_program("1f1b", range(4), 6)
    moved = [sum(act.kind is Kind.OFFLOAD for act in acts) for acts in with_offload(program).ranks]
    assert moved == [6, 4, 0, 0]
    assert with_offload(program, stages=[]) == program


@given(
    st.sampled_from(
        [
            ("1f1b", loop_placement(4, 4)),
            ("interleaved_zb", loop_placement(3, 6)),
            ("zb_v", v_placement(3, 6)),
            ("dualpipe_v", v_placement(3, 6)),
            ("dualpipe", loop_placement(4, 4)),
            ("sliced_1f1b", loop_placement(3, 3)),
        ]
    ),
    st.integers(3, 6),
    st.booleans(),
    st.booleans(),
    st.floats(0, 3),
)
def test_programs_stay_valid_and_cannot_hang(schedule, half, recompute, offload, copy):
    name, placement = schedule
    slices = 2 if name == "sliced_1f1b" else 1
    program = build_program(name, placement, 4 * half, num_slices=slices, group_size=4)
    program = with_recompute(program) if recompute else program
    program = with_offload(program) if offload else program
    ones = (1.0,) * program.num_stages
    costs = Costs(ones, ones, ones, 0.2, copy=(copy,) * program.num_stages)
    lowered = with_sharding_actions(lower(program, costs), unshard=True, max_unsharded=2)
    for stream in Stream:
        validate(lowered, stream=stream)
    assert peak_in_flight(lowered) == peak_in_flight(program)
    result = simulate(lowered, costs, Stream.RANK)
    idle = sum(result.idle.values())
    assert idle == pytest.approx(program.num_ranks * (result.makespan - result.busy))
