"""Computes the makespan of a pipeline program for many sets of costs at once.

A search needs some thousand makespans. The dependency graph of a program does not depend on its
costs, so it is built once and walked once for all of them, level by level: the actions of a level
do not depend on each other. Only programs of few microbatches are built, since after the warm-up
every further round of microbatches adds the same time.
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
"""Rows of the table of end times: the start of the step, and a message that is not needed."""


@dataclass(frozen=True)
class Level:
    """R actions that depend only on actions of earlier levels.

    Attributes:
        before: [R] row of the action before each action on its rank.
        messages: [R] row of the action on another rank whose result each action waits for; there
            is a second array if some paired actions wait for two.
        kinds: [R] kind of each action.
    """

    before: Index
    messages: tuple[Index, ...]
    kinds: Index


@dataclass(frozen=True, eq=False)
class LeveledProgram:
    """A program whose actions are grouped into levels, for one walk over all of them.

    The table of end times has a row for each action, in the order of the levels, after the two
    rows `_START` and `_NOTHING`.

    Attributes:
        program: the program.
        kinds: one example of each kind of action; all actions of a kind have the same cost.
        levels: the levels in order.
    """

    program: Program
    kinds: tuple[Act, ...]
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, program: Program) -> "LeveledProgram":
        """The levels of a compute-only program."""
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
        """The makespan for each set of costs, equal to `simulate(program, costs).makespan`."""
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
        """Seconds that pairing saves compared with running the halves in turn, over all ranks."""
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
        """An example of each kind of paired action, and the number of its actions."""
        return [(act, count) for act, count in self._counts if act.kids]

    @cached_property
    def _counts(self) -> list[tuple[Act, int]]:
        """An example of each kind of action, and the number of its actions."""
        counts = np.bincount(np.concatenate([level.kinds for level in self.levels])).tolist()
        return list(zip(self.kinds, counts, strict=True))


def _waits(program: Program, acts: Sequence[Act]) -> list[Index]:
    """For each action, the action on another rank whose forward it waits for, and whose backward.

    -1 means none. Dependencies within a rank need no entry: they follow from its order.
    """
    slices, placement = program.num_slices, program.placement
    length = program.num_stages // program.num_copies
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    for node, act in enumerate(acts):
        for kid in act.elementary:
            made = forwards if kid.kind is Kind.F else backwards
            if kid.direction:
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


def _levels(program: Program, before: Sequence[int], waits: Sequence[Index]) -> list[int]:
    """The level of each action: the length of the longest chain of actions that it waits for.

    Raises:
        ProgramError: actions wait for each other in a circle.
    """
    one, other = (column.tolist() for column in waits)
    levels = [-2] * len(before) + [-1]  # -2: not known yet; the last entry is for "none"
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
            dependency_graph(program).order()  # raises, and names the circle
    return levels[:-1]


@lru_cache(maxsize=256)
def leveled_program(order: Order, *, pairs: bool, eager: bool) -> LeveledProgram:
    """The levels of a program; `Order.executed` describes `pairs` and `eager`."""
    return LeveledProgram.of(order.executed(pairs=pairs, eager=eager))


@dataclass(frozen=True)
class Clock:
    """Times the program of a layout by extrapolation from a few rounds of microbatches.

    Attributes:
        schedule: schedule of the program.
        group: microbatches in a group; None if the settings do not give it.
        microbatches: microbatches of the program.
        tables: shorter programs with their weights: the weighted sum of their makespans is the
            makespan of the program.
    """

    schedule: str
    group: int | None
    microbatches: int
    tables: tuple[tuple[LeveledProgram, float], ...]

    @classmethod
    def of(cls, layout: Layout, *, eager: bool) -> "Clock":
        """The clock of a layout.

        A round is the number of microbatches after which a schedule repeats itself: a group if the
        schedule has groups, two if the pipeline holds two copies of the model, else one. A
        synthesised schedule does not repeat itself, so all of it is walked.

        Args:
            layout: the layout.
            eager: whether a dX is sent before its dW is computed.
        """
        parallel, placement = layout.config.parallel, layout.split.placement
        total = layout.num_microbatches

        def table_of(microbatches: int) -> LeveledProgram:
            return leveled_program(
                layout.order(microbatches), pairs=layout.overlaps_pairs, eager=eager
            )

        if layout.schedule == SYNTHESISED:
            return cls(layout.schedule, None, total, ((table_of(total), 1.0),))
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        ranks = layout.split.num_ranks
        in_groups = layout.known.groups or (len(placement) > ranks and placement[ranks] == 0)
        a_round = (group or ranks) if in_groups else layout.num_copies
        # If the halves of a pair run in turn, their waits for each other accumulate only late.
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
        """Seconds of the program for each set of costs."""
        told = sum(share * table.makespans(costs) for table, share in self.tables)
        found: list[float] = np.asarray(told).tolist()
        program = self.tables[0][0].program
        if len(self.tables) == 1 or program.num_copies > 1:
            return found
        asked = (self.schedule, self.group, program, self.microbatches)
        least = (_least(*asked, each) for each in costs)
        return list(map(max, found, least))

    def hidden(self, costs: Costs) -> float:
        """Seconds that pairing saves compared with running the halves in turn, over all ranks."""
        return sum(share * table.hidden(costs) for table, share in self.tables)

    def repeated(self, costs: Costs) -> float:
        """Seconds of all ranks in forwards of whole stages that run again."""
        return sum(share * table.repeated(costs) for table, share in self.tables)


def _least(schedule: str, group: int | None, program: Program, total: int, costs: Costs) -> float:
    """The largest lower bound of any rank for this number of microbatches, in seconds.

    These are the bounds of `search.time_bound`. The extrapolation from short programs may miss a
    limit that shows only after many microbatches.
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
