"""Random programs, each with one planted fault: all are rejected, for the right reason."""

from dataclasses import replace
from random import Random

import pytest

from fivefold.errors import ConfigError
from fivefold.pipeline.holding import with_recompute
from fivefold.pipeline.ir import COMPUTE, Kind, ProgramError, loop_placement, v_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.validate import validate
from tests.pipeline.test_validate import edit

BACKWARD = (Kind.B, Kind.BW)


def random_program(random):
    """Any schedule, size and options, with everything in it."""
    while True:
        name = random.choice(list(SCHEDULES))
        ranks, total = random.randint(2, 4), random.randint(1, 10)
        match SCHEDULES[name].shape:
            case Shape.V:
                placement = v_placement(ranks, 2 * ranks)
            case Shape.LINE:
                placement = loop_placement(ranks, ranks)
            case _:
                placement = loop_placement(ranks, ranks * random.randint(1, 3))
        slices = random.randint(2, 3) if SCHEDULES[name].slices else 1
        try:
            program = build_program(name, placement, total, num_slices=slices)
        except ConfigError:
            continue
        program = eager_dx(program) if random.random() < 0.5 else program
        if random.random() < 0.5:
            program = with_recompute(program, random.randint(1, 3))
        room = random.choice((None, 2, 3))
        return with_sharding_actions(lower(program), unshard=True, max_unsharded=room)


def places(program, wanted):
    """(rank, index) of every act that is wanted."""
    return [
        (rank, index)
        for rank, acts in enumerate(program.ranks)
        for index, act in enumerate(acts)
        if wanted(act)
    ]


def kinds(*wanted):
    return lambda act: act.kind in wanted


def dropped(program, random):
    """Anything but R and RESHARD, which may be left out."""
    rank, index = random.choice(places(program, lambda act: act.kind not in (Kind.R, Kind.RESHARD)))
    return edit(program, rank, lambda acts: acts.pop(index)), "found|has no|not gathered|is due"


def doubled(program, random):
    rank, index = random.choice(
        places(program, lambda act: act.kind in COMPUTE | {Kind.SEND, Kind.RECV})
    )
    again = program.ranks[rank][index]
    return edit(program, rank, lambda acts: acts.insert(index, again)), "found|twice"


def misplaced(program, random):
    """On a rank that does not hold the stage."""
    rank, index = random.choice(places(program, kinds(*COMPUTE)))
    act = program.ranks[rank][index]
    other = (rank + random.randint(1, program.num_ranks - 1)) % program.num_ranks
    program = edit(program, rank, lambda acts: acts.pop(index))
    return edit(program, other, lambda acts: acts.insert(index, act)), "but stage .* lies on"


def backward_first(program, random):
    """A backward in the place of its own forward, and the other way round."""
    rank, index = random.choice(places(program, kinds(*BACKWARD)))
    acts = program.ranks[rank]
    stage, mb, piece = acts[index].stage, acts[index].mb, acts[index].slice
    forward = next(
        i
        for i, act in enumerate(acts)
        if any(
            (kid.kind, kid.stage, kid.mb, kid.slice) == (Kind.F, stage, mb, piece)
            for kid in act.elementary
        )
    )

    def swap(acts):
        acts[index], acts[forward] = acts[forward], acts[index]

    return edit(program, rank, swap), "it must come before|slice .* is due"


def too_many(program, random):
    rank, index = random.choice(places(program, lambda act: act.kind in COMPUTE and not act.kids))
    act = replace(program.ranks[rank][index], mb=program.num_microbatches)
    return edit(program, rank, lambda acts: acts.insert(index, act)), "but there are"


def received_late(program, random):
    rank, index = random.choice(places(program, kinds(Kind.RECV)))
    return (
        edit(program, rank, lambda acts: acts.append(acts.pop(index))),
        "follows its consumer",
    )


def sent_early(program, random):
    rank, index = random.choice(places(program, kinds(Kind.SEND)))
    return (
        edit(program, rank, lambda acts: acts.insert(0, acts.pop(index))),
        "precedes its producer",
    )


def wrong_end(program, random):
    rank, index = random.choice(places(program, kinds(Kind.SEND, Kind.RECV)))
    act = program.ranks[rank][index]
    other = replace(act, kind=Kind.RECV if act.kind is Kind.SEND else Kind.SEND)
    return edit(program, rank, lambda acts: acts.__setitem__(index, other)), "the wrong end|has no"


def nothing_sent(program, random):
    rank, index = random.choice(places(program, kinds(Kind.SEND, Kind.RECV)))
    empty = replace(program.ranks[rank][index], message=None)
    return edit(program, rank, lambda acts: acts.__setitem__(index, empty)), "carries no message"


def reduced_early(program, random):
    rank, index = random.choice(places(program, kinds(Kind.REDUCE)))
    return edit(program, rank, lambda acts: acts.insert(0, acts.pop(index))), "REDUCE .* precedes"


def stepped_early(program, random):
    rank, index = random.choice(places(program, kinds(Kind.STEP)))
    return edit(program, rank, lambda acts: acts.insert(0, acts.pop(index))), "precedes a REDUCE"


def freed_early(program, random):
    """The last RESHARD of a stage before its last act."""
    rank, index = random.choice(places(program, kinds(Kind.RESHARD)))
    acts = program.ranks[rank]
    stage = acts[index].stage
    last = max(
        i
        for i, act in enumerate(acts[:index])
        if act.kind in COMPUTE and any(kid.stage == stage for kid in act.elementary)
    )
    return (
        edit(program, rank, lambda acts: acts.insert(last, acts.pop(index))),
        "is not gathered",
    )


def waits_in_a_circle(program, random):
    """A rank that waits for an answer before it has sent the question."""
    backward = places(
        program, lambda act: act.kind is Kind.RECV and act.message.direction == "backward"
    )
    rank, index = random.choice(backward)
    return edit(program, rank, lambda acts: acts.insert(0, acts.pop(index))), "dead-lock"


FAULTS = (
    dropped,
    doubled,
    misplaced,
    backward_first,
    too_many,
    received_late,
    sent_early,
    wrong_end,
    nothing_sent,
    reduced_early,
    stepped_early,
    freed_early,
    waits_in_a_circle,
)


@pytest.mark.parametrize(
    "seeds",
    [
        range(300),
        pytest.param(range(300, 2_000), marks=pytest.mark.exhaustive),
        pytest.param(range(2_000, 10_000), marks=pytest.mark.exhaustive),
    ],
    ids=["quick", "many", "all"],
)
def test_planted_faults_are_rejected_with_the_reason(seeds):
    for seed in seeds:
        random = Random(seed)
        program = random_program(random)
        validate(program)
        plant = FAULTS[seed % len(FAULTS)]
        faulty, reason = plant(program, random)
        with pytest.raises(ProgramError, match=reason):
            validate(faulty)
