from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.validate import validate


def words(acts):
    return " ".join(f"{act.kind}{act.stage}" for act in acts)


def test_reduce_follows_the_last_backward_of_its_stage():
    program = with_sharding_actions(build_program("gpipe", loop_placement(2, 4), 2))
    assert words(program.ranks[0]) == ("F0 F0 F2 F2 BW2 BW2 REDUCE2 BW0 BW0 REDUCE0 STEP-1")


def test_reduce_waits_for_dw():
    program = with_sharding_actions(eager_dx(build_program("1f1b", range(2), 1)))
    assert words(program.ranks[1]) == "F1 B1 W1 REDUCE1 STEP-1"


def test_parameters_are_gathered_for_as_long_as_they_are_used():
    program = with_sharding_actions(build_program("gpipe", (0, 0), 1), unshard=True)
    assert words(program.ranks[0]) == (
        "UNSHARD0 UNSHARD1 F0 F1 BW1 RESHARD1 REDUCE1 BW0 RESHARD0 REDUCE0 STEP-1"
    )


def test_a_stage_is_gathered_while_the_one_before_computes_if_there_is_room():
    program = build_program("interleaved_1f1b", loop_placement(1, 3), 2)
    roomy = with_sharding_actions(program, unshard=True, max_unsharded=2)
    assert words(roomy.ranks[0]).startswith("UNSHARD0 UNSHARD1 F0 F1 RESHARD1 UNSHARD2 F2")
    assert words(roomy.ranks[0]).endswith(
        "UNSHARD0 BW1 RESHARD1 REDUCE1 BW0 RESHARD0 REDUCE0 STEP-1"
    )
    tight = with_sharding_actions(program, unshard=True, max_unsharded=1)
    assert words(tight.ranks[0]).startswith("UNSHARD0 F0 RESHARD0 UNSHARD1 F1")


def test_messages_go_before_the_reduce():
    program = build_program("1f1b", range(2), 2)
    lowered = with_sharding_actions(lower(program))
    assert words(lowered.ranks[1]).endswith("BW1 SEND1 REDUCE1 STEP-1")
    assert lowered.ranks == lower(with_sharding_actions(program)).ranks


def test_evaluation_reduces_nothing():
    program = with_sharding_actions(
        build_program("gpipe", (0,), 2, forward_only=True), unshard=True
    )
    assert words(program.ranks[0]) == "UNSHARD0 F0 F0 RESHARD0"


def gathers(program, **options):
    sharded = with_sharding_actions(program, unshard=True, **options)
    validate(sharded)
    return [sum(act.kind is Kind.UNSHARD for act in acts) for acts in sharded.ranks]


def test_room_for_few_stages_costs_gathers():
    program = build_program("interleaved_1f1b", loop_placement(4, 16), 32)
    assert gathers(program) == [4, 4, 4, 4]
    counts = [gathers(program, max_unsharded=room)[0] for room in (4, 3, 2, 1)]
    assert counts == sorted(counts)
    assert counts[0] == 4
    assert counts[3] == sum(
        before is None or before.stage != act.stage
        for before, act in zip([None, *program.ranks[0]], program.ranks[0], strict=False)
    )


def test_no_more_stages_are_gathered_than_there_is_room_for():
    zb_v = build_program("zb_v", v_placement(3, 6), 7)
    interleaved = build_program("interleaved_1f1b", loop_placement(2, 8), 4)
    for program, room in ((zb_v, 1), (zb_v, 2), (interleaved, 2), (interleaved, 3)):
        for acts in with_sharding_actions(lower(program), unshard=True, max_unsharded=room).ranks:
            held = 0
            for act in acts:
                held += (act.kind is Kind.UNSHARD) - (act.kind is Kind.RESHARD)
                assert held <= room
            assert held == 0


def test_an_overlapped_pair_needs_both_its_stages():
    program = build_program("dualpipe_v", v_placement(2, 4), 6)
    assert min(gathers(program, max_unsharded=1)) > 2
    assert gathers(program, max_unsharded=2) == [2, 2]
