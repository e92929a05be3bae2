import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import ConfigError
from fivefold.pipeline.ir import Kind, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.pipeline.validate import validate


def words(program, rank):
    return " ".join(f"{act.kind}{act.mb}" for act in program.ranks[rank])


def test_gpipe_runs_all_forwards_first():
    program = build_program("gpipe", range(2), 2)
    assert words(program, 0) == words(program, 1) == "F0 F1 BW0 BW1"


def test_one_f_one_b_order():
    program = build_program("1f1b", range(3), 4)
    assert words(program, 0) == "F0 F1 F2 BW0 F3 BW1 BW2 BW3"
    assert words(program, 1) == "F0 F1 BW0 F2 BW1 F3 BW2 BW3"
    assert words(program, 2) == "F0 BW0 F1 BW1 F2 BW2 F3 BW3"


def test_fewer_microbatches_than_ranks():
    program = build_program("1f1b", range(4), 2)
    assert words(program, 0) == "F0 F1 BW0 BW1"
    assert words(program, 2) == "F0 F1 BW0 BW1"
    assert words(program, 3) == "F0 BW0 F1 BW1"


def test_interleaved_follows_the_published_table():
    program = build_program("interleaved_1f1b", loop_placement(2, 4), 4)
    acts = [(str(act.kind), act.stage, act.mb) for act in program.ranks[1]]
    assert acts[:2] == [("F", 1, 0), ("F", 1, 1)]
    assert acts[2:6] == [("F", 3, 0), ("BW", 3, 0), ("F", 3, 1), ("BW", 3, 1)]
    assert acts[6:10] == [("F", 1, 2), ("BW", 1, 0), ("F", 1, 3), ("BW", 1, 1)]
    assert [act[0] for act in acts[-2:]] == ["BW", "BW"]


def test_one_stage_is_gradient_accumulation():
    program = build_program("1f1b", (0,), 3)
    assert words(program, 0) == "F0 BW0 F1 BW1 F2 BW2"
    assert build_program("interleaved_1f1b", (0,), 3) == program
    assert lower(program) == program


@pytest.mark.parametrize("group", [4, 5, 8])
def test_peaks_are_the_published_ones(group):
    ranks, virtual, total = 4, 3, 4 * group
    program = build_program(
        "interleaved_1f1b", loop_placement(ranks, ranks * virtual), total, group_size=group
    )
    assert peak_in_flight(program)[0] == 2 * (ranks - 1) + (virtual - 1) * group + 1
    assert peak_in_flight(build_program("1f1b", range(4), 9)) == (4, 3, 2, 1)
    assert peak_in_flight(build_program("1f1b", range(4), 2)) == (2, 2, 2, 1)
    assert peak_in_flight(build_program("gpipe", range(4), 9)) == (9, 9, 9, 9)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 14), st.integers(1, 14), st.booleans())
def test_interleaved_is_valid_or_refused(ranks, virtual, total, group, forward_only):
    placement = loop_placement(ranks, ranks * virtual)

    def build(total, group):
        return build_program(
            "interleaved_1f1b", placement, total, group_size=group, forward_only=forward_only
        )

    legal = ranks <= group <= total and (total % group == 0 or total % group >= ranks)
    if legal or forward_only:
        program = build(total, group)
        for variant in (program, eager_dx(program)):
            validate(lower(with_sharding_actions(variant, unshard=True)))
        return
    with pytest.raises(ConfigError) as caught:
        build(total, group)
    works = caught.value.mistakes[0].works
    assert works
    for choice in works:
        name, _, value = choice.rpartition(" ")
        if name.endswith("microbatches in groups of"):
            assert total < ranks and group < ranks
            build(int(name.split()[0]), int(value))
            continue
        if name.startswith("--microbatch-group-size"):
            build(total, int(value))
        else:
            build(int(value), group)


@pytest.mark.slow
@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([loop_placement, v_placement]),
    st.booleans(),
)
def test_every_program_is_valid_and_cannot_hang(
    name, ranks, virtual, total, placement, forward_only
):
    stages = ranks if name == "1f1b" else ranks * virtual
    program = build_program(name, placement(ranks, stages), total, forward_only=forward_only)
    for variant in (program, eager_dx(program)):
        validate(variant)
        validate(lower(with_sharding_actions(variant, unshard=True)))
        validate(with_sharding_actions(lower(variant), unshard=True))


def test_evaluation_keeps_the_order_of_the_forwards():
    program = build_program("1f1b", range(2), 3, forward_only=True)
    assert words(program, 0) == words(program, 1) == "F0 F1 F2"
    assert all(message.direction == "forward" for message in program.crossings())
    assert {act.kind for acts in program.ranks for act in acts} == {Kind.F}


@pytest.mark.parametrize(
    ("name", "placement", "total", "group", "reason"),
    [
        ("1f1", (0,), 1, None, "did you mean '1f1b'?"),
        ("1f1b", (0,), 0, None, "at least 1 microbatch, not 0"),
        ("1f1b", (0, 1), 1, 0, "a group needs at least 1"),
        ("1f1b", (0, 2), 1, None, "every rank needs a stage"),
        ("1f1b", (), 1, None, "every rank needs a stage"),
        ("1f1b", (0, 1, 0, 1), 4, None, "here are 4 stages on 2 ranks"),
        ("interleaved_1f1b", (0, 1, 1, 0), 4, None, "the stages lie on ranks 0 1 1 0"),
        ("interleaved_1f1b", (0, 1, 0, 1), 5, None, "5 % 2 = 1 must be 0 or at least 2"),
        ("interleaved_1f1b", (0, 1, 0, 1), 1, None, "2 (ranks) <= 2 <= 1 (microbatches)"),
    ],
)
def test_what_a_schedule_cannot_do(name, placement, total, group, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)):
        build_program(name, placement, total, group_size=group)
