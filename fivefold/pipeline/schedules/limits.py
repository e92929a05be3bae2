"""How much the ranks of a schedule keep: what is known before its program is made.

Interleaved schedules in groups of as many microbatches as there are ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Place:
    """A rank of a pipeline.

    Attributes:
        ranks: ranks of the pipeline.
        virtual: stages a rank, of one copy of the model.
        rank: which of them.
    """

    ranks: int
    virtual: int
    rank: int

    @property
    def left(self) -> int:
        """Ranks from this one to the last, itself included."""
        return self.ranks - self.rank

    @property
    def others(self) -> int:
        """Forwards of a round over all stages of the rank but one."""
        return (self.virtual - 1) * self.ranks


Kept = Callable[[Place, int], list[int] | None]
"""A rank and the chunks that it keeps at most -> microbatches of each of its stages among them."""
Drained = tuple[list[int], list[int]]
"""Microbatches of each stage that a rank keeps in the end, and whose dW waits."""


def _unknown(place: Place) -> float:
    return inf


@dataclass(frozen=True)
class Limits:
    """What the ranks of a schedule keep at most or at least, by place; by itself, nothing is known.

    Attributes:
        in_flight: chunks that a rank keeps at once for their backwards, at most; inf: not known.
        deferred: dW of a rank's stages that are left when its last dX leaves, at most; inf: not
            known.
        alone: forwards of a rank that are in no pair, at least, where the schedule has pairs.
        stages: stages whose chunks a rank holds when it holds the most.
        drained: what a rank keeps in the end, when most dW wait; None: not known, or no more than
            at other times.
    """

    in_flight: Callable[[Place], float] = _unknown
    deferred: Callable[[Place], float] = _unknown
    alone: Callable[[Place], int] = lambda place: 0
    stages: Kept = lambda place, most: None
    drained: Callable[[Place], Drained | None] = lambda place: None

    def kept_at_once(self, place: Place) -> list[int] | None:
        """Microbatches that each stage of a rank keeps at some time, if there are enough of them.

        None: not known.
        """
        most = self.in_flight(place)
        return None if most == inf else self.stages(place, int(most))


def in_turn(place: Place, most: int) -> list[int]:
    """A warm-up takes the stages of a rank in turn, each for as many microbatches as ranks."""
    ranks, virtual = place.ranks, place.virtual
    rounds, rest = divmod(most, ranks * virtual)
    return [rounds * ranks + min(max(rest - stage * ranks, 0), ranks) for stage in range(virtual)]


def in_a_v(place: Place, most: int) -> list[int]:
    """In a V the first rank keeps many of its first stage, the last as many of both."""
    return [most - 1 - place.rank, 1 + place.rank]


def in_a_smaller_v(spare: int) -> Kept:
    """As `in_a_v`, of the ends of a V that keeps less; the first rank keeps `spare` fewer."""

    def stages(place: Place, most: int) -> list[int] | None:
        if place.ranks <= 2 or place.rank not in (0, place.ranks - 1):
            return None
        return [most - 1 - spare, 1] if place.rank == 0 else [most // 2, most // 2]

    return stages


def drained_v(waiting: Callable[[int], list[int]]) -> Callable[[Place], Drained | None]:
    """Of a V that leaves its dW for the end, when there is nothing else to do.

    With at least twice as many microbatches as ranks.

    Args:
        waiting: rank -> microbatches of each of its stages whose dW waits.
    """

    def drained(place: Place) -> Drained | None:
        return ([place.left - 1, 0], waiting(place.rank)) if place.rank else None

    return drained


def at_once(place: Place) -> float:
    """The limit on `Limits.deferred` where each dW follows its dX, or runs with it."""
    return 1
