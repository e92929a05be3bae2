"""Validates a program: correct, and free of deadlock. There are six rules.

1. Each stage runs each microbatch (and slice) once: F, and BW or B with all parts of W.
2. On a rank, F precedes R precedes B precedes W; the slices of a sequence run forward from the
   first to the last, and backward from the last to the first.
3. Every stage's actions are on the stage's rank.
4. Both ends of every message exist; SEND follows its producer, RECV precedes its consumer.
5. UNSHARD covers the actions that read parameters, REDUCE follows the stage's last W, STEP follows
   all REDUCEs.
6. There is no circular wait (see `graph`).
"""

from collections import Counter
from collections.abc import Hashable, Iterator

from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import (
    COMMUNICATION,
    COMPUTE,
    READS_PARAMETERS,
    Act,
    Direction,
    Kind,
    Message,
    Program,
    ProgramError,
)


def validate(program: Program) -> None:
    """Check all six rules.

    In a compute-only program, rules 4 and 6 consider the messages that the placement implies; in a
    lowered program also their order, as if each rank had one stream for all of its messages: what
    cannot hang there cannot where a pair of ranks, or each direction of a pair, has one of its own.

    Raises:
        ProgramError: the first broken rule, with the action, stage, microbatch and rank.
    """
    _check_bounds(program)
    _check_ranks(program)
    _check_once(program)
    _check_local_order(program)
    _check_causal(program)
    lowered = any(act.kind in COMMUNICATION for acts in program.ranks for act in acts)
    lowered = lowered or bool(program.messages)
    if lowered:
        _check_messages(program)
    for rank, acts in enumerate(program.ranks):
        _check_unsharded(rank, acts)
    if not program.forward_only:
        _check_reductions(program)
    dependency_graph(program, one_stream=lowered).order()


def _acts(program: Program) -> Iterator[tuple[int, int, Act]]:
    """(rank, index in its order, action), with the halves of an FB one by one."""
    for rank, acts in enumerate(program.ranks):
        for place, act in enumerate(acts):
            for kid in act.elementary:
                yield rank, place, kid


def _check_bounds(program: Program) -> None:
    """Every action names an existing stage and microbatch, and every FB has two halves."""
    if set(program.placement) != set(range(program.num_ranks)):
        raise ProgramError(
            f"the stages lie on ranks {sorted(set(program.placement))}, "
            f"the program has ranks 0 to {program.num_ranks - 1}"
        )
    for rank, acts in enumerate(program.ranks):
        for act in acts:
            halves = tuple(kid.kind for kid in act.kids)
            legal = ((Kind.F, Kind.BW), (Kind.F, Kind.B)) if act.kind is Kind.FB else ((),)
            if halves not in legal:
                raise ProgramError(
                    f"rank {rank}: {act.kind} cannot be made of ({', '.join(halves)})"
                )
    for rank, _, act in _acts(program):
        stages = range(-1, 0) if act.kind is Kind.STEP else range(program.num_stages)
        if act.stage not in stages or act.mb not in range(program.num_microbatches):
            raise ProgramError(
                f"rank {rank}: {act.kind} of stage {act.stage} microbatch {act.mb}, but there are "
                f"{program.num_stages} stages and {program.num_microbatches} microbatches"
            )
        if act.kind in COMPUTE and act.stage not in program.path(act.mb):
            raise ProgramError(f"rank {rank}: {act}, a microbatch of the other copy of the model")


def _check_ranks(program: Program) -> None:
    """Rule 3."""
    for rank, _, act in _acts(program):
        if act.kind is not Kind.STEP and program.placement[act.stage] != rank:
            raise ProgramError(
                f"{act} is on rank {rank}, but stage {act.stage} lies on rank "
                f"{program.placement[act.stage]}"
            )


def _check_once(program: Program) -> None:
    """Rule 1."""
    count = Counter(
        (act.kind, act.stage, act.mb, act.slice, act.part if act.kind is Kind.W else 0)
        for _, _, act in _acts(program)
        if act.kind in COMPUTE
    )
    backwards = 0 if program.forward_only else 1
    for piece in _pieces(program):
        where = "of stage {} microbatch {} slice {}".format(*piece)
        halves = count[Kind.B, *piece, 0]
        _expect(count[Kind.F, *piece, 0], 1, "F", where)
        _expect(halves + count[Kind.BW, *piece, 0], backwards, "B or BW", where)
        for part in range(program.num_weight_parts):
            _expect(count[Kind.W, *piece, part], halves, f"W part {part}", where)
        recomputes = count[Kind.R, *piece, 0]
        _expect(recomputes, min(recomputes, backwards), "R", where)


def _expect(found: int, wanted: int, kind: str, where: str) -> None:
    if found != wanted:
        raise ProgramError(f"{kind} {where}: {found} found, {wanted} needed")


def _pieces(program: Program) -> Iterator[tuple[int, int, int]]:
    """Every (stage, microbatch, slice)."""
    for mb in range(program.num_microbatches):
        for stage in program.path(mb):
            for piece in range(program.num_slices):
                yield stage, mb, piece


_PHASE = {Kind.F: 0, Kind.R: 1, Kind.B: 2, Kind.BW: 2, Kind.W: 3}


def _check_local_order(program: Program) -> None:
    """Rule 2. An FB's halves overlap, so they must be different (stage, microbatch, slice)s."""
    last: dict[tuple[int, int, int], tuple[int, Act]] = {}
    for rank, place, act in _acts(program):
        if act.kind not in _PHASE:
            continue
        before_place, before = last.get(act.piece, (-1, None))
        if before and (place == before_place or _PHASE[act.kind] < _PHASE[before.kind]):
            raise ProgramError(f"rank {rank}: {act} comes after {before}, it must come before")
        last[act.piece] = (place, act)


def _check_causal(program: Program) -> None:
    """Rule 2 for slices: all slices of a stage are on one rank, so its order decides."""
    last = program.num_slices - 1
    due = {
        (forward, *piece[:2]): 0 if forward else last
        for piece in _pieces(program)
        for forward in (True, False)
    }
    for rank, _, act in _acts(program):
        if act.direction is None:
            continue
        forward = act.direction is Direction.FORWARD
        where = (forward, act.stage, act.mb)
        if act.slice != due[where]:
            raise ProgramError(
                f"rank {rank}: {act} does slice {act.slice} where slice {due[where]} is due: "
                "forward from the first to the last, backward from the last to the first"
            )
        due[where] += 1 if forward else -1


def _check_messages(program: Program) -> None:
    """Rule 4."""
    expected = {_content(message): message for message in program.crossings()}
    found = {_content(message) for message in program.messages}
    for message in program.messages:
        if _content(message) not in expected:
            raise ProgramError(f"{message} is not one that the placement needs")
    for content, message in expected.items():
        if content not in found:
            raise ProgramError(f"the program lacks a message such as {message}")
    if not len({m.id for m in program.messages}) == len(found) == len(program.messages):
        raise ProgramError("two messages are the same, or share an id")
    sends, receives = _ends(program, Kind.SEND), _ends(program, Kind.RECV)
    places = {
        (act.direction, act.stage, act.mb, act.slice): place
        for _, place, act in _acts(program)
        if act.direction
    }
    for message in program.messages:
        piece = (message.mb, message.slice)
        if sends[message.id] < places[message.direction, message.src_stage, *piece]:
            raise ProgramError(f"rank {message.src_rank}: SEND of {message} precedes its producer")
        if receives[message.id] > places[message.direction, message.dst_stage, *piece]:
            raise ProgramError(f"rank {message.dst_rank}: RECV of {message} follows its consumer")


def _content(message: Message) -> Hashable:
    """All fields of a message except its id."""
    ends = (message.src_rank, message.dst_rank, message.src_stage, message.dst_stage)
    return (*ends, message.mb, message.slice, message.direction)


def _ends(program: Program, kind: Kind) -> dict[int, int]:
    """Message id -> index of its one SEND (or RECV) in the order of its rank."""
    known = {message.id: message for message in program.messages}
    places: dict[int, int] = {}
    for rank, place, act in _acts(program):
        if act.kind is not kind:
            continue
        message = act.message
        if message is None or known.get(message.id) != message:
            raise ProgramError(f"rank {rank}: {act} carries no message of the program")
        if kind is Kind.SEND:
            end = (message.src_rank, message.src_stage)
        else:
            end = (message.dst_rank, message.dst_stage)
        if (rank, act.stage) != end:
            raise ProgramError(
                f"{kind} of {message} stands on rank {rank} for stage {act.stage}: the wrong end"
            )
        if message.id in places:
            raise ProgramError(f"rank {rank}: {kind} of {message} stands twice")
        places[message.id] = place
    for message in program.messages:
        if message.id not in places:
            raise ProgramError(f"{message} has no {kind}")
    return places


def _check_unsharded(rank: int, acts: tuple[Act, ...]) -> None:
    """Rule 5 for parameters: a stage with an UNSHARD is read only while it is gathered."""
    managed = {act.stage for act in acts if act.kind in (Kind.UNSHARD, Kind.RESHARD)}
    gathered: set[int] = set()
    for act in acts:
        if act.kind in (Kind.UNSHARD, Kind.RESHARD):
            if (act.kind is Kind.UNSHARD) is (act.stage in gathered):
                state = "is" if act.stage in gathered else "is not"
                raise ProgramError(f"rank {rank}: {act}, which {state} gathered")
            gathered ^= {act.stage}
        elif act.kind in COMPUTE:
            for kid in act.elementary:
                if kid.kind in READS_PARAMETERS and kid.stage in managed - gathered:
                    raise ProgramError(f"rank {rank}: {kid} runs while the stage is not gathered")


def _check_reductions(program: Program) -> None:
    """Rule 5 for gradients: a program that reduces or steps at all does so completely."""
    count = Counter(
        (act.kind, act.stage if act.kind is Kind.REDUCE else rank)
        for rank, _, act in _acts(program)
        if act.kind in (Kind.REDUCE, Kind.STEP)
    )
    if not count:
        return
    for stage in range(program.num_stages):
        _expect(count[Kind.REDUCE, stage], 1, "REDUCE", f"of stage {stage}")
    for rank, acts in enumerate(program.ranks):
        _expect(count[Kind.STEP, rank], 1, "STEP", f"on rank {rank}")
        reduced: set[int] = set()
        for act in acts:
            if act.kind is Kind.REDUCE:
                reduced.add(act.stage)
            elif act.kind is Kind.STEP and reduced != set(program.stages_of(rank)):
                raise ProgramError(f"rank {rank}: STEP precedes a REDUCE")
            for kid in act.elementary:
                if kid.stage in reduced and kid.kind in (Kind.B, Kind.W, Kind.BW):
                    raise ProgramError(f"rank {rank}: REDUCE of stage {kid.stage} precedes {kid}")
