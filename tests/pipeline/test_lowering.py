from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import COMMUNICATION, COMPUTE, Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower, unpaired
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.validate import validate
from tests.speed import usual_seconds

COST = st.floats(0.01, 10)


def only_compute(acts):
    return [act for act in acts if act.kind in COMPUTE]


def kinds(acts):
    return " ".join(act.kind for act in acts)


def test_two_ranks_by_hand():
    program = lower(build_program("1f1b", range(2), 2))
    words = [" ".join(f"{act.kind}{act.mb}" for act in acts) for acts in program.ranks]
    assert words[0] == "F0 SEND0 F1 SEND1 RECV0 BW0 RECV1 BW1"
    assert words[1] == "RECV0 F0 RECV1 BW0 SEND0 F1 BW1 SEND1"


def test_dx_is_sent_between_the_halves():
    program = lower(eager_dx(build_program("1f1b", range(3), 1)))
    assert kinds(program.ranks[2]) == "RECV F B SEND W"
    assert kinds(program.ranks[1]) == "RECV F SEND RECV B SEND W"
    assert kinds(program.ranks[0]) == "F SEND RECV BW"


def test_neighbours_on_one_rank_hand_over_locally():
    program = lower(eager_dx(build_program("gpipe", v_placement(2, 4), 1)))
    hops = [(message.src_stage, message.dst_stage) for message in program.messages]
    assert hops == [(0, 1), (2, 3), (3, 2), (1, 0)]
    assert [str(act.kind) for act in program.ranks[1] if act.stage == 2][-1] == "BW"


def test_one_rank_sends_nothing():
    program = build_program("gpipe", (0, 0), 3)
    assert lower(program) == program


def test_lowering_again_changes_nothing():
    program = lower(with_sharding_actions(build_program("1f1b", range(4), 6)))
    assert lower(program) == program


@given(
    st.integers(2, 4),
    st.integers(1, 2),
    st.integers(1, 3),
    st.lists(COST, min_size=24, max_size=24),
    st.floats(0, 5),
    st.booleans(),
)
def test_any_costs_give_a_program_that_cannot_hang(ranks, virtual, groups, costs, hop, eager):
    stages = ranks * virtual
    program = build_program("interleaved_1f1b", loop_placement(ranks, stages), ranks * groups)
    program = eager_dx(program) if eager else program
    f, b, w = (tuple(costs[i * 8 : i * 8 + stages]) for i in range(3))
    lowered = lower(program, Costs(f, b, w, hop))
    validate(lowered)
    assert [only_compute(acts) for acts in lowered.ranks] == [list(acts) for acts in program.ranks]
    assert [message.id for message in lowered.messages] == list(range(len(lowered.messages)))


def test_send_stands_before_the_reduce_that_follows_its_producer():
    program = lower(with_sharding_actions(build_program("1f1b", range(2), 2)))
    assert kinds(program.ranks[1]).endswith("BW SEND REDUCE STEP")


def test_messages_of_a_pair_are_issued_in_the_same_order_at_both_ends():
    program = lower(build_program("interleaved_1f1b", loop_placement(2, 8), 8))
    ids = [[act.message.id for act in acts if act.kind in COMMUNICATION] for acts in program.ranks]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(("name", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_large_programs_lower_and_validate_quickly(name, virtual):
    program = build_program(name, loop_placement(16, 16 * virtual), 128)
    assert usual_seconds(lambda: validate(lower(program))) < 1.0  # 0.3 on a quiet machine


@pytest.mark.parametrize(
    ("name", "placement", "ideal", "one_stream"),
    [
        ("interleaved_1f1b", loop_placement, 111.0, 111.0),
        ("looped_bfs", loop_placement, 108.6, 108.6),
        ("interleaved_zb", loop_placement, 105.6, 105.75),
        ("zb_v", v_placement, 104.8, 104.85),
        ("dualpipe_v", v_placement, 106.35, 106.4),
    ],
)
def test_little_is_lost_where_messages_share_a_stream(name, placement, ideal, one_stream):
    """As-soon-as-possible lowering takes 114 to 273 there."""
    costs = Costs.uniform(16, 0.5, 0.55, 0.45, 0.15)
    program = unpaired(build_program(name, placement(8, 16), 32))
    lowered = lower(program, costs)
    assert simulate(program, costs).makespan == pytest.approx(ideal)
    shared = simulate(lowered, costs, one_stream=True)
    assert shared.makespan == pytest.approx(one_stream)


def test_every_message_is_sent_right_after_its_producer_or_another_message():
    program = lower(build_program("1f1b", range(4), 8))
    for acts in program.ranks:
        for before, act in pairwise(acts):
            if act.kind is Kind.SEND and before.kind in COMPUTE:
                assert (before.stage, before.mb) == (act.stage, act.mb)
