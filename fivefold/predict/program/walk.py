"""Walks a pipeline program for many sets of costs at once.

The dependency graph of a program does not depend on its costs, so it is built once and walked once
for all of them, level by level: the actions of a level do not depend on each other.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise

import numpy as np
from numpy.typing import NDArray

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Act, Kind, Program

Index = NDArray[np.intp]
Values = NDArray[np.float64]

_START, _NOTHING, _READY = 0, 1, 2
"""Rows of the table of end times: the start of the step, a message that is not needed, and from
here on, for each stage, when its first forward can begin."""


@dataclass(frozen=True)
class Level:
    """R actions that depend only on actions of earlier levels.

    Attributes:
        before: [R] row of the action before each action on its rank.
        messages: [R] row of the action on another rank whose result each action waits for; there
            is a second array if some paired actions wait for two, and one if there are first
            forwards.
        kinds: [R] kind of each action.
    """

    before: Index
    messages: tuple[Index, ...]
    kinds: Index


@dataclass(frozen=True)
class Walked:
    """Times of a program with N sets of costs, in seconds.

    Attributes:
        makespans: [N] from its first start to its last end.
        starts: [S, N] when the last action of each stage starts that computes its weight gradients.
        ends: [S, N] when it ends.
    """

    makespans: Values
    starts: Values
    ends: Values


@dataclass(frozen=True, eq=False)
class LeveledProgram:
    """A program whose actions are grouped into levels, for one walk over all of them.

    The table of end times has a row for each action, in the order of the levels, after `_START`,
    `_NOTHING` and those from `_READY` on.

    Attributes:
        program: the program.
        kinds: one example of each kind of action; all actions of a kind have the same cost. The
            first forward of each stage is a kind of its own, and these are the last.
        levels: the levels in order.
        lasts: [S, 2] row and kind of the last action of each stage that computes its weight
            gradients.
    """

    program: Program
    kinds: tuple[Act, ...]
    levels: tuple[Level, ...]
    lasts: Index

    @classmethod
    def of(cls, program: Program) -> "LeveledProgram":
        """The levels of a program without messages."""
        acts = [(rank, act) for rank, row in enumerate(program.ranks) for act in row]
        waits = _waits(program, [act for _, act in acts])
        before = [
            node - 1 if node and acts[node - 1][0] == rank else -1
            for node, (rank, _) in enumerate(acts)
        ]
        levels = np.array(_levels(program, before, waits))
        order = np.argsort(levels, kind="stable")
        row = np.full(len(acts) + 1, _NOTHING)  # index -1 reads the last entry: nothing
        row[order] = np.arange(len(acts)) + _READY + program.num_stages
        examples, kinds = _kinds([act for _, act in acts])
        firsts, lasts = _ends(program, examples, kinds)
        examples += [acts[node][1] for node in firsts]
        kinds[firsts] = np.arange(len(firsts)) + len(examples) - len(firsts)
        first = np.array(before)
        before_rows = np.where(first < 0, _START, row[first])
        begins = np.full(len(acts), _NOTHING)
        begins[firsts] = np.arange(len(firsts)) + _READY
        message_rows, early = [row[column] for column in waits], set(levels[firsts].tolist())
        ends = np.searchsorted(levels[order], np.arange(levels.max(initial=-1) + 2))
        found = []
        for level, (start, end) in enumerate(pairwise(ends.tolist())):
            here = order[start:end]
            rows_of = [*message_rows, begins] if level in early else message_rows
            sent = (rows[here] for rows in rows_of)
            needed = tuple(rows for rows in sent if (rows != _NOTHING).any())
            found.append(Level(before_rows[here], needed, kinds[here]))
        return cls(program, tuple(examples), tuple(found), np.stack([row[lasts], kinds[lasts]], 1))

    def makespans(self, costs: Sequence[Costs]) -> Values:
        """The makespan for each set of costs, equal to `simulate(program, costs).makespan`."""
        nothing = np.zeros((self.program.num_stages, len(costs)))
        return self.walk(costs, nothing, nothing).makespans

    def walk(self, costs: Sequence[Costs], ready: Values, gathers: Values) -> Walked:
        """The times for N sets of costs.

        Args:
            costs: the sets.
            ready: [S, N] when the first forward of each stage can begin.
            gathers: [S, N] by how much it is longer than others.
        """
        parts, slices = self.program.num_weight_parts, self.program.num_slices
        times = np.array([[each.of(act, parts, slices) for each in costs] for act in self.kinds])
        hops = np.array([each.hop for each in costs])
        times[-len(gathers) :] += gathers
        row, count = _READY + len(ready), sum(len(level.kinds) for level in self.levels)
        ends = np.zeros((row + count, len(costs)))
        ends[_NOTHING] = -np.inf
        ends[_READY:row] = ready - hops  # like messages from another rank
        for level in self.levels:  # `take` into place, since there are thousands of small levels
            found = ends[row : row + len(level.kinds)]
            ends.take(level.before, 0, found, "clip")
            for message in level.messages:
                arrivals = ends.take(message, 0)
                arrivals += hops
                np.maximum(found, arrivals, out=found)
            found += times.take(level.kinds, 0)
            row += len(found)
        last, kind = self.lasts.T
        return Walked(ends.max(axis=0), ends[last] - times[kind], ends[last])

    def hidden(self, costs: Costs) -> float:
        """Seconds that pairing saves compared with running the halves in turn, over all ranks."""
        slices = self.program.num_slices
        return sum(
            count * (sum(costs.of(kid, 1, slices) for kid in act.kids) - costs.of(act, 1, slices))
            for act, count in self._pairs
        )

    def repeated(self, costs: Costs) -> float:
        """Seconds, over all ranks, of whole-stage forwards that are repeated."""
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


def _kinds(acts: Sequence[Act]) -> tuple[list[Act], Index]:
    """An example of each kind of action, and the kind of each action."""
    numbers: dict[object, int] = {}
    examples: list[Act] = []
    kinds = np.zeros(len(acts), np.intp)
    for node, act in enumerate(acts):
        key = (act.kind, act.stage, act.kids and act.kids[1].stage)
        if key not in numbers:
            numbers[key] = len(numbers)
            examples.append(act)
        kinds[node] = numbers[key]
    return examples, kinds


def _ends(program: Program, examples: Sequence[Act], kinds: Index) -> tuple[Index, Index]:
    """The first forward of each stage, and its last action that computes its weight gradients."""
    nodes = np.arange(len(kinds))
    begin, end = np.full(len(examples), len(kinds)), np.full(len(examples), -1)
    np.minimum.at(begin, kinds, nodes)
    np.maximum.at(end, kinds, nodes)
    firsts, lasts = np.full(program.num_stages, len(kinds)), np.full(program.num_stages, -1)
    for kind, act in enumerate(examples):  # the actions of a stage are on one rank, in order
        for kid in act.elementary:
            if kid.kind is Kind.F:
                firsts[kid.stage] = min(firsts[kid.stage], begin[kind])
            elif kid.kind in (Kind.W, Kind.BW):
                lasts[kid.stage] = max(lasts[kid.stage], end[kind])
    return firsts, lasts


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
    levels = [-2] * len(before) + [-1]  # -2: not yet known; the last entry stands for "none"
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
