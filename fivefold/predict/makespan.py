"""How long a program takes, for many costs at once: what a search asks some thousand times.

The graph of a program does not depend on its costs, so it is built once and walked once for all
of them: level by level, a level being the acts that wait for none of each other. A program is
built for few microbatches only: beyond its warm-up every further round of microbatches adds the
same time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from fivefold.layout import Layout
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Act, Kind, Program
from fivefold.pipeline.order import Order
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.limits import Place
from fivefold.pipeline.schedules.registry import known_of

Index = NDArray[np.intp]

_START, _NOTHING = 0, 1
"""Rows that stand for the start of the step, and for a message that is not needed."""


@dataclass(frozen=True)
class Level:
    """Acts that wait only for acts of earlier levels; R of them.

    Attributes:
        before: [R] rows of the acts before them on their ranks.
        messages: [R] rows of the acts on other ranks whose results they wait for; a pair's
            backward may wait for a second one, in a further array.
        kinds: [R] of the acts.
    """

    before: Index
    messages: tuple[Index, ...]
    kinds: Index


@dataclass(frozen=True, eq=False)
class Timetable:
    """A program as levels of rows to be walked once, after two rows for `_START` and `_NOTHING`.

    Attributes:
        program: program that is estimated.
        kinds: an act of every cost that occurs.
        levels: levels in order.
    """

    program: Program
    kinds: tuple[Act, ...]
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, program: Program) -> "Timetable":
        """The timetable of a compute-only program."""
        acts = [(rank, act) for rank, row in enumerate(program.ranks) for act in row]
        waits = _waits(program, [act for _, act in acts])
        before = [
            node - 1 if node and acts[node - 1][0] == rank else -1
            for node, (rank, _) in enumerate(acts)
        ]
        levels = np.array(_levels(program, before, waits))
        order = np.argsort(levels, kind="stable")
        row = np.full(len(acts) + 1, _NOTHING)  # -1 reads the last one: nothing
        row[order] = np.arange(2, len(acts) + 2)
        numbers: dict[object, int] = {}
        examples: list[Act] = []
        kinds = np.zeros(len(acts), np.intp)
        for node, (_, act) in enumerate(acts):
            key = (act.kind, act.stage, act.kids and act.kids[1].stage)
            if key not in numbers:
                numbers[key] = len(numbers)
                examples.append(act)
            kinds[node] = numbers[key]
        first = np.array(before)
        before_rows = np.where(first < 0, _START, row[first])
        message_rows = [row[column] for column in waits]
        ends = np.searchsorted(levels[order], np.arange(levels.max(initial=-1) + 2))
        found = []
        for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            here = order[start:end]
            sent = (rows[here] for rows in message_rows)
            needed = tuple(rows for rows in sent if (rows != _NOTHING).any())
            found.append(Level(before_rows[here], needed, kinds[here]))
        return cls(program, tuple(examples), tuple(found))

    def makespans(self, costs: Sequence[Costs]) -> NDArray[np.float64]:
        """Of each of some costs, as `simulate(program, costs).makespan`."""
        parts, slices = self.program.num_weight_parts, self.program.num_slices
        times = np.array([[each.of(act, parts, slices) for each in costs] for act in self.kinds])
        hops = np.array([each.hop for each in costs])
        count = sum(len(level.kinds) for level in self.levels)
        ends = np.zeros((count + 2, len(costs)))
        ends[_NOTHING] = -np.inf
        row = 2
        for level in self.levels:  # `take` into place: there are thousands of small levels
            found = ends[row : row + len(level.kinds)]
            ends.take(level.before, 0, found, "clip")
            for message in level.messages:
                arrivals = ends.take(message, 0)
                arrivals += hops
                np.maximum(found, arrivals, out=found)
            found += times.take(level.kinds, 0)
            row += len(found)
        latest: NDArray[np.float64] = ends.max(axis=0)
        return latest

    def hidden(self, costs: Costs) -> float:
        """Seconds of all ranks by which pairs are shorter than their halves in turn."""
        slices = self.program.num_slices
        return sum(
            count * (sum(costs.of(kid, 1, slices) for kid in act.kids) - costs.of(act, 1, slices))
            for act, count in self._pairs
        )

    def repeated(self, costs: Costs) -> float:
        """Seconds of all ranks in forwards of whole stages that run again."""
        slices = self.program.num_slices
        again = (each for each in self._counts if each[0].kind is Kind.R)
        return sum(count * costs.of(act, 1, slices) for act, count in again)

    @cached_property
    def _pairs(self) -> list[tuple[Act, int]]:
        """An example of each kind of pair, and how many there are."""
        return [(act, count) for act, count in self._counts if act.kids]

    @cached_property
    def _counts(self) -> list[tuple[Act, int]]:
        """An example of each kind of act, and how many there are."""
        counts = np.bincount(np.concatenate([level.kinds for level in self.levels])).tolist()
        return list(zip(self.kinds, counts, strict=True))


def _waits(program: Program, acts: Sequence[Act]) -> list[Index]:
    """Of each act the one on another rank whose forward it waits for, and whose backward; or -1.

    What acts of the same rank wait for comes before them in its order.
    """
    slices, placement = program.num_slices, program.placement
    length = program.num_stages // program.num_copies
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    for node, act in enumerate(acts):
        for kid in act.elementary:
            made = forwards if kid.kind is Kind.F else backwards
            if kid.kind in _SENT:
                made[kid.stage, kid.mb * slices + kid.slice] = node
    waits = [np.full(len(acts), -1) for _ in range(2)]
    for made, column, step, end in (
        (forwards, waits[0], -1, 0),
        (backwards, waits[1], 1, length - 1),
    ):
        for (stage, piece), node in made.items():
            if stage % length != end and placement[stage + step] != placement[stage]:
                column[node] = made[stage + step, piece]
    return waits


_SENT = frozenset({Kind.F, Kind.B, Kind.BW})


def _levels(program: Program, before: Sequence[int], waits: Sequence[Index]) -> list[int]:
    """How many acts in a row each act waits for, at most.

    Raises:
        ProgramError: some wait for each other.
    """
    one, other = (column.tolist() for column in waits)
    levels = [-2] * len(before) + [-1]  # not known yet; and of what -1 stands for
    nodes = iter(range(len(before)))
    queues = [deque(islice(nodes, len(row))) for row in program.ranks]
    while any(queues):
        known = len(levels) - sum(map(len, queues))
        for queue in queues:
            while queue:
                node = queue[0]
                sent, back = levels[one[node]], levels[other[node]]
                if sent == -2 or back == -2:
                    break
                levels[node] = 1 + max(levels[before[node]], sent, back)
                queue.popleft()
        if known == len(levels) - sum(map(len, queues)):
            dependency_graph(program).order()  # spells out which
    return levels[:-1]


@lru_cache(maxsize=256)
def timetable(order: Order, *, pairs: bool, eager: bool) -> Timetable:
    """The timetable of a program; `pairs` and `eager` as `Order.executed` has them."""
    return Timetable.of(order.executed(pairs=pairs, eager=eager))


@dataclass(frozen=True)
class Clock:
    """Tells the times of a layout's program, of which no more than a few rounds are walked.

    Attributes:
        schedule: schedule of the program.
        group: group of microbatches, where the settings give one.
        microbatches: microbatches of the program.
        tables: shorter programs and how often each counts: the sum is what the program takes.
    """

    schedule: str
    group: int | None
    microbatches: int
    tables: tuple[tuple[Timetable, float], ...]

    @classmethod
    def of(cls, layout: Layout, *, eager: bool) -> "Clock":
        """The clock of a layout.

        A round is as many microbatches as a schedule takes before it repeats: its group where
        there are some, two where the model lies on the ranks twice, else one. A program
        that was searched for repeats nothing: all of it is walked.

        Args:
            layout: layout whose pairs overlap where experts' messages are to hide in them.
            eager: whether a dX leaves before its dW is computed.
        """
        parallel, placement = layout.config.parallel, layout.split.placement
        total = layout.num_microbatches

        def table_of(microbatches: int) -> Timetable:
            return timetable(layout.order(microbatches), pairs=layout.overlaps_pairs, eager=eager)

        if layout.schedule == SYNTHESISED:
            return cls(layout.schedule, None, total, ((table_of(total), 1.0),))
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        ranks = layout.split.num_ranks
        in_groups = layout.known.groups or (len(placement) > ranks and placement[ranks] == 0)
        a_round = (group or ranks) if in_groups else layout.num_copies
        # Where the halves of a pair take turns, what they wait for each other adds up only late.
        in_turn = layout.runs_pairs and not layout.overlaps_pairs
        rounds = 2 if in_groups else -(-(2 * ranks + 2) * (4 if in_turn else 1) // a_round)
        if layout.config.memory.recompute_in_flight_limit is not None:
            # Which microbatches run again repeats after another number of them on each rank, and
            # so on all ranks only late: over so many it is the same within a per cent.
            warm_up = a_round * rounds
            a_round *= -(-4 * ranks // a_round)
            rounds = -(-warm_up // a_round)
        short = total % a_round + a_round * rounds
        if total <= short + a_round:
            return cls(layout.schedule, group, total, ((table_of(total), 1.0),))
        more = (total - short) / a_round
        tables = (table_of(short), 1 - more), (table_of(short + a_round), more)
        return cls(layout.schedule, group, total, tables)

    def makespans(self, costs: Sequence[Costs]) -> list[float]:
        """Seconds of a step's program with each of some costs."""
        told = sum(share * table.makespans(costs) for table, share in self.tables)
        found: list[float] = np.asarray(told).tolist()
        program = self.tables[0][0].program
        if len(self.tables) == 1 or program.num_copies > 1:
            return found
        asked = (self.schedule, self.group, program, self.microbatches)
        least = (_least(*asked, each) for each in costs)
        return list(map(max, found, least))

    def hidden(self, costs: Costs) -> float:
        """Seconds of all ranks by which pairs are shorter than their halves in turn."""
        return sum(share * table.hidden(costs) for table, share in self.tables)

    def repeated(self, costs: Costs) -> float:
        """Seconds of all ranks in forwards of whole stages that run again."""
        return sum(share * table.repeated(costs) for table, share in self.tables)


def _least(schedule: str, group: int | None, program: Program, total: int, costs: Costs) -> float:
    """What `search.time_bound` says that every rank needs for so many microbatches.

    Its work after its first input, its last dX on its way to stage 0, and every chunk to the end
    of the model and back, of which it may keep but a few: the slowest may rule only late.
    """
    placement, slices, limits = program.placement, program.num_slices, known_of(schedule).limits
    crossed = [0, *accumulate(a != b for a, b in pairwise(placement))]
    there_and_back = [f + b for f, b in zip(costs.f, costs.b, strict=True)]
    ahead = list(accumulate(reversed(there_and_back)))[::-1]
    befores = [[0.0, *accumulate(times)] for times in (costs.f, costs.b)]
    least = 0.0
    for rank in range(program.num_ranks):
        own = program.stages_of(rank)
        work = sum(costs.f[s] + costs.b[s] + costs.w[s] for s in own)
        if costs.fb is not None:  # each forward may have the partner that hides most
            backwards = [(stage, costs.b[stage] + costs.w[stage]) for stage in own]
            work -= sum(
                costs.f[s] - min(costs.fb[s][other] - alone for other, alone in backwards)
                for s in own
            )
        place = Place(program.num_ranks, len(own), rank)
        hops = costs.hop * crossed[own[0]]
        head, tail = (before[own[0]] / slices + hops for before in befores)
        weights = total * sum(costs.w[s] for s in own)
        deferred = limits.deferred(place)
        later = weights if deferred == inf else min(weights, deferred * costs.w[own[0]])
        lasts = sum(ahead[s] + 2 * costs.hop * (crossed[-1] - crossed[s]) for s in own)
        most = inf
        if group is None or len(own) == 1:
            most = limits.in_flight(place)
        kept = total * lasts / slices / min(most, total * len(own))
        least = max(
            least,
            head + total * work,
            head + total * work - later + tail + costs.w[0] / slices,
            head + kept + tail,
        )
    return least
