"""Where a model is cut into stages: cuts are weighed, and searched for.

With one stage per rank the split is optimal. With several, a rank's load sums several pieces of the
model, and no fast exact method is known: an even split is improved by moving single layers between
stages, with restarts. All respect a memory limit per rank.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from random import Random

from fivefold.pipeline.costs.parts import ModelPart, Parts, joined

_RESTARTS = 8
_STEPS = 200_000  # stages evaluated in search: a fraction of a second
GRAIN = 1e-9  # share of the mean load below which differences are rounding

Cuts = tuple[int, ...]
"""The first item of each stage but the first."""
_Score = tuple[int, int, int]


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a rank.

    Attributes:
        limit: bytes that a rank may hold.
        in_flight: maximum number of microbatches in flight, for each stage.
    """

    limit: float
    in_flight: tuple[float, ...]


class CutTable:
    """Prefix sums over the model's items, to evaluate splits quickly."""

    def __init__(self, parts: Parts, placement: tuple[int, ...], room: MemoryLimit | None) -> None:
        self.parts, self.placement, self.room = parts, placement, room
        self.num_ranks = max(placement) + 1
        self.size = len(parts.items)
        self._ends = [ModelPart()] * len(placement)
        self._ends[0] = parts.embedding
        self._ends[-1] = joined((self._ends[-1], parts.head))
        self.time = self._sums([item.time for item in parts.items])
        self._state = self._sums([item.state for item in parts.items])
        self._held = self._sums([item.held for item in parts.items])
        whole = self.time[-1] + parts.embedding.time + parts.head.time
        self.grain = GRAIN * whole / self.num_ranks or 1.0

    @staticmethod
    def _sums(values: Sequence[float]) -> list[float]:
        return list(accumulate(values, initial=0.0))

    def load(self, stage: int, low: int, high: int) -> float:
        """The time of a stage that holds items `low` to `high` - 1."""
        return self.time[high] - self.time[low] + self._ends[stage].time

    def memory(self, stage: int, low: int, high: int) -> float:
        """The peak memory of a stage that holds items `low` to `high` - 1."""
        assert self.room is not None
        state = self._state[high] - self._state[low] + self._ends[stage].state
        held = self._held[high] - self._held[low] + self._ends[stage].held
        return state + self.room.in_flight[stage] * held

    def stretches(self, cuts: Cuts) -> Iterator[tuple[int, int, int, int]]:
        """(rank, stage, first item, item after the last) of each stage."""
        edges = (0, *cuts, self.size)
        for stage, rank in enumerate(self.placement):
            yield rank, stage, edges[stage], edges[stage + 1]

    def loads(self, cuts: Cuts) -> list[float]:
        """The load of each rank."""
        loads = [0.0] * self.num_ranks
        for rank, *stretch in self.stretches(cuts):
            loads[rank] += self.load(*stretch)
        return loads

    def needs(self, cuts: Cuts) -> list[float]:
        """The peak memory of each rank; 0 without a memory limit."""
        needs = [0.0] * self.num_ranks
        if self.room:
            for rank, *stretch in self.stretches(cuts):
                needs[rank] += self.memory(*stretch)
        return needs

    def score(self, cuts: Cuts) -> _Score:
        """Lower is better: memory over the limit, then the largest load, then stage unevenness.

        A long stage delays interleaved ones even if the rank's total is the same.
        """
        limit = self.room.limit if self.room else inf
        over = sum(max(0.0, need / limit - 1) for need in self.needs(cuts))
        loads, square = [0.0] * self.num_ranks, 0.0
        for rank, *stretch in self.stretches(cuts):
            load = self.load(*stretch)
            loads[rank] += load
            square += load * load
        return (
            round(over / GRAIN),
            round(max(loads) / self.grain),
            round(square / max(sum(loads), self.grain) / self.grain),
        )


class _MemoryTable(CutTable):
    """Takes what a rank needs for its load, so that splits are evaluated by memory alone."""

    def __init__(
        self, parts: Parts, placement: tuple[int, ...], in_flight: tuple[float, ...]
    ) -> None:
        super().__init__(parts, placement, MemoryLimit(inf, in_flight))
        whole = sum(self.load(stage, 0, self.size) for stage in range(len(placement)))
        self.grain = GRAIN * whole / self.num_ranks or 1.0

    def load(self, stage: int, low: int, high: int) -> float:
        """The peak memory of a stage that holds items `low` to `high` - 1."""
        return self.memory(stage, low, high)


def even(table: CutTable) -> Cuts:
    """The split with the lightest heaviest stage; if possible within the memory limit.

    With one stage per rank this is optimal.
    """
    share = table.num_ranks / len(table.placement)
    cuts = _lightest(table, table.room.limit * share) if table.room else None
    return cuts or _alike(table, _lightest(table, inf) or ())


def _lightest(table: CutTable, limit: float) -> Cuts | None:
    """The split with the lightest heaviest stage, by parametric search; None if nothing fits."""
    stages = range(len(table.placement))
    above = table.grain + sum(table.load(stage, 0, table.size) for stage in stages)
    best, below = _filled(table, above, limit), 0.0
    while best is not None and above - below > table.grain / 8:
        middle = (below + above) / 2
        cuts = _filled(table, middle, limit)
        below, above = (middle, above) if cuts is None else (below, middle)
        best = best if cuts is None else cuts
    return best


def _filled(table: CutTable, bound: float, limit: float) -> Cuts | None:
    """A split with no stage above `bound` in time or `limit` in memory; None if there is none.

    Greedy: each stage takes as much as fits, because taking less never helps later stages.
    """
    edges = [0]
    for stage in range(len(table.placement)):
        low = edges[-1]
        spare = bound - table.load(stage, low, low)
        if spare < 0 or (limit < inf and table.memory(stage, low, low) > limit):
            return None
        high = bisect_right(table.time, table.time[low] + spare, lo=low) - 1
        while limit < inf and table.memory(stage, low, high) > limit:
            high -= 1
        edges.append(high)
    return tuple(edges[1:-1]) if edges[-1] == table.size else None


def _alike(table: CutTable, lightest: Cuts) -> Cuts:
    """Of all splits with no heavier stage, the one with the least sum of squared loads.

    Dynamic programming over stages. Each boundary lies between its earliest place, where the stages
    before it take as little as possible, and its latest, where they take as much as possible.
    """
    stages = [stretch[1:] for stretch in table.stretches(lightest)]
    bound = max(table.load(*stretch) for stretch in stages) + table.grain
    latest = [0, *(_filled(table, bound, inf) or lightest), table.size]
    earliest = [table.size] * len(latest)
    for stage in reversed(range(len(stages))):
        high, spare = earliest[stage + 1], bound - table.load(stage, 0, 0)
        earliest[stage] = bisect_left(table.time, table.time[high] - spare, hi=high)
    reached: dict[int, tuple[float, Cuts]] = {0: (0.0, ())}
    for stage in range(len(stages)):
        further: dict[int, tuple[float, Cuts]] = {}
        for high in range(earliest[stage + 1], latest[stage + 1] + 1):
            for low, (squares, cuts) in reached.items():
                load = table.load(stage, low, high) if low <= high else inf
                found = squares + load * load
                if load <= bound and found < further.get(high, (inf,))[0] - table.grain**2:
                    further[high] = (found, (*cuts, high))
        reached = further
    return reached[table.size][1][:-1]


def improved(table: CutTable, cuts: Cuts, steps: int = _STEPS) -> Cuts:
    """Move single items from the most loaded ranks to other stages while the score improves."""
    score, stages = table.score(cuts), len(table.placement)
    left = steps // stages
    while left > 0:
        for new in _handed_on(table, cuts):
            left -= 1
            better = table.score(new)
            if better < score:
                cuts, score = new, better
                break
            if left <= 0:
                return cuts
        else:
            return cuts
    return cuts


def _handed_on(table: CutTable, cuts: Cuts) -> Iterator[Cuts]:
    """Every split in which one stage has one item less and another one more."""
    stages = len(table.placement)
    sizes = [high - low for _, _, low, high in table.stretches(cuts)]
    heavy = table.needs(cuts) if table.score(cuts)[0] else table.loads(cuts)
    givers = sorted(range(stages), key=lambda stage: -heavy[table.placement[stage]])
    for giver in givers:
        if sizes[giver]:
            for taker in range(stages):
                if taker != giver:
                    yield _moved(cuts, giver, taker)


def _moved(cuts: Cuts, giver: int, taker: int) -> Cuts:
    low, high, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
    return (*cuts[:low], *(cut + step for cut in cuts[low:high]), *cuts[high:])


def searched(table: CutTable, start: Cuts) -> Cuts:
    """The best of several descents, each starting from the best so far with random moves."""
    random = Random(1)
    best, score = start, table.score(start)
    for _ in range(_RESTARTS):
        cuts = best
        for _ in range(random.randint(2, 6)):
            sizes = [high - low for _, _, low, high in table.stretches(cuts)]
            giver = random.choice([stage for stage, size in enumerate(sizes) if size])
            cuts = _moved(cuts, giver, random.randrange(len(sizes)))
        cuts = improved(table, cuts, _STEPS // _RESTARTS)
        if table.score(cuts) < score:
            best, score = cuts, table.score(cuts)
    return best


def smallest(parts: Parts, placement: tuple[int, ...], in_flight: tuple[float, ...]) -> Cuts:
    """A split whose fullest rank needs little memory, ignoring the limit."""
    table = _MemoryTable(parts, placement, in_flight)
    start = even(CutTable(parts, placement, None))
    return searched(table, improved(table, start))
