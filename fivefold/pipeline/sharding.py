"""When a stage's parameters are gathered, its gradients reduced, and the step taken."""

from dataclasses import replace

from fivefold.pipeline.ir import COMMUNICATION, COMPUTE, Act, Kind, Program

_BACKWARD = frozenset({Kind.B, Kind.W, Kind.BW})


def with_sharding_actions(program: Program, *, unshard: bool = False) -> Program:
    """Add REDUCE for each stage right after its last backward act, and a STEP at the end.

    In a lowered program the messages issued after that act go first: another rank waits for them.

    Args:
        program: compute-only or lowered.
        unshard: also gather each stage's parameters once, right before its first compute act
            (UNSHARD), and free them right after its last (RESHARD), before the REDUCE.
    """
    return replace(
        program,
        ranks=tuple(_with_actions(acts, unshard, program.forward_only) for acts in program.ranks),
    )


def _with_actions(acts: tuple[Act, ...], unshard: bool, forward_only: bool) -> tuple[Act, ...]:
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    last_backward: dict[int, int] = {}
    for index, act in enumerate(acts):
        if act.kind not in COMPUTE:
            continue
        for kid in act.elementary:
            first.setdefault(kid.stage, index)
            last[kid.stage] = index
            if kid.kind in _BACKWARD:
                last_backward[kid.stage] = index
    result: list[Act] = []
    after: list[Act] = []  # what follows the last compute act, once its messages are issued
    for index, act in enumerate(acts):
        if act.kind not in COMMUNICATION:
            result += after
            after = []
        stages = sorted({kid.stage for kid in act.elementary})
        if unshard:
            result += [Act(Kind.UNSHARD, s) for s in stages if first.get(s) == index]
        result.append(act)
        if unshard:
            after += [Act(Kind.RESHARD, s) for s in stages if last.get(s) == index]
        after += [Act(Kind.REDUCE, s) for s in stages if last_backward.get(s) == index]
    result += after
    if not forward_only:
        result.append(Act(Kind.STEP, -1))
    return tuple(result)
