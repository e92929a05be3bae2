from collections import defaultdict, deque
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fivefold.pipeline.ir import Act, Kind, Program, ProgramError, loop_placement
from fivefold.pipeline.lowering import eager_dx, lower
from fivefold.pipeline.schedules.registry import build_program
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.validate import validate


@pytest.fixture
def program():
    """Three ranks, four microbatches, dX before dW, with everything in it."""
    plain = eager_dx(build_program("1f1b", range(3), 4))
    lowered = lower(with_sharding_actions(plain, unshard=True))
    validate(lowered)
    return lowered


def edit(program, rank, change):
    """The program with `change` applied to the list of one rank's acts."""
    acts = list(program.ranks[rank])
    change(acts)
    ranks = list(program.ranks)
    ranks[rank] = tuple(acts)
    return replace(program, ranks=tuple(ranks))


def find(acts, kind, mb=0, direction=None):
    return next(
        i
        for i, act in enumerate(acts)
        if act.kind is kind
        and act.mb == mb
        and (direction is None or act.message.direction == direction)
    )


def drop(kind, mb=0, direction=None):
    return lambda acts: acts.pop(find(acts, kind, mb, direction))


def duplicate(kind, mb=0):
    return lambda acts: acts.append(acts[find(acts, kind, mb)])


def move(kind, to, mb=0, direction=None):
    """Take an act out and put it at an index."""
    return lambda acts: acts.insert(to, acts.pop(find(acts, kind, mb, direction)))


def swap(first, second):
    def change(acts):
        i, j = find(acts, *first), find(acts, *second)
        acts[i], acts[j] = acts[j], acts[i]

    return change


def alter(which, at=0, **fields):
    def change(acts):
        i = find(acts, which, at)
        acts[i] = replace(acts[i], **fields)

    return change


def gather_late(acts):
    acts.insert(find(acts, Kind.F, 1), acts.pop(find(acts, Kind.UNSHARD)))


FAULTS = [
    (0, drop(Kind.F, 2), "F of stage 0 microbatch 2 .*: 0 found, 1 needed"),
    (0, drop(Kind.BW, 3), "B or BW of stage 0 microbatch 3 .*: 0 found, 1 needed"),
    (1, drop(Kind.W, 1), "W part 0 of stage 1 microbatch 1 .*: 0 found, 1 needed"),
    (1, drop(Kind.B, 1), "B or BW of stage 1 microbatch 1 .*: 0 found"),
    (0, duplicate(Kind.F, 2), "F of stage 0 microbatch 2 .*: 2 found"),
    (0, duplicate(Kind.BW, 2), "B or BW of stage 0 microbatch 2 .*: 2 found"),
    (2, duplicate(Kind.W, 2), "W part 0 of stage 2 microbatch 2 .*: 2 found"),
    (0, lambda acts: acts.insert(3, Act(Kind.W, 0, 0)), "W part 0 .*: 1 found, 0 needed"),
    (0, lambda acts: acts.insert(3, Act(Kind.F, 0, 4)), "stage 0 microbatch 4, but there are"),
    (0, lambda acts: acts.insert(3, Act(Kind.F, 3, 0)), "there are 3 stages and 4 microbatches"),
    (0, lambda acts: acts.insert(3, Act(Kind.FB, 0, 0)), r"FB cannot be made of \(\)"),
    (1, alter(Kind.F, 1, kids=(Act(Kind.F, 1),)), r"F cannot be made of \(F\)"),
    (1, lambda acts: acts.extend([Act(Kind.R, 1, 1)] * 2), "R of stage 1 .*: 2 found"),
    (1, lambda acts: acts.append(Act(Kind.R, 1, 1)), "R of .* comes after W of .*"),
    (0, swap((Kind.F, 0), (Kind.BW, 0)), "F of stage 0 microbatch 0 comes after BW"),
    (1, swap((Kind.B, 0), (Kind.W, 0)), "B of stage 1 microbatch 0 comes after W"),
    (1, alter(Kind.F, 1, stage=2), "is on rank 1, but stage 2 lies on rank 2"),
    (1, drop(Kind.SEND, 1, "forward"), "message .* has no SEND"),
    (1, drop(Kind.RECV, 1, "backward"), "message .* has no RECV"),
    (1, duplicate(Kind.SEND, 1), "SEND of message .* stands twice"),
    (1, duplicate(Kind.RECV, 1), "RECV of message .* stands twice"),
    (1, move(Kind.RECV, -1, 1, "forward"), "RECV of message .* follows its consumer"),
    (1, move(Kind.SEND, 0, 1, "backward"), "SEND of message .* precedes its producer"),
    (1, alter(Kind.SEND, 1, message=None), "carries no message of the program"),
    (1, alter(Kind.RECV, 1, kind=Kind.SEND), "SEND of message .* the wrong end"),
    (1, drop(Kind.REDUCE), "REDUCE of stage 1: 0 found, 1 needed"),
    (1, duplicate(Kind.REDUCE), "REDUCE of stage 1: 2 found"),
    (1, move(Kind.REDUCE, -6), "REDUCE of stage 1 precedes"),
    (1, drop(Kind.STEP), "STEP on rank 1: 0 found"),
    (1, swap((Kind.STEP,), (Kind.REDUCE,)), "STEP precedes a REDUCE"),
    (1, drop(Kind.UNSHARD), "runs while the stage is not gathered"),
    (1, gather_late, "F of stage 1 microbatch 0 runs while the stage is not gathered"),
    (0, swap((Kind.BW, 3), (Kind.RESHARD,)), "BW of stage 0 microbatch 3 runs while"),
]


def test_slices_in_causal_order():
    program = build_program("sliced_1f1b", range(2), 2, num_slices=3)
    first, second, *rest = program.ranks[0]
    swapped = replace(program, ranks=((second, first, *rest), program.ranks[1]))
    with pytest.raises(ProgramError, match="does slice 1 where slice 0 is due"):
        validate(swapped)
    last, before = (
        i for i, act in enumerate(rest) if act.kind is Kind.BW and act.mb == 0 and (act.slice > 0)
    )
    rest[last], rest[before] = rest[before], rest[last]
    swapped = replace(program, ranks=((first, second, *rest), program.ranks[1]))
    with pytest.raises(ProgramError, match=r"slice 2 is due: .* backward from the last"):
        validate(swapped)


def test_a_microbatch_belongs_to_one_copy_of_the_model():
    program = build_program("dualpipe", range(2), 4)
    validate(program)
    stray = edit(program, 0, lambda acts: acts.append(Act(Kind.F, 0, 3)))
    with pytest.raises(ProgramError, match="microbatch 3, a microbatch of the other copy"):
        validate(stray)


def test_gathering_twice_and_freeing_what_is_not_there(program):
    with pytest.raises(ProgramError, match="UNSHARD of stage 0, which is gathered"):
        validate(edit(program, 0, lambda acts: acts.insert(1, Act(Kind.UNSHARD, 0))))
    with pytest.raises(ProgramError, match="RESHARD of stage 0, which is not gathered"):
        validate(edit(program, 0, lambda acts: acts.append(Act(Kind.RESHARD, 0))))


@pytest.mark.parametrize(("rank", "change", "reason"), FAULTS)
def test_planted_faults_are_found(program, rank, change, reason):
    with pytest.raises(ProgramError, match=reason):
        validate(edit(program, rank, change))


def test_messages_must_be_those_of_the_placement(program):
    first, *rest = program.messages
    with pytest.raises(ProgramError, match="lacks a message such as message 0"):
        validate(replace(program, messages=tuple(rest)))
    with pytest.raises(ProgramError, match="not one that the placement needs"):
        validate(replace(program, messages=(replace(first, dst_rank=2), *rest)))
    with pytest.raises(ProgramError, match="share an id"):
        validate(replace(program, messages=(replace(first, id=rest[0].id), *rest)))
    with pytest.raises(ProgramError, match="lacks a message"):
        validate(replace(program, messages=()))


def test_a_rank_without_a_stage(program):
    with pytest.raises(
        ProgramError, match=r"lie on ranks \[0, 1, 2\], the program has ranks 0 to 3"
    ):
        validate(replace(program, ranks=(*program.ranks, ())))


def test_compute_order_that_can_never_run():
    plain = build_program("gpipe", range(2), 2)
    backwards_first = edit(plain, 1, lambda acts: acts.__setitem__(slice(0, 2), acts[1::-1]))
    validate(backwards_first)  # rank 1 may take microbatch 1 first
    crossed = build_program("1f1b", range(2), 2)
    crossed = edit(crossed, 0, swap((Kind.F, 1), (Kind.BW, 0)))
    crossed = edit(crossed, 1, lambda acts: acts.sort(key=lambda act: -act.mb))
    with pytest.raises(ProgramError, match="circular wait"):
        validate(crossed)


def hand_made(first, second):
    """Two microbatches forward through stages 0 and 2 on rank 0 and 1 on rank 1, as written."""
    placement = (0, 1, 0)
    messages = Program(placement, 2, ((), ()), forward_only=True).crossings()
    table = {(m.mb, m.src_stage): m for m in messages}

    def act(word):
        kind, stage, mb = word.split(".")
        stage, mb = int(stage), int(mb)
        if kind == "F":
            return Act(Kind.F, stage, mb)
        message = table[mb, stage if kind == "SEND" else stage - 1]
        return Act(Kind(kind), stage, mb, message=message)

    ranks = tuple(tuple(act(word) for word in words.split()) for words in (first, second))
    return Program(placement, 2, ranks, messages, forward_only=True)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (  # rank 0 issues its receive of the first answer before it sends the second question
            "F.0.0 SEND.0.0 RECV.2.0 F.0.1 SEND.0.1 RECV.2.1 F.2.0 F.2.1",
            "RECV.1.0 F.1.0 RECV.1.1 F.1.1 SEND.1.0 SEND.1.1",
        ),
        (  # it sends the questions in another order than they are received
            "F.0.0 F.0.1 SEND.0.1 SEND.0.0 RECV.2.0 RECV.2.1 F.2.0 F.2.1",
            "RECV.1.0 RECV.1.1 F.1.0 F.1.1 SEND.1.0 SEND.1.1",
        ),
    ],
)
def test_messages_in_an_order_that_can_hang_are_refused(first, second):
    with pytest.raises(ProgramError, match=r"dead-lock, a circular wait: .*message"):
        validate(hand_made(first, second))


@given(st.integers(0, 2), st.data())
def test_no_act_of_a_step_can_be_missing(rank, data):
    lowered = lower(with_sharding_actions(eager_dx(build_program("1f1b", range(3), 3))))
    index = data.draw(st.integers(0, len(lowered.ranks[rank]) - 1))
    with pytest.raises(ProgramError):
        validate(edit(lowered, rank, lambda acts: acts.pop(index)))


def everything(message, rank):
    return rank


def by_pair(message, rank):
    return rank, message.src_rank + message.dst_rank


def by_pair_and_direction(message, rank):
    return *by_pair(message, rank), message.src_rank == rank


def hangs(program, shared):
    """Play a lowered program: a transfer starts when it heads the FIFO streams of both its ends."""
    at = [0] * program.num_ranks
    computed, arrived = set(), set()
    streams = defaultdict(deque)

    def ready(act):
        forward = act.kind is Kind.F
        if act.kind is Kind.W:
            return True
        direction, other = ("forward", -1) if forward else ("backward", 1)
        source = act.stage + other
        if source not in range(program.num_stages):
            return True
        if program.placement[source] == program.placement[act.stage]:
            return (direction, source, act.mb) in computed
        return (direction, source, act.mb) in arrived

    moved = True
    while moved:
        moved = False
        for rank, acts in enumerate(program.ranks):
            while at[rank] < len(acts):
                act = acts[at[rank]]
                if act.message:
                    streams[shared(act.message, rank)].append(act.message)
                elif ready(act):
                    computed.add(
                        ("forward" if act.kind is Kind.F else "backward", act.stage, act.mb)
                    )
                else:
                    break
                at[rank] += 1
                moved = True
        for message in program.messages:
            ends = [streams[shared(message, r)] for r in (message.src_rank, message.dst_rank)]
            if all(queue and queue[0] == message for queue in ends):
                for queue in ends:
                    queue.popleft()
                arrived.add((message.direction, message.src_stage, message.mb))
                moved = True
    return at != [len(acts) for acts in program.ranks]


@settings(max_examples=120)
@given(st.sampled_from(["gpipe", "interleaved_1f1b"]), st.booleans(), st.data())
def test_the_verdict_is_that_of_playing_the_program(name, eager, data):
    """Messages moved about at random: where only the order is at fault, graph and play agree."""
    ranks = data.draw(st.integers(2, 3))
    program = build_program(name, loop_placement(ranks, 2 * ranks), ranks)
    changed = lower(eager_dx(program) if eager else program)
    for _ in range(data.draw(st.integers(0, 4))):
        rank = data.draw(st.integers(0, ranks - 1))
        acts = changed.ranks[rank]
        source = data.draw(st.sampled_from([i for i, act in enumerate(acts) if act.message]))
        target = min(max(source + data.draw(st.integers(-3, 3)), 0), len(acts) - 1)
        changed = edit(changed, rank, move_index(source, target))
    try:
        validate(changed)
        verdict = False
    except ProgramError as error:
        if "dead-lock" not in str(error):
            return
        verdict = True
    played = [hangs(changed, shared) for shared in (everything, by_pair, by_pair_and_direction)]
    assert verdict == played[0]
    assert played == sorted(played, reverse=True)  # what shares less hangs less
    event(f"hangs where {sum(played)} kinds of messages wait for each other")


def move_index(source, target):
    return lambda acts: acts.insert(target, acts.pop(source))
