"""Is this program right, does it fit, and can it not hang? Seven rules.

1. Each stage does each microbatch (and slice) once: F, and BW or B with all parts of W.
2. On a rank, F before R before B before W.
3. Every stage is worked on by its own rank.
4. Both ends of every message exist; SEND after its producer, RECV before its consumer.
5. What is held for backward stays under the cap.
6. UNSHARD covers the compute acts, REDUCE follows the stage's last W, STEP follows all REDUCEs.
7. No circular wait (see `graph`).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.pipeline.graph import Stream, dependency_graph
from fivefold.pipeline.ir import (
    COMMUNICATION,
    COMPUTE,
    Act,
    Direction,
    Kind,
    Message,
    Program,
    ProgramError,
)
from fivefold.pipeline.simulate import peak_in_flight


@dataclass(frozen=True)
class MemoryCap:
    """A limit on what a rank holds for backward; arguments as in `peak_in_flight`."""

    cap: float
    activations: tuple[float, ...] | None = None
    freed_by_b: float = 0.0


def validate(
    program: Program, *, stream: Stream = Stream.RANK, memory: MemoryCap | None = None
) -> None:
    """Check all seven rules.

    A compute-only program is checked without its messages' order (rules 4 and 7 see the messages
    that the placement implies); a lowered one with it.

    Args:
        program: compute-only or lowered.
        stream: what shares a communication stream. A program that passes with RANK passes with
            PAIR, and one that passes with PAIR passes with PAIR_AND_DIRECTION.
        memory: the cap of rule 5; None leaves the rule out.

    Raises:
        ProgramError: the first broken rule, with the act, stage, microbatch and rank.
    """
    _check_bounds(program)
    _check_ranks(program)
    _check_once(program)
    _check_local_order(program)
    lowered = any(act.kind in COMMUNICATION for acts in program.ranks for act in acts)
    lowered = lowered or bool(program.messages)
    if lowered:
        _check_messages(program)
    if memory is not None:
        _check_memory(program, memory)
    for rank, acts in enumerate(program.ranks):
        _check_unsharded(rank, acts)
    if not program.forward_only:
        _check_reductions(program)
    dependency_graph(program, stream if lowered else None).order()


def _acts(program: Program) -> Iterator[tuple[int, int, Act]]:
    """(rank, place in its order, act), with the halves of an FB one by one."""
    for rank, acts in enumerate(program.ranks):
        for place, act in enumerate(acts):
            for kid in act.elementary:
                yield rank, place, kid


def _check_bounds(program: Program) -> None:
    """Every act names a stage and a microbatch that exist, and every FB two halves."""
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
                raise ProgramError(f"rank {rank}: {act.kind} cannot be made of {halves}")
    for rank, _, act in _acts(program):
        stages = range(-1, 0) if act.kind is Kind.STEP else range(program.num_stages)
        if act.stage not in stages or act.mb not in range(program.num_microbatches):
            raise ProgramError(
                f"rank {rank}: {act.kind} of stage {act.stage} microbatch {act.mb}, but there are "
                f"{program.num_stages} stages and {program.num_microbatches} microbatches"
            )


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
        (act.kind, act.stage, act.mb, act.slice, act.part)
        for _, _, act in _acts(program)
        if act.kind in COMPUTE
    )
    for stage, mb, piece in _pieces(program):

        def times(kind: Kind, part: int = 0, at: tuple[int, int, int] = (stage, mb, piece)) -> int:
            return count[(kind, *at, part)]

        where = f"of stage {stage} microbatch {mb}" + (f" slice {piece}" if piece else "")
        _expect(times(Kind.F), 1, f"F {where}")
        _expect(times(Kind.B) + times(Kind.BW), 0 if program.forward_only else 1, f"B {where}")
        for part in range(program.num_weight_parts):
            name = f"W {where}" + (f" part {part}" if part else "")
            _expect(times(Kind.W, part), times(Kind.B), name)
        if times(Kind.R) > 1:
            _expect(times(Kind.R), 1, f"R {where}")
    strays = [act for _, _, act in _acts(program) if act.part and act.kind is not Kind.W]
    if strays:
        raise ProgramError(f"{strays[0]} has part {strays[0].part}, but only W comes in parts")


def _expect(found: int, wanted: int, what: str) -> None:
    if found != wanted:
        raise ProgramError(f"{what}: {found} found, {wanted} needed")


def _pieces(program: Program) -> Iterator[tuple[int, int, int]]:
    """Every (stage, microbatch, slice)."""
    for stage in range(program.num_stages):
        for mb in range(program.num_microbatches):
            for piece in range(program.num_slices):
                yield stage, mb, piece


_PHASE = {Kind.F: 0, Kind.R: 1, Kind.B: 2, Kind.BW: 2, Kind.W: 3}


def _check_local_order(program: Program) -> None:
    """Rule 2. Also FB: its halves run at once, so they belong to different pieces."""
    last: dict[tuple[int, int, int], tuple[int, Act]] = {}
    for rank, place, act in _acts(program):
        if act.kind not in _PHASE:
            continue
        before_place, before = last.get((act.stage, act.mb, act.slice), (-1, None))
        if before and (place == before_place or _PHASE[act.kind] < _PHASE[before.kind]):
            raise ProgramError(f"rank {rank}: {act} comes after {before}, it must come before")
        last[act.stage, act.mb, act.slice] = (place, act)


def _check_messages(program: Program) -> None:
    """Rule 4."""
    expected = {replace(message, id=0) for message in program.crossings()}
    found = {replace(message, id=0) for message in program.messages}
    for message in program.messages:
        if replace(message, id=0) not in expected:
            raise ProgramError(f"{message} is not one that the placement needs")
    if expected - found:
        missing = min(expected - found, key=lambda m: (m.mb, m.src_stage))
        raise ProgramError(f"a needed message is missing: {str(missing).partition('(')[2][:-1]}")
    if len({message.id for message in program.messages}) != len(program.messages) or len(
        found
    ) != len(program.messages):
        raise ProgramError("two messages are the same, or share an id")
    sends, receives = _ends(program, Kind.SEND), _ends(program, Kind.RECV)
    places = {
        (_direction(act), act.stage, act.mb, act.slice): place
        for _, place, act in _acts(program)
        if act.kind in (Kind.F, Kind.B, Kind.BW)
    }
    for message in program.messages:
        piece = (message.mb, message.slice)
        if sends[message] < places[message.direction, message.src_stage, *piece]:
            raise ProgramError(f"rank {message.src_rank}: SEND of {message} precedes its producer")
        if receives[message] > places[message.direction, message.dst_stage, *piece]:
            raise ProgramError(f"rank {message.dst_rank}: RECV of {message} follows its consumer")


def _direction(act: Act) -> Direction:
    return Direction.FORWARD if act.kind is Kind.F else Direction.BACKWARD


def _ends(program: Program, kind: Kind) -> dict[Message, int]:
    """The place of the one SEND (or RECV) of every message in the order of its rank."""
    known = set(program.messages)
    places: dict[Message, int] = {}
    for rank, place, act in _acts(program):
        if act.kind is not kind:
            continue
        message = act.message
        if message is None or message not in known:
            raise ProgramError(f"rank {rank}: {act} carries no message of the program")
        if rank != (message.src_rank if kind is Kind.SEND else message.dst_rank):
            raise ProgramError(f"rank {rank}: {kind} of {message}, which is not this rank's")
        if message in places:
            raise ProgramError(f"rank {rank}: {kind} of {message} stands twice")
        places[message] = place
    for message in program.messages:
        if message not in places:
            raise ProgramError(f"{message} has no {kind}")
    return places


def _check_memory(program: Program, memory: MemoryCap) -> None:
    """Rule 5."""
    peaks = peak_in_flight(program, memory.activations, memory.freed_by_b)
    for rank, peak in enumerate(peaks):
        if peak > memory.cap:
            raise ProgramError(f"rank {rank} holds {peak:g} at its peak, the cap is {memory.cap:g}")


def _check_unsharded(rank: int, acts: tuple[Act, ...]) -> None:
    """Rule 6, parameters: once a stage has an UNSHARD, all its compute lies between the two."""
    managed = {act.stage for act in acts if act.kind in (Kind.UNSHARD, Kind.RESHARD)}
    gathered: set[int] = set()
    for act in acts:
        if act.kind is Kind.UNSHARD:
            gathered.add(act.stage)
        elif act.kind is Kind.RESHARD:
            gathered.discard(act.stage)
        elif act.kind in COMPUTE:
            for kid in act.elementary:
                if kid.stage in managed - gathered:
                    raise ProgramError(f"rank {rank}: {kid} runs while the stage is not gathered")


def _check_reductions(program: Program) -> None:
    """Rule 6, gradients: when the program reduces or steps at all, it does so completely."""
    count = Counter(
        (act.kind, act.stage if act.kind is Kind.REDUCE else rank)
        for rank, _, act in _acts(program)
        if act.kind in (Kind.REDUCE, Kind.STEP)
    )
    if not count:
        return
    for stage in range(program.num_stages):
        _expect(count[Kind.REDUCE, stage], 1, f"REDUCE of stage {stage}")
    for rank, acts in enumerate(program.ranks):
        _expect(count[Kind.STEP, rank], 1, f"STEP on rank {rank}")
        reduced: set[int] = set()
        for act in acts:
            if act.kind is Kind.REDUCE:
                reduced.add(act.stage)
            elif act.kind is Kind.STEP and reduced != set(program.stages_of(rank)):
                raise ProgramError(f"rank {rank}: STEP precedes a REDUCE")
            elif act.kind in COMPUTE:
                for kid in act.elementary:
                    if kid.stage in reduced and kid.kind in (Kind.B, Kind.W, Kind.BW):
                        raise ProgramError(
                            f"rank {rank}: REDUCE of stage {kid.stage} precedes {kid}"
                        )
