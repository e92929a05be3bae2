"""Trade time for memory: keep the activations of few microbatches, and make the others' again."""

from dataclasses import replace

from fivefold.pipeline.ir import COMPUTE, Act, Kind, Program

_Piece = tuple[int, int]  # stage, microbatch


def with_recompute(program: Program, limit: int) -> Program:
    """Let no rank hold the activations of more than `limit` microbatches of its stages at a time.

    A microbatch that is kept is held from its forward to its dX, one that is recomputed only from
    the R that stands right before its backward. The fewest that can be are recomputed, and of
    those that could be, the ones whose backward comes last.

    Args:
        program: compute-only; lower it afterwards, so that R does not wait for messages.
        limit: microbatches held at most, at least 1 (2 where acts overlap), each stage's counted.
    """
    if program.forward_only:
        return program
    return replace(program, ranks=tuple(_limited(acts, limit) for acts in program.ranks))


def _limited(acts: tuple[Act, ...], limit: int) -> tuple[Act, ...]:
    again = _recomputed([act for act in acts if act.kind in COMPUTE], limit)
    result: list[Act] = []
    for act in acts:
        result += [
            replace(kid, kind=Kind.R)
            for kid in act.elementary
            if kid.kind in _BACKWARD and (kid.stage, kid.mb) in again
        ]
        result.append(act)
    return tuple(result)


_BACKWARD = (Kind.B, Kind.BW)


def _recomputed(acts: list[Act], limit: int) -> set[_Piece]:
    """What a rank cannot keep.

    Each forward is kept at first. Whenever more are held than may be, the one that would be held
    for longest is given up: as for a cache (Belady, 1966), nothing else gives up fewer.
    """
    ends: dict[_Piece, int] = {}  # where the last dX of each is computed
    for place, act in enumerate(acts):
        ends |= {(kid.stage, kid.mb): place for kid in act.elementary if kid.kind in _BACKWARD}
    held: set[_Piece] = set()  # kept, and not yet in their backward
    running: set[_Piece] = set()  # in their backward, kept or made again
    again: set[_Piece] = set()
    for place, act in enumerate(acts):
        for kid in act.elementary:
            piece = kid.stage, kid.mb
            if kid.kind is Kind.F and piece not in again:
                held.add(piece)
            elif kid.kind in _BACKWARD:
                held.discard(piece)
                running.add(piece)
        while held and len(held) + len(running) > limit:
            longest = max(held, key=ends.__getitem__)
            held.remove(longest)
            again.add(longest)
        running = {piece for piece in running if ends[piece] > place}
    return again
