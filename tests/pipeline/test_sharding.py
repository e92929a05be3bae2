from fivefold.pipeline.ir import loop_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions


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
        "UNSHARD0 F0 UNSHARD1 F1 BW1 RESHARD1 REDUCE1 BW0 RESHARD0 REDUCE0 STEP-1"
    )


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
