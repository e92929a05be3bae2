"""Trade time for memory: recompute activations, or keep them in host memory meanwhile."""

from collections.abc import Collection
from dataclasses import replace

from fivefold.pipeline.ir import COMMUNICATION, COMPUTE, Act, Kind, Program

_Piece = tuple[int, int, int]
_NEEDS_ACTIVATIONS = frozenset({Kind.R, Kind.B, Kind.BW})


def with_recompute(program: Program, stages: Collection[int] | None = None) -> Program:
    """Add an R right before each B or BW of `stages` (all when None).

    An R waits for nothing but its rank: it runs while dY is still on its way.

    Args:
        program: compute-only; lower it afterwards, so that R does not wait for messages.
        stages: stages that keep a checkpoint only.
    """
    wanted = range(program.num_stages) if stages is None else stages

    def expanded(act: Act) -> list[Act]:
        again = [
            replace(kid, kind=Kind.R)
            for kid in act.elementary
            if kid.kind in (Kind.B, Kind.BW) and kid.stage in wanted
        ]
        return [*again, act]

    ranks = tuple(tuple(new for act in acts for new in expanded(act)) for acts in program.ranks)
    return replace(program, ranks=ranks)


def with_offload(program: Program, stages: Collection[int] | None = None) -> Program:
    """Move activations of `stages` (all when None) to host memory between F and backward.

    OFFLOAD follows the F and the messages issued with it; RELOAD stands one compute act ahead of
    the R or B that needs it, so that both copies run beside compute. A microbatch stays where
    fewer than two compute acts would pass between its copies.

    Args:
        program: compute-only or lowered, after `with_recompute` where both are wanted.
        stages: stages whose activations move.
    """
    wanted = range(program.num_stages) if stages is None else stages
    ranks = tuple(_with_copies(acts, wanted) for acts in program.ranks)
    return replace(program, ranks=ranks)


def _with_copies(acts: tuple[Act, ...], wanted: Collection[int]) -> tuple[Act, ...]:
    made: dict[_Piece, int] = {}
    needed: dict[_Piece, int] = {}
    computes = [act for act in acts if act.kind in COMPUTE]
    for place, act in enumerate(computes):
        for kid in act.elementary:
            piece = (kid.stage, kid.mb, kid.slice)
            if kid.kind is Kind.F and kid.stage in wanted:
                made[piece] = place
            elif kid.kind in _NEEDS_ACTIVATIONS:
                needed.setdefault(piece, place)
    offloads: dict[int, list[Act]] = {}
    reloads: dict[int, list[Act]] = {}
    for piece, place in made.items():
        # F, two acts during which the copy leaves and is gone, one beside which it returns.
        if needed.get(piece, 0) - place > 3:
            stage, mb, index = piece
            offloads.setdefault(place, []).append(Act(Kind.OFFLOAD, stage, mb, index))
            reloads.setdefault(needed[piece] - 1, []).append(Act(Kind.RELOAD, stage, mb, index))
    result: list[Act] = []
    pending: list[Act] = []  # offloads, until the messages of their F are issued
    place = 0
    for act in acts:
        if act.kind not in COMMUNICATION:
            result += pending
            pending = []
        if act.kind in COMPUTE:
            result += reloads.get(place, [])
            pending = offloads.get(place, [])
            place += 1
        result.append(act)
    return (*result, *pending)
