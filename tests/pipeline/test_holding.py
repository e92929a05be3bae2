from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import peak_in_flight, simulate
from fivefold.pipeline.validate import validate


def words(acts):
    return " ".join(f"{act.kind}{act.mb}" for act in acts)


def recomputed(program):
    return [sum(act.kind is Kind.R for act in acts) for acts in program.ranks]


def test_recompute_stands_before_the_backward():
    program = with_recompute(build_program("1f1b", range(2), 4), 1)
    assert words(program.ranks[0]) == "F0 F1 BW0 F2 R1 BW1 F3 R2 BW2 R3 BW3"
    assert words(program.ranks[1]) == "F0 BW0 F1 BW1 F2 BW2 F3 BW3"
    validate(program)


def test_1f1b_recomputes_only_where_more_are_in_flight():
    """Of w in flight of which n are held, about (w - n) / (w - 1) of all."""
    plain = build_program("1f1b", range(4), 18)
    again = [recomputed(with_recompute(plain, limit)) for limit in (1, 2, 3, 4)]
    assert again == [[17, 17, 17, 0], [11, 8, 0, 0], [5, 0, 0, 0], [0, 0, 0, 0]]


def test_recompute_runs_while_the_gradient_is_on_its_way():
    program = build_program("gpipe", range(2), 2)
    again = with_recompute(program, 1)
    assert recomputed(again) == [1, 1]
    costs = Costs.uniform(2, hop=2)
    plain = simulate(program, costs).makespan
    assert simulate(again, costs).makespan == plain + 1  # that of the last rank


def test_an_evaluation_recomputes_nothing():
    program = build_program("gpipe", range(2), 4, forward_only=True)
    assert with_recompute(program, 1) == program


SCHEDULES = [
    ("1f1b", loop_placement(4, 4)),
    ("gpipe", loop_placement(3, 3)),
    ("interleaved_1f1b", loop_placement(2, 4)),
    ("interleaved_zb", loop_placement(3, 6)),
    ("zb_v", v_placement(3, 6)),
    ("dualpipe_v", v_placement(3, 6)),
    ("dualpipe", loop_placement(4, 4)),
    ("sliced_1f1b", loop_placement(3, 3)),
]


@pytest.mark.slow
@settings(max_examples=50)
@given(st.sampled_from(SCHEDULES), st.integers(3, 6), st.integers(2, 8), st.booleans())
def test_programs_stay_valid_hold_no_more_and_cannot_hang(schedule, half, limit, early):
    name, placement = schedule
    slices = 2 if name == "sliced_1f1b" else 1
    plain = build_program(name, placement, 4 * half, num_slices=slices, group_size=4)
    plain = eager_dx(plain) if early else plain
    program = with_recompute(plain, limit)
    held = dict.fromkeys(range(program.num_ranks), 0.0)
    for rank, acts in enumerate(program.ranks):
        held[rank] = most_held(acts)
        assert held[rank] <= limit
    before = {rank: most_held(acts) for rank, acts in enumerate(plain.ranks)}
    assert all(
        again == 0
        for again, most in zip(recomputed(program), before.values(), strict=True)
        if most <= limit
    )
    costs = Costs.uniform(program.num_stages, hop=0.2)
    lowered = with_sharding_actions(lower(program, costs), unshard=True, max_unsharded=2)
    validate(lowered)
    assert peak_in_flight(lowered) == peak_in_flight(program)
    result = simulate(lowered, costs, one_stream=True)
    idle = sum(result.idle.values())
    assert idle == pytest.approx(program.num_ranks * (result.makespan - result.busy))


def most_held(acts, again=None):
    """Microbatches of a stage between what makes their activations and their last dX."""
    if again is None:
        again = {(act.stage, act.mb) for act in acts if act.kind is Kind.R}
    ends = {
        (kid.stage, kid.mb): place
        for place, act in enumerate(acts)
        for kid in act.elementary
        if kid.kind in (Kind.B, Kind.BW)
    }
    held, most = set(), 0
    for place, act in enumerate(acts):
        for kid in act.elementary:
            piece = kid.stage, kid.mb
            made = kid.kind in (Kind.R, Kind.B, Kind.BW)
            if made or (kid.kind is Kind.F and piece not in again):
                held.add(piece)
        most = max(most, len(held))
        held = {piece for piece in held if ends[piece] > place}
    return most


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("1f1b", (0, 1, 2)),
        ("zb_v", (0, 1, 1, 0)),
        ("interleaved_1f1b", (0, 1, 0, 1)),
    ],
)
@pytest.mark.parametrize("limit", [1, 2, 3])
def test_none_recomputes_fewer(name, placement, limit):
    plain = build_program(name, placement, 4)
    for acts, count in zip(plain.ranks, recomputed(with_recompute(plain, limit)), strict=True):
        pieces = sorted({(act.stage, act.mb) for act in acts})
        if count:
            fewer = combinations(pieces, count - 1)
            assert all(most_held(acts, set(again)) > limit for again in fewer)
