"""Zero-bubble schedules for given costs and a memory cap (Qi et al., 2023, section 3.1).

Ranks hold one stage each. Microbatches are scheduled one by one; each adds a wave of F down the
pipeline and a wave of B up, and W goes where a rank would wait, or where memory runs out.
"""

from dataclasses import dataclass
from itertools import product
from math import inf

from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import Act, Kind
from fivefold.pipeline.schedules.fixed import Orders


@dataclass(frozen=True)
class HeuristicOptions:
    """Options of the heuristic.

    Attributes:
        early: in the warm-up, stop before the forward that would delay the first B.
        prefer_b: let the next rank's B precede one more F, if that costs no more idle time than the
            idlest rank has.
        patient: if a W does not fit before the awaited input, still run it on a rank that has been
            less idle than the idlest.
    """

    early: bool
    prefer_b: bool
    patient: bool


ALL_OPTIONS = tuple(HeuristicOptions(*choices) for choices in product((True, False), repeat=3))


class AutomaticZeroBubble:
    """One run of the heuristic.

    Args:
        costs: costs of each rank's stage.
        num_microbatches: microbatches per step.
        cap: maximum activation memory of a rank, in the unit of the footprint.
        footprint: activation memory of a microbatch on each stage.
        options: options of the heuristic.

    Attributes:
        orders: actions of each rank.
        makespan: time of the step; infinite if the heuristic ran out of memory.
    """

    def __init__(
        self,
        costs: Costs,
        num_microbatches: int,
        cap: float,
        footprint: Footprint,
        options: HeuristicOptions,
    ) -> None:
        self._costs = {Kind.F: costs.f, Kind.B: costs.b, Kind.W: costs.w}
        self._hop, self._total, self._cap, self._options = costs.hop, num_microbatches, cap, options
        self._num_ranks = len(costs.f)
        sizes = [footprint.size(rank) for rank in range(self._num_ranks)]
        self._sizes = {
            Kind.F: sizes,
            Kind.B: [-footprint.freed_by_b * size for size in sizes],
            Kind.W: [-(1 - footprint.freed_by_b) * size for size in sizes],
        }
        ranks = range(self._num_ranks)
        self._ends = {kind: [[0.0] * num_microbatches for _ in ranks] for kind in self._costs}
        self._done = {kind: [0] * self._num_ranks for kind in self._costs}
        self._clock = [0.0] * self._num_ranks
        self._idle = [0.0] * self._num_ranks  # since the rank's first forward
        self._held = [0.0] * self._num_ranks
        self._full = False
        self.orders: Orders = [[] for _ in ranks]
        self._run()
        self.makespan = inf if self._full else max(self._clock)

    def _run(self) -> None:
        ranks = range(self._num_ranks)
        self._warm_up()
        for _ in range(1, self._total):
            for rank, wanted in zip(ranks, self._forwards_wanted(), strict=True):
                if wanted:
                    self._make_room(rank)
                    if rank > 0:
                        self._fill(rank, Kind.F)
                    self._put(rank, Kind.F)
            if self._full:
                return
            for rank in reversed(ranks):
                if rank < self._num_ranks - 1:
                    self._fill(rank, Kind.B)
                while rank == 0 and self._done[Kind.F][0] == self._total and self._pending(0):
                    self._put(0, Kind.W)
                self._put(rank, Kind.B)
        for rank in ranks:
            while self._pending(rank):
                self._put(rank, Kind.W)

    def _warm_up(self) -> None:
        """The first F wave, as many more forwards as fit before the first B, and that B wave."""
        ranks = range(self._num_ranks)
        for rank in ranks:
            self._put(rank, Kind.F)
        more = [0] * self._num_ranks
        last = self._num_ranks - 1
        first_b = self._clock[last] + self._costs[Kind.B][last]
        for rank in reversed(range(last)):
            held, clock = self._held[rank], self._clock[rank]
            size, cost = self._sizes[Kind.F][rank], self._costs[Kind.F][rank]
            arrival = first_b + self._hop
            while 1 + more[rank] < self._total and held + size <= self._cap:
                if clock + cost > arrival if self._options.early else clock >= arrival:
                    break
                held, clock, more[rank] = held + size, clock + cost, more[rank] + 1
            first_b = max(clock, arrival) + self._costs[Kind.B][rank]
        for rank in range(1, self._num_ranks):
            before = more[rank - 1]
            limit = before if 1 + before == self._total else max(before - 1, 0)
            more[rank] = min(more[rank], limit)
        for rank in ranks:
            for _ in range(more[rank]):
                self._put(rank, Kind.F)
        for rank in reversed(ranks):
            self._put(rank, Kind.B)

    def _forwards_wanted(self) -> list[bool]:
        """Which ranks run one more forward before their next B: only if all later ranks do."""
        wanted = [
            self._done[Kind.F][rank] < self._total and not self._b_first(rank)
            for rank in range(self._num_ranks)
        ]
        for rank in reversed(range(self._num_ranks - 1)):
            wanted[rank] = wanted[rank] and wanted[rank + 1]
        return wanted

    def _b_first(self, rank: int) -> bool:
        """Whether the rank should wait for the next rank's B instead of running F."""
        if not self._options.prefer_b or rank + 1 == self._num_ranks:
            return False
        ahead = self._done[Kind.F][rank] - self._done[Kind.F][rank + 1]
        if ahead < 2:
            return False
        after = rank + 1
        arrival = self._clock[after] + self._hop
        arrival += self._costs[Kind.F][after] + self._costs[Kind.B][after]
        if self._clock[rank] >= arrival:
            return True
        held, clock = self._held[rank] + self._sizes[Kind.F][rank], self._clock[rank]
        for _ in range(self._pending(rank)):
            if held <= self._cap:
                break
            held += self._sizes[Kind.W][rank]
            clock += self._costs[Kind.W][rank]
        if clock + self._costs[Kind.F][rank] <= arrival:
            return False
        return arrival - self._clock[rank] <= max(self._idle) - self._idle[rank]

    def _pending(self, rank: int) -> int:
        return self._done[Kind.B][rank] - self._done[Kind.W][rank]

    def _arrival(self, rank: int, kind: Kind) -> float:
        """When the input of a rank's next F or B arrives."""
        source = rank - 1 if kind is Kind.F else rank + 1
        if kind is Kind.W or source not in range(self._num_ranks):
            return 0.0
        return self._ends[kind][source][self._done[kind][rank]] + self._hop

    def _make_room(self, rank: int) -> None:
        """Run W until the next F fits."""
        while self._held[rank] + self._sizes[Kind.F][rank] > self._cap:
            if not self._pending(rank):
                self._full = True
                return
            self._put(rank, Kind.W)

    def _fill(self, rank: int, kind: Kind) -> None:
        """Run W while waiting for the next F or B."""
        arrival, cost = self._arrival(rank, kind), self._costs[Kind.W][rank]
        while self._pending(rank) and self._clock[rank] + cost <= arrival:
            self._put(rank, Kind.W)
        wait = arrival - self._clock[rank]
        if self._pending(rank) and wait > 0:
            idlest = wait > max(self._idle) - self._idle[rank]
            if idlest or self._options.patient:
                self._put(rank, Kind.W)

    def _put(self, rank: int, kind: Kind) -> None:
        mb = self._done[kind][rank]
        start = max(self._clock[rank], self._arrival(rank, kind))
        if self._done[Kind.F][rank]:
            self._idle[rank] += start - self._clock[rank]
        self._clock[rank] = self._ends[kind][rank][mb] = start + self._costs[kind][rank]
        self._held[rank] += self._sizes[kind][rank]
        self._done[kind][rank] += 1
        self.orders[rank].append(Act(kind, rank, mb))
