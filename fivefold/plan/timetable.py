"""How long a program takes, for many costs in turn: what a search asks some hundred times.

The graph of a program does not depend on its costs, so it is built once and walked for each. A
program is built for few microbatches only: beyond its warm-up every further round of microbatches
adds the same time.
"""

from dataclasses import dataclass
from functools import lru_cache

from fivefold.pipeline.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Act, Program
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES, build_program


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


@lru_cache(maxsize=256)
def timetable(
    schedule: str, placement: tuple[int, ...], microbatches: int, group: int | None, eager: bool
) -> Timetable:
    """The timetable of a schedule; `eager`: dX leaves before dW is computed."""
    program = build_program(schedule, placement, microbatches, group_size=group)
    return Timetable.of(eager_dx(program) if eager else program)


def makespan(
    schedule: str,
    placement: tuple[int, ...],
    microbatches: int,
    costs: Costs,
    group: int | None = None,
    eager: bool = False,
) -> float:
    """Seconds of a step's program, of which no more than a few rounds are simulated.

    A round is as many microbatches as a schedule takes before it repeats: its group where stages
    are interleaved, two where the model lies on the ranks twice, else one.
    """
    ranks = max(placement) + 1
    size = group or ranks
    interleaved = len(placement) > ranks and placement[ranks] == 0
    a_round = size if interleaved else SCHEDULES[schedule].num_copies
    rounds = 2 if interleaved else -(-(2 * ranks + 2) // a_round)
    short = microbatches % a_round + a_round * rounds
    if microbatches <= short + a_round:
        return timetable(schedule, placement, microbatches, group, eager).makespan(costs)
    base = timetable(schedule, placement, short, group, eager).makespan(costs)
    more = timetable(schedule, placement, short + a_round, group, eager).makespan(costs)
    steady = base + (more - base) * (microbatches - short) / a_round
    if SCHEDULES[schedule].num_copies > 1:
        return steady
    return max(steady, _least(placement, microbatches, costs))


def _least(placement: tuple[int, ...], microbatches: int, costs: Costs) -> float:
    """What a rank's work takes after its first input: the slowest may rule only late."""
    least = 0.0
    for rank in range(max(placement) + 1):
        own = [stage for stage, owner in enumerate(placement) if owner == rank]
        work = sum(costs.f[s] + costs.b[s] + costs.w[s] for s in own)
        least = max(least, sum(costs.f[: own[0]]) + microbatches * work)
    return least
