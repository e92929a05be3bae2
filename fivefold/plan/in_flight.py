"""What a rank holds while each act of a program runs, in microbatches: apart from any sizes.

The same program serves thousands of layouts, and in steady state it repeats itself. So it is swept
once for all of them, cut to a length at which the steady state is reached, and only moments that
no other one dominates are kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import ge

from fivefold.check import Layout
from fivefold.pipeline.ir import COMPUTE, Kind, Program
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.modelled import searched_program
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import build_program

WARM_UP, FIRST_BACKWARD, STEADY = "end of the warm-up", "first backward", "steady state"
_BACKWARD = frozenset({Kind.B, Kind.BW})


@dataclass(frozen=True)
class Moment:
    """What a rank holds while one act runs.

    Attributes:
        acts: the elementary act that runs, or the two that overlap; microbatches do not matter.
        phase: WARM_UP, FIRST_BACKWARD or STEADY.
        kept: of each stage of the rank, microbatches between their forward and the end of their B.
        remade: of these, those that an R act has made anew.
        waiting: microbatches between their B and the end of their W.
    """

    acts: tuple[tuple[Kind, int], ...]
    phase: str
    kept: tuple[float, ...]
    remade: tuple[float, ...]
    waiting: tuple[float, ...]

    @property
    def held(self) -> tuple[float, ...]:
        """Everything, in a row."""
        return self.kept + self.remade + self.waiting


def moments(layout: Layout, *, splits_backward: bool) -> tuple[tuple[Moment, ...], ...]:
    """Of each pipeline rank, the moments at which memory may be at its peak.

    Args:
        layout: whose schedule runs.
        splits_backward: whether dX leaves before dW is computed.
    """
    if layout.schedule == SYNTHESISED:
        return _searched_moments(layout.scheduling_problem())
    group = layout.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
    length = _enough(layout, group or layout.grid.pp)
    return _moments(
        layout.schedule,
        layout.split.placement,
        length,
        group,
        splits_backward,
        slices=layout.config.parallel.num_sequence_slices,
        pairs=layout.overlaps_pairs,
    )


def _enough(layout: Layout, group: int) -> int:
    """Microbatches after which nothing new happens; all of them where forwards come first."""
    count = layout.num_microbatches
    if layout.schedule in ("gpipe", "looped_bfs") or count % group:
        return count
    return min(count, 3 * max(layout.grid.pp, group))


@lru_cache(maxsize=256)
def _moments(
    schedule: str,
    placement: tuple[int, ...],
    num_microbatches: int,
    group: int | None,
    splits_backward: bool,
    *,
    slices: int = 1,
    pairs: bool = False,
) -> tuple[tuple[Moment, ...], ...]:
    program = build_program(
        schedule, placement, num_microbatches, group_size=group, num_slices=slices
    )
    return _all_peaks(executed(program, pairs=pairs, eager=splits_backward))


@lru_cache(maxsize=32)
def _searched_moments(problem: Problem) -> tuple[tuple[Moment, ...], ...]:
    return _all_peaks(searched_program(problem))


def _all_peaks(program: Program) -> tuple[tuple[Moment, ...], ...]:
    return tuple(tuple(_peaks(program, rank)) for rank in range(program.num_ranks))


def _peaks(program: Program, rank: int) -> list[Moment]:
    """The moments of a rank, without those that an earlier or larger one covers."""
    found: dict[tuple[object, ...], dict[tuple[float, ...], Moment]] = {}
    for moment in _sweep(program, rank):
        alike, held = found.setdefault((moment.acts, moment.phase), {}), moment.held
        if held in alike or any(_covers(other, held) for other in alike):
            continue
        for other in [other for other in alike if _covers(held, other)]:
            del alike[other]
        alike[held] = moment
    return [moment for alike in found.values() for moment in alike.values()]


def _covers(mine: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Whether at least as much of everything is held; a search asks some hundred thousand times."""
    return all(map(ge, mine, others))


def _sweep(program: Program, rank: int) -> Iterator[Moment]:
    """What is held while each compute act of a rank runs, in order."""
    stages = program.stages_of(rank)
    kept, remade, waiting = ([0.0] * len(stages) for _ in range(3))
    share, part = 1 / program.num_slices, 1 / program.num_weight_parts
    splits = {
        (act.stage, act.mb, act.slice)
        for acts in program.ranks[rank]
        for act in acts.elementary
        if act.kind is Kind.W
    }
    backwards = 0
    for act in program.ranks[rank]:
        if act.kind not in COMPUTE:
            continue
        for kid in act.elementary:
            at = stages.index(kid.stage)
            if kid.kind is Kind.F:
                kept[at] += share
            elif kid.kind is Kind.R:
                remade[at] += share
        backwards += any(kid.kind in _BACKWARD for kid in act.elementary)
        phase = (WARM_UP, FIRST_BACKWARD, STEADY)[min(backwards, 2)]
        running = tuple((kid.kind, kid.stage) for kid in act.elementary)
        yield Moment(running, phase, tuple(kept), tuple(remade), tuple(waiting))
        for kid in act.elementary:
            at = stages.index(kid.stage)
            if kid.kind in _BACKWARD:
                kept[at] -= share
                remade[at] = max(remade[at] - share, 0.0)
                waiting[at] += share * ((kid.stage, kid.mb, kid.slice) in splits)
            elif kid.kind is Kind.W:
                waiting[at] -= share * part
