"""Balance pipeline stages: split a model so that the most loaded rank has the least work.

Of a small model with several stages a rank all splits are compared; others are searched for
(`split.cuts`). Finally, if a clock is given, stage boundaries move by one as long as the simulated
step gets shorter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import ceil, comb

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.parts import ModelPart, Parts
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Program
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES, build_program
from fivefold.pipeline.split.cuts import (
    GRAIN,
    Cuts,
    CutTable,
    MemoryLimit,
    even,
    improved,
    searched,
    smallest,
)
from fivefold.pipeline.split.stages import Split, StageSpec
from fivefold.units import human_bytes

_FEW = 1_000  # splits that are all compared
_TRIES = 100  # splits simulated by the clock
_ACTS = 3_000  # approximate number of actions per simulated program

Clock = Callable[[Sequence[ModelPart]], float]


@dataclass(frozen=True)
class Balance:
    """A split into stages, and its loads.

    Attributes:
        split: the stages.
        loads: forward plus backward time per microbatch, for each rank.
    """

    split: Split
    loads: tuple[float, ...]

    @property
    def unevenness(self) -> float:
        """The largest load over the mean load, at least 1."""
        return max(self.loads) * len(self.loads) / sum(self.loads)


def weigh(parts: Parts, split: Split) -> Balance:
    """The loads of a given split."""
    loads = [0.0] * split.num_ranks
    for stage, rank in zip(split.stages, split.placement, strict=True):
        loads[rank] += parts.of(stage).time
    return Balance(split, tuple(loads))


def balance(
    parts: Parts,
    placement: tuple[int, ...],
    room: MemoryLimit | None = None,
    clock: Clock | None = None,
) -> Balance:
    """Split a model into stages for a placement; deterministic.

    Args:
        parts: the model.
        placement: stage -> rank.
        room: memory limit of a rank; None: no limit.
        clock: computes the step time from the times of the stages; None: compare loads only.

    Raises:
        ConfigError: no split within the memory limit was found; it says with which there is one.
    """
    table = CutTable(parts, placement, room)
    cuts, several = even(table), len(placement) > table.num_ranks
    if several and comb(table.size + len(placement) - 1, table.size) <= _FEW:
        every = combinations_with_replacement(range(table.size + 1), len(placement) - 1)
        cuts = min(every, key=table.score)
    elif room or several:
        cuts = improved(table, cuts)
        cuts = searched(table, cuts) if several else cuts
    if room and table.score(cuts)[0]:
        cuts = smallest(parts, placement, room.in_flight)
        if table.score(cuts)[0]:
            raise ConfigError(_no_room(table, cuts))
    if clock:
        cuts = _timed(table, cuts, clock)
    return weigh(parts, Split(parts.stages(cuts), placement))


def even_stages(parts: Parts, count: int) -> tuple[StageSpec, ...]:
    """Split into `count` stages with the lightest heaviest stage, then the most equal stages.

    Of several such splits, the one with less in early stages, which hold most in flight.
    """
    return parts.stages(even(CutTable(parts, tuple(range(count)), None)))


def step_clock(program: Program, hop: float) -> Clock:
    """A clock that simulates a program in which each dX is sent before its dW is computed."""
    program = eager_dx(program)
    graph = dependency_graph(program)

    def time(stages: Sequence[ModelPart]) -> float:
        # An empty stage still passes on its input.
        f, b, w = (tuple(max(getattr(stage, x), 1e-9) for stage in stages) for x in "fbw")
        _, ends = graph.longest_paths(graph.weights(program, Costs(f, b, w, hop)))
        return max(ends)

    return time


def schedule_clock(
    schedule: str, placement: tuple[int, ...], num_microbatches: int, hop: float = 0.0
) -> Clock | None:
    """A clock of a fixed schedule, with few microbatches to be quick; None if unavailable.

    Args:
        schedule: a key of `SCHEDULES`; other schedules have no order before costs are known.
        placement: stage -> rank.
        num_microbatches: microbatches per step.
        hop: message latency between ranks.
    """
    if schedule not in SCHEDULES or SCHEDULES[schedule].num_copies > 1:
        return None
    ranks = max(placement) + 1
    few = max(2, _ACTS // (3 * len(placement) * ranks)) * ranks
    try:
        program = build_program(schedule, placement, min(num_microbatches, few))
    except ConfigError:
        return None  # infeasible schedules are reported elsewhere
    return step_clock(program, hop)


def _timed(table: CutTable, cuts: Cuts, clock: Clock) -> Cuts:
    """Move boundaries by one while the simulated step gets shorter and memory fits."""

    def time(cuts: Cuts) -> float:
        return clock([table.parts.of(stage) for stage in table.parts.stages(cuts)])

    best, left = time(cuts), _TRIES
    better = True
    while better and left > 0:
        better = False
        for place in range(len(cuts)):
            for step in (-1, 1):
                new = (*cuts[:place], cuts[place] + step, *cuts[place + 1 :])
                edges = (0, *new, table.size)
                if not edges[place] <= new[place] <= edges[place + 2] or table.score(new)[0]:
                    continue
                left -= 1
                found = time(new)
                if found < best * (1 - GRAIN):
                    cuts, best, better = new, found, True
    return cuts


def _no_room(table: CutTable, cuts: Cuts) -> Mistake:
    assert table.room is not None
    needs = table.needs(cuts)
    rank = max(range(len(needs)), key=needs.__getitem__)
    return Mistake(
        f"no cut of the model fits: of those tried the best needs {human_bytes(needs[rank])} on "
        f"rank {rank}, and there is room for {human_bytes(table.room.limit)}",
        ("more pipeline ranks need less each, and so do fewer microbatches in flight",),
        works=(f"--memory-gib {ceil(max(needs) / 2**30 * 1e3) / 1e3:.3f}",),
    )
