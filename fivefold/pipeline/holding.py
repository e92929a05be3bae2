"""Trades time for memory: keeps the activations of few microbatches and recomputes the others."""

from dataclasses import replace

from fivefold.pipeline.ir import COMPUTE, Act, Direction, Kind, Program

_Piece = tuple[int, int]  # stage, microbatch


def with_recompute(program: Program, limit: int) -> Program:
    """Limit each rank to the activations of `limit` microbatches of its stages at a time.

    A kept microbatch is held from its forward to its dX, a recomputed one only from the R right
    before its backward. As few as possible are recomputed; of the candidates, those whose backward
    comes last.

    Args:
        program: compute-only program; lower it afterwards, so that R does not wait for messages.
        limit: maximum number of microbatches held, at least 1 (2 where actions overlap), summed
            over the rank's stages.
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
            if kid.direction is Direction.BACKWARD and (kid.stage, kid.mb) in again
        ]
        result.append(act)
    return tuple(result)


def _recomputed(acts: list[Act], limit: int) -> set[_Piece]:
    """The (stage, microbatch) pairs that a rank must recompute.

    Every forward is kept at first. Whenever more than `limit` are held, the one with the latest
    backward is given up, which gives up the fewest, as for a cache (Belady, 1966).
    """
    ends: dict[_Piece, int] = {}  # index of the last dX of each
    for place, act in enumerate(acts):
        for kid in act.elementary:
            if kid.direction is Direction.BACKWARD:
                ends[kid.stage, kid.mb] = place
    held: set[_Piece] = set()  # kept, backward not started
    running: set[_Piece] = set()  # in their backward, kept or recomputed
    again: set[_Piece] = set()
    for place, act in enumerate(acts):
        for kid in act.elementary:
            piece = kid.stage, kid.mb
            if kid.kind is Kind.F and piece not in again:
                held.add(piece)
            elif kid.direction is Direction.BACKWARD:
                held.discard(piece)
                running.add(piece)
        while held and len(held) + len(running) > limit:
            longest = max(held, key=ends.__getitem__)
            held.remove(longest)
            again.add(longest)
        running = {piece for piece in running if ends[piece] > place}
    return again
