"""Balance pipeline stages: split a model so that the most loaded rank has the least work.

With one stage per rank the split is optimal. With several, a rank's load sums several pieces of the
model, and no fast exact method is known: of a small model all splits are compared, and of a large
one an even split is improved by moving single layers between stages, with restarts. All respect a
memory limit per rank. Finally, if a clock is given, stage boundaries move by one as long as the
simulated step gets shorter.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations_with_replacement
from math import ceil, comb, inf
from random import Random

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.costs.parts import ModelPart, Parts, joined
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Program
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES, build_program
from fivefold.pipeline.split.stages import Split, StageSpec
from fivefold.units import human_bytes

_RESTARTS = 8
_STEPS = 200_000  # stages evaluated in search: a fraction of a second
_FEW = 1_000  # splits that are all compared
_TRIES = 100  # splits simulated by the clock
_ACTS = 3_000  # approximate number of actions per simulated program
_GRAIN = 1e-9  # share of the mean load below which differences are rounding

Clock = Callable[[Sequence[ModelPart]], float]
_Cuts = tuple[int, ...]
_Score = tuple[int, int, int]


@dataclass(frozen=True)
class Room:
    """The memory limit of a rank.

    Attributes:
        limit: bytes that a rank may hold.
        in_flight: maximum number of microbatches in flight, for each stage.
    """

    limit: float
    in_flight: tuple[float, ...]


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
    parts: Parts, placement: tuple[int, ...], room: Room | None = None, clock: Clock | None = None
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
    table = _Table(parts, placement, room)
    cuts, several = _even(table), len(placement) > table.num_ranks
    if several and comb(table.size + len(placement) - 1, table.size) <= _FEW:
        every = combinations_with_replacement(range(table.size + 1), len(placement) - 1)
        cuts = min(every, key=table.score)
    elif room or several:
        cuts = _improved(table, cuts)
        cuts = _searched(table, cuts) if several else cuts
    if room and table.score(cuts)[0]:
        cuts = _smallest(parts, placement, room.in_flight)
        if table.score(cuts)[0]:
            raise ConfigError(_no_room(table, cuts))
    if clock:
        cuts = _timed(table, cuts, clock)
    return weigh(parts, Split(parts.stages(cuts), placement))


def even_stages(parts: Parts, count: int) -> tuple[StageSpec, ...]:
    """Split into `count` stages with the lightest heaviest stage, then the most equal stages.

    Of several such splits, the one with less in early stages, which hold most in flight.
    """
    return parts.stages(_even(_Table(parts, tuple(range(count)), None)))


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


class _Table:
    """Prefix sums over the model's items, to evaluate splits quickly."""

    def __init__(self, parts: Parts, placement: tuple[int, ...], room: Room | None) -> None:
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
        self.grain = _GRAIN * whole / self.num_ranks or 1.0

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

    def stretches(self, cuts: _Cuts) -> Iterator[tuple[int, int, int, int]]:
        """(rank, stage, first item, item after the last) of each stage."""
        edges = (0, *cuts, self.size)
        for stage, rank in enumerate(self.placement):
            yield rank, stage, edges[stage], edges[stage + 1]

    def loads(self, cuts: _Cuts) -> list[float]:
        """The load of each rank."""
        loads = [0.0] * self.num_ranks
        for rank, *stretch in self.stretches(cuts):
            loads[rank] += self.load(*stretch)
        return loads

    def needs(self, cuts: _Cuts) -> list[float]:
        """The peak memory of each rank; 0 without a memory limit."""
        needs = [0.0] * self.num_ranks
        if self.room:
            for rank, *stretch in self.stretches(cuts):
                needs[rank] += self.memory(*stretch)
        return needs

    def score(self, cuts: _Cuts) -> _Score:
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
            round(over / _GRAIN),
            round(max(loads) / self.grain),
            round(square / max(sum(loads), self.grain) / self.grain),
        )


class _MemoryTable(_Table):
    """Takes what a rank needs for its load, so that splits are evaluated by memory alone."""

    def __init__(
        self, parts: Parts, placement: tuple[int, ...], in_flight: tuple[float, ...]
    ) -> None:
        super().__init__(parts, placement, Room(inf, in_flight))
        whole = sum(self.load(stage, 0, self.size) for stage in range(len(placement)))
        self.grain = _GRAIN * whole / self.num_ranks or 1.0

    def load(self, stage: int, low: int, high: int) -> float:
        """The peak memory of a stage that holds items `low` to `high` - 1."""
        return self.memory(stage, low, high)


def _even(table: _Table) -> _Cuts:
    """The split with the lightest heaviest stage; if possible within the memory limit.

    With one stage per rank this is optimal.
    """
    share = table.num_ranks / len(table.placement)
    cuts = _lightest(table, table.room.limit * share) if table.room else None
    return cuts or _alike(table, _lightest(table, inf) or ())


def _lightest(table: _Table, limit: float) -> _Cuts | None:
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


def _filled(table: _Table, bound: float, limit: float) -> _Cuts | None:
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


def _alike(table: _Table, lightest: _Cuts) -> _Cuts:
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
    reached: dict[int, tuple[float, _Cuts]] = {0: (0.0, ())}
    for stage in range(len(stages)):
        further: dict[int, tuple[float, _Cuts]] = {}
        for high in range(earliest[stage + 1], latest[stage + 1] + 1):
            for low, (squares, cuts) in reached.items():
                load = table.load(stage, low, high) if low <= high else inf
                found = squares + load * load
                if load <= bound and found < further.get(high, (inf,))[0] - table.grain**2:
                    further[high] = (found, (*cuts, high))
        reached = further
    return reached[table.size][1][:-1]


def _improved(table: _Table, cuts: _Cuts, steps: int = _STEPS) -> _Cuts:
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


def _handed_on(table: _Table, cuts: _Cuts) -> Iterator[_Cuts]:
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


def _moved(cuts: _Cuts, giver: int, taker: int) -> _Cuts:
    low, high, step = (giver, taker, -1) if giver < taker else (taker, giver, 1)
    return (*cuts[:low], *(cut + step for cut in cuts[low:high]), *cuts[high:])


def _searched(table: _Table, start: _Cuts) -> _Cuts:
    """The best of several descents, each starting from the best so far with random moves."""
    random = Random(1)
    best, score = start, table.score(start)
    for _ in range(_RESTARTS):
        cuts = best
        for _ in range(random.randint(2, 6)):
            sizes = [high - low for _, _, low, high in table.stretches(cuts)]
            giver = random.choice([stage for stage, size in enumerate(sizes) if size])
            cuts = _moved(cuts, giver, random.randrange(len(sizes)))
        cuts = _improved(table, cuts, _STEPS // _RESTARTS)
        if table.score(cuts) < score:
            best, score = cuts, table.score(cuts)
    return best


def _smallest(parts: Parts, placement: tuple[int, ...], in_flight: tuple[float, ...]) -> _Cuts:
    """A split whose fullest rank needs little, whatever the limit: what it needs is enough."""
    table = _MemoryTable(parts, placement, in_flight)
    start = _even(_Table(parts, placement, None))
    return _searched(table, _improved(table, start))


def _timed(table: _Table, cuts: _Cuts, clock: Clock) -> _Cuts:
    """Move boundaries by one while the simulated step gets shorter and memory fits."""

    def time(cuts: _Cuts) -> float:
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
                if found < best * (1 - _GRAIN):
                    cuts, best, better = new, found, True
    return cuts


def _no_room(table: _Table, cuts: _Cuts) -> Mistake:
    assert table.room is not None
    needs = table.needs(cuts)
    rank = max(range(len(needs)), key=needs.__getitem__)
    return Mistake(
        f"no cut of the model fits: of those tried the best needs {human_bytes(needs[rank])} on "
        f"rank {rank}, and there is room for {human_bytes(table.room.limit)}",
        ("more pipeline ranks need less each, and so do fewer microbatches in flight",),
        works=(f"--memory-gib {ceil(max(needs) / 2**30 * 1e3) / 1e3:.3f}",),
    )
