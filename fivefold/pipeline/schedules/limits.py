"""Activation memory limits of schedules, known before a program is made.

For interleaved schedules, groups have as many microbatches as there are ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Place:
    """A rank in a pipeline.

    Attributes:
        ranks: pipeline-parallel size.
        virtual: stages per rank, of one copy of the model.
        rank: pipeline rank.
    """

    ranks: int
    virtual: int
    rank: int

    @property
    def left(self) -> int:
        """Number of ranks from this one to the last, inclusive."""
        return self.ranks - self.rank

    @property
    def others(self) -> int:
        """Forwards of one group through all stages of the rank but one."""
        return (self.virtual - 1) * self.ranks


Kept = Callable[[Place, int], list[int] | None]
"""(rank, maximum number of activations it keeps) -> microbatches kept by each of its stages."""
Drained = tuple[list[int], list[int]]
"""At the end, for each stage of a rank: microbatches kept, and microbatches with pending W."""


def _unknown(place: Place) -> float:
    return inf


@dataclass(frozen=True)
class Limits:
    """Limits on what the ranks of a schedule keep; the defaults mean unknown.

    Attributes:
        in_flight: maximum number of activations (one microbatch of one stage each) that a rank
            keeps for the backward; inf: unknown.
        deferred: maximum number of pending dW on a rank when its last dX is sent; inf: unknown.
        alone: minimum number of unpaired forwards on a rank, if the schedule has pairs.
        stages: microbatches that each stage of a rank keeps when the rank keeps the most.
        drained: what a rank keeps at the end, when most dW are pending; None: unknown, or no more
            than at other times.
    """

    in_flight: Callable[[Place], float] = _unknown
    deferred: Callable[[Place], float] = _unknown
    alone: Callable[[Place], int] = lambda place: 0
    stages: Kept = lambda place, most: None
    drained: Callable[[Place], Drained | None] = lambda place: None

    def kept_at_once(self, place: Place) -> list[int] | None:
        """Microbatches that each stage of a rank keeps at its peak, if there are enough of them.

        None: unknown.
        """
        most = self.in_flight(place)
        return None if most == inf else self.stages(place, int(most))


def in_turn(place: Place, most: int) -> list[int]:
    """Stages fill in turn in the warm-up, each with as many microbatches as there are ranks."""
    ranks, virtual = place.ranks, place.virtual
    rounds, rest = divmod(most, ranks * virtual)
    return [rounds * ranks + min(max(rest - stage * ranks, 0), ranks) for stage in range(virtual)]


def in_a_v(place: Place, most: int) -> list[int]:
    """In a V the first rank keeps mostly its first stage, the last rank equally many of both."""
    return [most - 1 - place.rank, 1 + place.rank]


def in_a_smaller_v(spare: int) -> Kept:
    """Like `in_a_v` for the end ranks of a V that keeps less; the first keeps `spare` fewer."""

    def stages(place: Place, most: int) -> list[int] | None:
        if place.ranks <= 2 or place.rank not in (0, place.ranks - 1):
            return None
        return [most - 1 - spare, 1] if place.rank == 0 else [most // 2, most // 2]

    return stages


def drained_v(waiting: Callable[[int], list[int]]) -> Callable[[Place], Drained | None]:
    """For a V that leaves its dW for the end, with at least twice as many microbatches as ranks.

    Args:
        waiting: rank -> microbatches of each of its stages with pending dW.
    """

    def drained(place: Place) -> Drained | None:
        return ([place.left - 1, 0], waiting(place.rank)) if place.rank else None

    return drained


def at_once(place: Place) -> float:
    """`Limits.deferred` of schedules in which each dW follows its dX or runs with it."""
    return 1
