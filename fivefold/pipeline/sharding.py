"""Adds data-parallel actions to a program: parameter gathers, gradient reductions and the step."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fivefold.pipeline.ir import COMMUNICATION, COMPUTE, READS_PARAMETERS, Act, Kind, Program

_BACKWARD = frozenset({Kind.B, Kind.W, Kind.BW})


def with_sharding_actions(
    program: Program, *, unshard: bool = False, max_unsharded: int | None = None
) -> Program:
    """Add REDUCE right after each stage's last backward action, and STEP at the end.

    In a lowered program, messages issued after that action go first, as another rank waits for
    them.

    Args:
        program: compute-only or lowered.
        unshard: also gather each stage's parameters (UNSHARD), and free them right after the last
            action that reads them (RESHARD), before a REDUCE. They are gathered one compute action
            before the first that reads them, to travel in parallel to it, if there is room then.
        max_unsharded: maximum number of stages that a rank keeps gathered, at least 1 (2 where
            actions overlap); None: all. The stage needed latest is evicted (Belady, 1966), which
            minimises the number of gathers.
    """
    return replace(
        program,
        ranks=tuple(
            _with_actions(acts, unshard, max_unsharded, program.forward_only)
            for acts in program.ranks
        ),
    )


def passes(acts: Iterable[Act]) -> Iterator[tuple[int, bool]]:
    """Stages whose parameters a rank gathers block by block, and whether for a backward, in order.

    A stage that is gathered as a whole (UNSHARD) is gathered as for a forward.
    """
    acts = tuple(acts)
    whole = {act.stage for act in acts if act.kind is Kind.UNSHARD}
    for act in acts:
        if act.kind is Kind.UNSHARD:
            yield act.stage, False
        for kid in act.elementary:
            if kid.kind in READS_PARAMETERS and kid.stage not in whole:
                yield kid.stage, kid.kind in _BACKWARD


def _with_actions(
    acts: tuple[Act, ...], unshard: bool, max_unsharded: int | None, forward_only: bool
) -> tuple[Act, ...]:
    uses, last_backward = _uses(acts)
    gathered = _GatheredStages(uses, max_unsharded)
    before = 0  # place of the last compute action
    result: list[Act] = []
    after: list[Act] = []  # added after the last compute action, once its messages are issued
    for index, act in enumerate(acts):
        if act.kind not in COMMUNICATION:
            result += after
            after = []
        stages = sorted({kid.stage for kid in act.elementary if kid.kind in READS_PARAMETERS})
        if unshard and not gathered.stages.issuperset(stages):
            changes, ahead = gathered.bring(stages)
            place = before if ahead else len(result)
            result[place:place] = changes
        if stages:
            gathered.compute(stages)
            before = len(result)
        result.append(act)
        for stage in stages:
            while uses[stage] and uses[stage][-1] == index:
                uses[stage].pop()
            if unshard and not uses[stage]:
                gathered.stages.remove(stage)
                after.append(Act(Kind.RESHARD, stage))
        ending = sorted(s for s, last in last_backward.items() if last == index)
        after += [Act(Kind.REDUCE, s) for s in ending]
    result += after
    if not forward_only:
        result.append(Act(Kind.STEP, -1))
    return tuple(result)


def _uses(acts: Sequence[Act]) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Indices of the actions that read each stage, latest first, and of its last backward."""
    uses: dict[int, list[int]] = {}
    last_backward: dict[int, int] = {}
    for index in reversed(range(len(acts))):
        for kid in acts[index].elementary if acts[index].kind in COMPUTE else ():
            if kid.kind in READS_PARAMETERS:
                uses.setdefault(kid.stage, []).append(index)
            if kid.kind in _BACKWARD:
                last_backward.setdefault(kid.stage, index)
    return uses, last_backward


class _GatheredStages:
    """The stages that a rank has gathered, at most this many, from one action to the next."""

    def __init__(self, uses: Mapping[int, Sequence[int]], most: int | None) -> None:
        self._uses, self._most = uses, most
        self.stages: set[int] = set()
        self._held: set[int] = set()  # during the last compute action
        self._busy: list[int] = []  # those that it reads

    def bring(self, stages: Sequence[int]) -> tuple[list[Act], bool]:
        """Actions that gather these stages, and whether they can run before the last compute
        action."""
        wanted = self.stages.union(stages)
        room = max(len(stages), self._most or len(wanted))
        idle = sorted(self.stages.difference(stages), key=lambda stage: -self._uses[stage][-1])
        evicted = idle[: max(len(wanted) - room, 0)]
        changes = [Act(Kind.RESHARD, stage) for stage in evicted]
        changes += [Act(Kind.UNSHARD, stage) for stage in stages if stage not in self.stages]
        early = self._held.difference(evicted).union(stages)
        fits = self._most is None or len(early) <= self._most
        self.stages = wanted.difference(evicted)
        return changes, fits and not set(evicted).intersection(self._busy)

    def compute(self, stages: list[int]) -> None:
        """Record that the next compute action reads these stages."""
        self._held, self._busy = set(self.stages), stages
