"""A list scheduler for pipelines: whenever a rank is free, it runs the best ready action.

It never gets stuck for lack of memory. As in the banker's algorithm, a forward is admitted only if
the microbatches on the rank could still be finished one by one afterwards (with every pending W
done). The oldest can then always proceed, so there is no deadlock. W runs where a rank would wait
long enough, or where its memory is needed. The order of each rank's first actions may be given.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf

from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.costs import ONE_EACH, Costs, Footprint
from fivefold.pipeline.ir import Act, Kind, Program, stages_on

_KINDS = (Kind.F, Kind.B, Kind.W)  # by the scheduler's kind index


@dataclass(frozen=True)
class SchedulingPolicy:
    """The preferences of the list scheduler; every policy gives a valid program.

    Attributes:
        forward: priority of each stage's F of each microbatch; the smallest goes first.
        backward: the same for B.
        limit: maximum number of microbatches in flight on each stage, at least 1.
        patience: for each rank, the minimum length of a gap in which a pending W runs, as a share
            of W's time.
    """

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    limit: tuple[int, ...]
    patience: tuple[float, ...]


@dataclass(frozen=True)
class Problem:
    """A scheduling problem.

    Attributes:
        placement: stage -> rank.
        num_microbatches: microbatches per step.
        costs: costs of each stage.
        cap: maximum activation memory of a rank, in the unit of the footprint.
        footprint: activation memory of a microbatch on each stage.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    costs: Costs
    cap: float
    footprint: Footprint = ONE_EACH

    def __post_init__(self) -> None:
        """Raises ConfigError if not even one microbatch fits."""
        for rank in range(self.num_ranks):
            need = sum(self.footprint.size(s) for s in stages_on(self.placement, rank))
            if need > self.cap * (1 + 1e-9):
                raise ConfigError(
                    Mistake(
                        f"rank {rank} holds {need:g} for one microbatch, the cap is {self.cap:g}",
                        works=(f"a cap of at least {ceil(need * 1e3) / 1e3:.12g}",),
                    )
                )

    @property
    def num_ranks(self) -> int:
        """Pipeline-parallel size."""
        return max(self.placement) + 1


class Run:
    """A scheduled program with its times, as lists.

    Microbatches pass every stage in order, so an action is identified by kind and stage; its
    microbatch is the number of equal entries before it.

    Attributes:
        makespan: time of the step; infinite if the order got stuck.
        orders: for each rank, (kind index, stage) of each action.
        times: for each rank, the start of each action.
        peaks: peak activation memory of each rank.
    """

    def __init__(self, problem: Problem) -> None:
        placement, costs = problem.placement, problem.costs
        self._problem = problem
        stages, ranks = range(len(placement)), range(problem.num_ranks)
        self._times = (costs.f, costs.b, costs.w)
        self._sizes = [problem.footprint.size(stage) for stage in stages]
        self._early = [problem.footprint.freed_by_b * size for size in self._sizes]
        self._late = [size - early for size, early in zip(self._sizes, self._early, strict=True)]
        self._held = [0.0] * len(ranks)
        self._done = [[0] * len(stages) for _ in _KINDS]
        self.orders: list[list[tuple[int, int]]] = [[] for _ in ranks]
        self.times: list[list[float]] = [[] for _ in ranks]
        self.peaks = [0.0] * len(ranks)
        self.makespan = inf

    @property
    def _complete(self) -> bool:
        acts = sum(len(order) for order in self.orders)
        return acts == len(_KINDS) * len(self._sizes) * self._problem.num_microbatches

    def program(self) -> Program:
        """The scheduled program."""
        ranks = []
        for order in self.orders:
            counts = [[0] * len(self._sizes) for _ in _KINDS]
            acts: list[Act] = []
            for kind, stage in order:
                acts.append(Act(_KINDS[kind], stage, counts[kind][stage]))
                counts[kind][stage] += 1
            ranks.append(tuple(acts))
        return Program(self._problem.placement, self._problem.num_microbatches, tuple(ranks))


class ReplayedRun(Run):
    """Times given orders, ignoring memory: each rank runs as far as its inputs are available.

    Args:
        problem: what is scheduled; its cap is ignored.
        orders: for each rank, (kind index, stage) of all its actions.
    """

    def __init__(self, problem: Problem, orders: Sequence[Sequence[tuple[int, int]]]) -> None:
        super().__init__(problem)
        self.orders = [list(order) for order in orders]
        last, total = len(self._sizes) - 1, problem.num_microbatches
        # For each stage, arrival times of its inputs and of its dY, by microbatch.
        self._arrivals: list[list[list[float]]] = [[[] for _ in self._sizes] for _ in range(2)]
        self._arrivals[0][0] = [0.0] * total
        self._last = last
        self._clocks = [0.0] * problem.num_ranks
        waiting = dict.fromkeys(range(problem.num_ranks))
        while waiting:
            rank = next(iter(waiting))
            del waiting[rank]
            waiting.update(dict.fromkeys(self._advance(rank)))
        if all(len(t) == len(order) for t, order in zip(self.times, self.orders, strict=True)):
            self.makespan = max(self._clocks)

    def _advance(self, rank: int) -> set[int]:
        """Run a rank until an input is missing; returns the ranks that received something."""
        order, times, clock = self.orders[rank], self.times[rank], self._clocks[rank]
        placement, hop = self._problem.placement, self._problem.costs.hop
        held, peak = self._held[rank], self.peaks[rank]
        fed = set()
        while len(times) < len(order):
            kind, stage = order[len(times)]
            if kind < 2:
                done, there = self._done[kind], self._arrivals[kind][stage]
                if done[stage] == len(there):
                    break
                clock = max(clock, there[done[stage]])
                done[stage] += 1
            times.append(clock)
            clock += self._times[kind][stage]
            if kind == 2:
                held -= self._late[stage]
                continue
            if kind == 0:
                held += self._sizes[stage]
                peak = max(peak, held)
            else:
                held -= self._early[stage]
            target = stage + 1 - 2 * kind
            if target > self._last:
                self._arrivals[1][stage].append(clock)  # after the loss its backward can run
            elif target >= 0:
                receiver = placement[target]
                self._arrivals[kind][target].append(clock + hop * (receiver != rank))
                if receiver != rank:
                    fed.add(receiver)
        self._clocks[rank], self._held[rank], self.peaks[rank] = clock, held, peak
        return fed


class ListScheduler(Run):
    """Runs a policy.

    Args:
        problem: what to schedule.
        policy: preferences.
        starts: for each rank, (kind index, stage) of its first actions; if these include a W, no
            other W is inserted between them. Such a start may get stuck.
    """

    def __init__(
        self,
        problem: Problem,
        policy: SchedulingPolicy,
        starts: Sequence[Sequence[tuple[int, int]]],
    ) -> None:
        super().__init__(problem)
        placement = problem.placement
        self._policy = policy
        stages, ranks = range(len(placement)), range(problem.num_ranks)
        self._chunks = [stages_on(placement, rank) for rank in ranks]
        self._totals = [sum(self._sizes[s] for s in chunks) for chunks in self._chunks]
        # Tolerates rounding, but not one more action.
        self._cap = problem.cap * (1 + 1e-9)
        self._ready = [[0] * len(stages) for _ in range(2)]
        self._ready[0][0] = problem.num_microbatches
        self._starts = [deque(start) for start in starts] or [deque() for _ in ranks]
        self._named = [any(kind == 2 for kind, _ in start) for start in self._starts]
        self._weights: list[deque[int]] = [deque() for _ in ranks]
        self._reclaimable = [0.0] * len(ranks)
        self._arrivals: list[list[float]] = [[] for _ in ranks]
        self._events: list[tuple[float, int]] = []
        self._first_rank = 2 * len(stages)
        self._free = [True] * len(ranks)
        self._run()
        if not self._complete:
            self.makespan = inf

    def _run(self) -> None:
        """Event codes: 2 * stage: input arrives; 2 * stage + 1: dY arrives; larger: rank free."""
        events, first_rank = self._events, self._first_rank
        placement = self._problem.placement
        self._decide(0, 0.0)
        touched: list[int] = []
        while events:
            now, code = heappop(events)
            if code >= first_rank:
                rank = code - first_rank
                self._free[rank] = True
            else:
                rank = placement[code // 2]
                self._ready[code % 2][code // 2] += 1
            touched.append(rank)
            # Simultaneous events (up to rounding) are processed together.
            if not events or events[0][0] > now + 1e-9 * (1 + now):
                for rank in touched:
                    if self._free[rank]:
                        self._decide(rank, now)
                touched.clear()
        self.makespan = now

    def _decide(self, rank: int, now: float) -> None:
        """Start an action on a free rank, or leave it idle until something arrives."""
        kind, stage = self._best(rank)
        weights = self._weights[rank]
        if kind == 3 and weights and self._worth_it(rank, now):
            kind, stage = 2, weights[0]
        if kind == 0 and self._held[rank] + self._sizes[stage] > self._cap:
            if not weights:
                return
            kind, stage = 2, weights[0]  # F is admitted, but W must free its memory first
        if kind < 3:
            self._begin(rank, now, kind, stage)

    def _best(self, rank: int) -> tuple[int, int]:
        """The F, B or W (0, 1 or 2) to run now, and its stage; kind 3 if there is none."""
        start = self._starts[rank]
        if not start:
            return self._preferred(rank)
        kind, stage = start[0]
        if kind < 2 and self._ready[kind][stage] == self._done[kind][stage]:
            return 3, 0
        if kind > 0 or self._held[rank] + self._sizes[stage] <= self._cap:
            start.popleft()
        return kind, stage

    def _preferred(self, rank: int) -> tuple[int, int]:
        """The F or B with the best priority among those that are ready and fit."""
        best, kind, stage = inf, 3, 0
        policy, (forwards, backwards, _) = self._policy, self._done
        for chunk in self._chunks[rank]:
            done = backwards[chunk]
            if self._ready[1][chunk] > done:
                key = policy.backward[chunk][done]
                if key < best:
                    best, kind, stage = key, 1, chunk
            done = forwards[chunk]
            if self._ready[0][chunk] > done:
                key = policy.forward[chunk][done]
                if (
                    key < best
                    and done - backwards[chunk] < policy.limit[chunk]
                    and self._safe(rank, chunk)
                ):
                    best, kind, stage = key, 0, chunk
        return kind, stage

    def _safe(self, rank: int, stage: int) -> bool:
        """Whether this rank's microbatches could be finished one by one after F of `stage`."""
        forwards, backwards, _ = self._done
        free = self._cap - self._held[rank] + self._reclaimable[rank] - self._sizes[stage]
        chunks = self._chunks[rank]
        for mb in range(backwards[chunks[0]], forwards[chunks[0]] + 1):
            if free >= self._totals[rank]:
                break
            for chunk in chunks:
                if mb >= forwards[chunk] + (chunk == stage):
                    free -= self._sizes[chunk]
            if free < 0:
                return False
            free += self._totals[rank]
            for chunk in chunks:
                if mb < backwards[chunk]:
                    free -= self._sizes[chunk]
        return True

    def _worth_it(self, rank: int, now: float) -> bool:
        """Whether enough of a W fits before the next arrival."""
        if self._named[rank] and self._starts[rank]:
            return False
        arrivals = self._arrivals[rank]
        while arrivals and arrivals[0] <= now:
            heappop(arrivals)
        time = self._times[2][self._weights[rank][0]]
        return not arrivals or arrivals[0] - now >= self._policy.patience[rank] * time

    def _begin(self, rank: int, now: float, kind: int, stage: int) -> None:
        end = now + self._times[kind][stage]
        self.orders[rank].append((kind, stage))
        self.times[rank].append(now)
        self._done[kind][stage] += 1
        self._free[rank] = False
        heappush(self._events, (end, self._first_rank + rank))
        if kind == 2:
            self._weights[rank].remove(stage)
            self._held[rank] -= self._late[stage]
            self._reclaimable[rank] -= self._late[stage]
            return
        if kind == 0:
            self._held[rank] += self._sizes[stage]
            if self._held[rank] > self.peaks[rank]:
                self.peaks[rank] = self._held[rank]
        else:
            self._held[rank] -= self._early[stage]
            self._reclaimable[rank] += self._late[stage]
            self._weights[rank].append(stage)
        self._deliver(rank, end, kind, stage)

    def _deliver(self, rank: int, end: float, kind: int, stage: int) -> None:
        """Announce the result of an F or B to the stage that waits for it."""
        target = stage + 1 - 2 * kind
        if target == len(self._sizes):
            target, kind = stage, 1  # after the loss its backward can run
        elif target < 0:
            return
        receiver = self._problem.placement[target]
        if receiver != rank:
            end += self._problem.costs.hop
            heappush(self._arrivals[receiver], end)
        heappush(self._events, (end, 2 * target + kind))
