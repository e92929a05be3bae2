"""How long a program takes, for many costs in turn: what a search asks some hundred times.

The graph of a program does not depend on its costs, so it is built once and walked for each. A
program is built for few microbatches only: beyond its warm-up every further round of microbatches
adds the same time.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fivefold.check import Layout
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Act, Program
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.lowering import executed
from fivefold.pipeline.modelled import searched_program
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import build_program


@dataclass(frozen=True)
class Timetable:
    """A program as rows to be walked once, each after all that it waits for.

    Attributes:
        program: of which.
        kinds: an act of every cost that occurs; the first stands for no cost.
        rows: of each act two rows before it that it waits for (row 0 is the start of the step),
            whether the second one's message has to travel, and its kind.
    """

    program: Program
    kinds: tuple[Act | None, ...]
    rows: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def of(cls, program: Program) -> "Timetable":
        """The timetable of a compute-only program."""
        graph = dependency_graph(program)
        computes = len(graph.computes)
        waits: list[list[tuple[int, int]]] = [[] for _ in range(computes)]
        for node in range(computes):
            for after in graph.successors[node]:
                if after < computes:
                    waits[after].append((node, 0))
        for message, producer in enumerate(graph.producers, computes):
            for after in graph.successors[message]:
                waits[after].append((producer, 1))
        kinds: dict[object, int] = {None: 0}
        examples: list[Act | None] = [None]
        rows: list[tuple[int, int, int, int]] = []
        row_of = [0] * computes
        for node in graph.order():
            if node >= computes:
                continue
            act = graph.computes[node][1]
            key = tuple((kid.kind, kid.stage) for kid in act.elementary)
            if key not in kinds:
                kinds[key] = len(examples)
                examples.append(act)
            before, travels = 0, [(row_of[n], hop) for n, hop in waits[node]]
            for other, hop in travels[:-1]:  # more than two: rows that only wait
                if hop or before:
                    rows.append((before, other, hop, 0))
                    before = len(rows)
                else:
                    before = other
            other, hop = travels[-1] if travels else (0, 0)
            rows.append((before, other, hop, kinds[key]))
            row_of[node] = len(rows)
        return cls(program, tuple(examples), tuple(rows))

    def makespan(self, costs: Costs) -> float:
        """As `simulate(program, costs).makespan`."""
        parts, slices = self.program.num_weight_parts, self.program.num_slices
        times = [0.0 if act is None else costs.of(act, parts, slices) for act in self.kinds]
        hops = (0.0, costs.hop)
        ends = [0.0]
        for before, other, hop, kind in self.rows:
            start, arrival = ends[before], ends[other] + hops[hop]
            ends.append((start if start > arrival else arrival) + times[kind])
        return max(ends)

    def hidden(self, costs: Costs) -> float:
        """Seconds of all ranks by which pairs are shorter than their halves in turn."""
        slices = self.program.num_slices
        return sum(
            count * (sum(costs.of(kid, 1, slices) for kid in act.kids) - costs.of(act, 1, slices))
            for act, count in self._pairs
        )

    @cached_property
    def _pairs(self) -> list[tuple[Act, int]]:
        """An example of each kind of pair, and how many there are."""
        counts = Counter(kind for *_, kind in self.rows)
        return [(act, counts[kind]) for kind, act in enumerate(self.kinds) if act and act.kids]


@lru_cache(maxsize=256)
def timetable(
    schedule: str,
    placement: tuple[int, ...],
    microbatches: int,
    group: int | None = None,
    slices: int = 1,
    *,
    pairs: bool = False,
    eager: bool = False,
) -> Timetable:
    """The timetable of a schedule; `pairs` and `eager` as `lowering.executed` has them."""
    program = build_program(schedule, placement, microbatches, group_size=group, num_slices=slices)
    return Timetable.of(executed(program, pairs=pairs, eager=eager))


@lru_cache(maxsize=32)
def _searched_timetable(problem: Problem) -> Timetable:
    return Timetable.of(searched_program(problem))


@dataclass(frozen=True)
class Clock:
    """Tells the times of a layout's program, of which no more than a few rounds are walked.

    Attributes:
        microbatches: of the program.
        tables: shorter programs and how often each counts: the sum is what the program takes.
    """

    microbatches: int
    tables: tuple[tuple[Timetable, float], ...]

    @classmethod
    def of(cls, layout: Layout, *, eager: bool) -> "Clock":
        """The clock of a layout.

        A round is as many microbatches as a schedule takes before it repeats: its group where
        stages are interleaved, two where the model lies on the ranks twice, else one. A program
        that was searched for repeats nothing: all of it is walked.

        Args:
            layout: whose pairs overlap where experts' messages are to hide in them.
            eager: whether a dX leaves before its dW is computed.
        """
        parallel, placement = layout.config.parallel, layout.split.placement
        total = layout.num_microbatches
        if layout.schedule == SYNTHESISED:
            return cls(total, ((_searched_timetable(layout.scheduling_problem()), 1.0),))
        group = parallel.microbatch_group_size_per_virtual_pipeline_stage
        ranks = layout.split.num_ranks

        def table(microbatches: int) -> Timetable:
            return timetable(
                layout.schedule,
                placement,
                microbatches,
                group,
                parallel.num_sequence_slices,
                pairs=layout.overlaps_pairs,
                eager=eager,
            )

        interleaved = len(placement) > ranks and placement[ranks] == 0
        a_round = (group or ranks) if interleaved else layout.num_copies
        # Where the halves of a pair take turns, what they wait for each other adds up only late.
        in_turn = layout.runs_pairs and not layout.overlaps_pairs
        rounds = 2 if interleaved else -(-(2 * ranks + 2) * (4 if in_turn else 1) // a_round)
        short = total % a_round + a_round * rounds
        if total <= short + a_round:
            return cls(total, ((table(total), 1.0),))
        more = (total - short) / a_round
        return cls(total, ((table(short), 1 - more), (table(short + a_round), more)))

    def makespan(self, costs: Costs) -> float:
        """Seconds of a step's program."""
        told = sum(share * table.makespan(costs) for table, share in self.tables)
        program = self.tables[0][0].program
        if len(self.tables) == 1 or program.num_copies > 1:
            return told
        return max(told, _least(program.placement, self.microbatches, costs))

    def hidden(self, costs: Costs) -> float:
        """Seconds of all ranks by which pairs are shorter than their halves in turn."""
        return sum(share * table.hidden(costs) for table, share in self.tables)


def _least(placement: tuple[int, ...], microbatches: int, costs: Costs) -> float:
    """What a rank's work takes after its first input: the slowest may rule only late."""
    least = 0.0
    for rank in range(max(placement) + 1):
        own = [stage for stage, owner in enumerate(placement) if owner == rank]
        work = sum(costs.f[s] + costs.b[s] + costs.w[s] for s in own)
        if costs.fb is not None:  # each forward may have the partner that hides most
            backwards = [(stage, costs.b[stage] + costs.w[stage]) for stage in own]
            work -= sum(
                costs.f[s] - min(costs.fb[s][other] - alone for other, alone in backwards)
                for s in own
            )
        least = max(least, sum(costs.f[: own[0]]) + microbatches * work)
    return least
