from fivefold.pipeline.ir import Act, Direction, Kind, Program, loop_placement, v_placement


def test_placements():
    assert loop_placement(3, 6) == (0, 1, 2, 0, 1, 2)
    assert v_placement(3, 6) == (0, 1, 2, 2, 1, 0)
    assert v_placement(2, 6) == (0, 1, 1, 0, 0, 1)


def test_crossings_are_numbered_by_microbatch_and_skip_local_neighbours():
    program = Program((0, 1, 1, 0), 2, ((), ()))
    hops = [
        (m.id, m.mb, m.src_stage, m.dst_stage, m.src_rank, m.dst_rank) for m in program.crossings()
    ]
    assert hops == [
        (0, 0, 0, 1, 0, 1),
        (1, 0, 2, 3, 1, 0),
        (2, 0, 3, 2, 0, 1),
        (3, 0, 1, 0, 1, 0),
        (4, 1, 0, 1, 0, 1),
        (5, 1, 2, 3, 1, 0),
        (6, 1, 3, 2, 0, 1),
        (7, 1, 1, 0, 1, 0),
    ]
    directions = [message.direction for message in program.crossings()[:4]]
    assert directions == [Direction.FORWARD] * 2 + [Direction.BACKWARD] * 2


def test_program_knows_its_sizes():
    acts = (Act(Kind.F, 0), Act(Kind.F, 0, slice=1), Act(Kind.B, 0), Act(Kind.W, 0, part=2))
    program = Program((0, 1, 0), 1, (acts, ()))
    assert (program.num_ranks, program.num_stages) == (2, 3)
    assert (program.num_slices, program.num_weight_parts) == (2, 3)
    assert program.stages_of(0) == (0, 2)


def test_acts_name_themselves():
    pair = Act(Kind.FB, 0, kids=(Act(Kind.F, 0, 1), Act(Kind.BW, 2, 0)))
    assert str(pair) == "F of stage 0 microbatch 1&BW of stage 2 microbatch 0"
    assert str(Act(Kind.REDUCE, 3)) == "REDUCE of stage 3"
    assert str(Act(Kind.STEP, -1)) == "STEP"
