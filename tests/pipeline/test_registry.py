import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.errors import ConfigError
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower, unpaired
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import simulate
from fivefold.pipeline.validate import validate


def placement_for(name, ranks, virtual):
    match SCHEDULES[name].shape:
        case Shape.V:
            return v_placement(ranks, 2 * ranks)
        case Shape.LINE:
            return loop_placement(ranks, ranks)
    return loop_placement(ranks, ranks * virtual)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=20)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 16), st.integers(1, 3), st.booleans())
def test_every_schedule_is_valid_and_cannot_hang_or_says_why_not(
    name, ranks, virtual, total, slices, forward_only
):
    placement = placement_for(name, ranks, virtual)
    slices = slices if SCHEDULES[name].slices else 1
    try:
        program = build_program(
            name, placement, total, num_slices=slices, forward_only=forward_only
        )
    except ConfigError as error:
        assert error.mistakes[0].works
        assert name in ("interleaved_1f1b", "combined_1f1b", "interleaved_zb") or "dual" in name
        assert ranks % 2 or not forward_only
        return
    for variant in (program, eager_dx(program), eager_dx(unpaired(program))):
        validate(variant)
        validate(with_sharding_actions(lower(variant), unshard=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_says_whether_it_pairs(name):
    program = build_program(name, placement_for(name, 4, 2), 16)
    found = any(act.kind is Kind.FB for acts in program.ranks for act in acts)
    assert SCHEDULES[name].pairs == found


# Flush makespans and peaks at F = B = W = 1 per rank, 8 ranks, 24 microbatches; work is 72.
@pytest.mark.parametrize(
    ("name", "virtual", "makespan", "span", "peak"),
    [
        ("gpipe", 1, 93, 93, 24),
        ("looped_bfs", 2, 82.5, 82.5, 24),
        ("1f1b", 1, 93, 93, 8),
        ("eager_1f1b", 1, 93, 93, 15),
        ("interleaved_1f1b", 2, 82.5, 82.5, 11.5),
        ("zb_h1", 1, 79, 79, 8),
        ("zb_h2", 1, 79, 72, 15),
        ("zb_v", 2, 75.5, 72, 8),
        ("interleaved_zb", 2, 75.5, 75.5, 8),
        ("v_half", 2, 80.5, 80.5, 5),
        ("v_min", 2, 85.5, 85.5, 4),
        ("dualpipe_v", 2, 79, 79, 8.5),
    ],
)
def test_makespans_of_eight_ranks(name, virtual, makespan, span, peak):
    program = build_program(name, placement_for(name, 8, virtual), 24)
    result = simulate(program, Costs.uniform(8 * virtual, *[1 / virtual] * 3))
    assert result.makespan == pytest.approx(makespan)
    assert result.span == pytest.approx(span)
    assert max(result.peaks) / virtual == peak


@pytest.mark.parametrize(("name", "bubble", "peak"), [("dualpipe", 6, 9), ("dualpipe_v", 14, 17)])
def test_dualpipe_at_eight_ranks_and_twenty_microbatches(name, bubble, peak):
    """Per chunk 1 for each of F, B, W, a pair takes F + B + W."""
    program = build_program(name, placement_for(name, 8, 2), 20)
    result = simulate(program, Costs.uniform(16))
    assert result.makespan - result.busy == bubble
    assert result.peaks == (peak,) * 8
    assert {len(row) for row in result.timeline} != {60}  # some run as pairs


def test_a_sequential_pair_halves_the_bubble_of_dualpipe_v():
    program = eager_dx(unpaired(build_program("dualpipe_v", v_placement(8, 16), 20)))
    result = simulate(program, Costs.uniform(16))
    assert result.makespan - result.busy == 7


def test_a_pair_may_be_cheaper_than_its_halves():
    program = build_program("dualpipe_v", v_placement(4, 8), 12)
    pairs = tuple((2.5,) * 8 for _ in range(8))
    costs = Costs((1,) * 8, (1,) * 8, (1,) * 8, fb=pairs)
    slow, fast = simulate(program, Costs.uniform(8)), simulate(program, costs)
    assert fast.makespan < slow.makespan
    pairs_run = sum(act.kind is Kind.FB for acts in program.ranks for act in acts)
    assert (slow.busy - fast.busy) * 4 == pytest.approx(0.5 * pairs_run)


@pytest.mark.parametrize("ranks", range(1, 13))
def test_published_peaks_of_the_controllable_schedules(ranks):
    for name, peak in (("v_half", (ranks + 2) // 2), ("v_min", (ranks + 4) // 3)):
        program = build_program(name, v_placement(ranks, 2 * ranks), 3 * ranks)
        assert max(simulate(program, Costs.uniform(2 * ranks)).peaks) / 2 <= peak


def test_dualpipe_keeps_two_copies_of_the_model():
    program = build_program("dualpipe", range(4), 8)
    assert program.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert program.path(3) == range(4)
    assert program.path(4) == range(4, 8)
    assert {(m.src_stage, m.dst_stage) for m in program.crossings() if m.mb == 7} == {
        (4, 5), (5, 6), (6, 7), (7, 6), (6, 5), (5, 4)
    }  # fmt: skip


def test_slices_shrink_the_fill():
    costs = Costs.uniform(8)
    spans = [
        simulate(build_program("sliced_1f1b", range(8), 16, num_slices=k), costs).makespan
        for k in (1, 2, 4)
    ]
    assert spans[0] == 16 * 3 + 7 * 3
    assert spans[1] < 16 * 3 + 7 * 3 / 2 + 3
    assert spans[2] < 16 * 3 + 7 * 3 / 4 + 3


def test_slices_run_forward_in_causal_order_and_backward_against_it():
    acts = build_program("sliced_1f1b", range(2), 2, num_slices=3).ranks[0]
    words = " ".join(f"{act.kind}{act.mb}.{act.slice}" for act in acts)
    assert words == ("F0.0 F0.1 F0.2 F1.0 BW0.2 F1.1 BW0.1 F1.2 BW0.0 BW1.2 BW1.1 BW1.0")


@pytest.mark.parametrize(
    ("name", "placement", "total", "slices", "reason", "works"),
    [
        ("zb_h1", (0, 1, 0, 1), 4, 1, "runs one stage per rank, here are 4 stages", "gpipe"),
        ("zb_v", (0, 1, 0, 1), 4, 1, "placed in a V", "a layout with the prefix v:"),
        ("zb_v", (0, 1), 4, 1, "here are 2 stages on 2 ranks", "1f1b"),
        ("looped_bfs", (0, 1, 1, 0), 4, 1, "on ranks 0 1 1 0", "zb_v"),
        ("dualpipe", (0, 1, 2), 6, 1, "an even number of pipeline ranks, not 3", "dualpipe_v"),
        ("dualpipe", (0, 1), 5, 1, "5 is odd", "number of microbatches 4"),
        ("dualpipe", (0, 1), 2, 1, "at least 4 microbatches, not 2", "number of microbatches 4"),
        ("dualpipe_v", (0, 1, 1, 0), 3, 1, "2 x 2 .ranks. = 4", "number of microbatches 4"),
        ("interleaved_zb", (0, 1, 0, 1), 5, 1, "5 % 2 = 1 must be 0", "number of microbatches 4"),
        ("1f1b", (0, 1), 5, 2, "cannot cut a sequence into 2 slices", "sliced_1f1b"),
        ("sliced_1f1b", (0, 1), 5, 0, "into 0 slices", "1 slice"),
    ],
)
def test_what_a_schedule_cannot_do(name, placement, total, slices, reason, works):
    with pytest.raises(ConfigError, match=reason) as caught:
        build_program(name, placement, total, num_slices=slices)
    assert works in caught.value.mistakes[0].works


def test_the_nearest_choices_work():
    for total in (4, 6):
        validate(build_program("dualpipe", (0, 1), total))


@pytest.mark.parametrize("name", SCHEDULES)
def test_weight_gradients_are_summed_in_the_order_of_the_microbatches(name: str) -> None:
    program = build_program(name, placement_for(name, 4, 2), 12)
    summed: dict[int, list[int]] = {}
    for acts in program.ranks:
        for kid in (kid for act in acts for kid in act.elementary):
            if kid.kind in (Kind.W, Kind.BW):
                summed.setdefault(kid.stage, []).append(kid.mb)
    assert all(order == sorted(order) for order in summed.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_adds_its_microbatches_up_in_order(name):
    program = build_program(name, placement_for(name, 4, 2), 12, group_size=4)
    for kinds in ((Kind.B, Kind.BW), (Kind.W, Kind.BW)):
        added = {}
        for acts in program.ranks:
            for kid in (kid for act in acts for kid in act.elementary):
                if kid.kind in kinds:
                    added.setdefault(kid.stage, []).append(kid.mb)
        assert all(mbs == sorted(mbs) for mbs in added.values())
        assert len(added) == program.num_stages
