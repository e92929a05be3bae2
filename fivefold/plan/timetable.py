"""How long a program takes, for many costs in turn: what a search asks some hundred times.

The graph of a program does not depend on its costs, so it is built once and walked for each. A
program is built for few microbatches only: beyond its warm-up every further round of microbatches
adds the same time.
"""

from dataclasses import dataclass
from functools import lru_cache

from fivefold.pipeline.costs import Costs
from fivefold.pipeline.graph import dependency_graph
from fivefold.pipeline.ir import Program
from fivefold.pipeline.lowering import eager_dx
from fivefold.pipeline.schedules.registry import SCHEDULES, build_program


@dataclass(frozen=True)
class Timetable:
    """A program's compute acts in an order in which each follows all that it waits for.

    Attributes:
        program: of which.
        waits: of each act, the acts that it waits for: before it on its rank or handed over there,
            and those whose message it needs.
    """

    program: Program
    order: tuple[int, ...]
    local: tuple[tuple[int, ...], ...]
    remote: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, program: Program) -> "Timetable":
        """The timetable of a compute-only program."""
        graph = dependency_graph(program)
        computes = len(graph.computes)
        local: list[list[int]] = [[] for _ in range(computes)]
        remote: list[list[int]] = [[] for _ in range(computes)]
        for node in range(computes):
            for after in graph.successors[node]:
                if after < computes:
                    local[after].append(node)
        for message, producer in enumerate(graph.producers, computes):
            for after in graph.successors[message]:
                remote[after].append(producer)
        order = tuple(node for node in graph.order() if node < computes)
        return cls(program, order, tuple(map(tuple, local)), tuple(map(tuple, remote)))

    def makespan(self, costs: Costs) -> float:
        """As `simulate(program, costs).makespan`."""
        program, hop = self.program, costs.hop
        parts, slices = program.num_weight_parts, program.num_slices
        known: dict[tuple[object, ...], float] = {}
        weights = []
        for acts in program.ranks:
            for act in acts:
                key = (act.kind, act.stage, tuple((kid.kind, kid.stage) for kid in act.kids))
                if key not in known:
                    known[key] = costs.of(act, parts, slices)
                weights.append(known[key])
        ends = [0.0] * len(weights)
        local, remote = self.local, self.remote
        for node in self.order:
            start = 0.0
            for before in local[node]:
                if ends[before] > start:
                    start = ends[before]
            for before in remote[node]:
                if ends[before] + hop > start:
                    start = ends[before] + hop
            ends[node] = start + weights[node]
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
    short = microbatches % a_round + a_round * -(-(2 * ranks + 2) // a_round)
    if microbatches <= short + a_round:
        return timetable(schedule, placement, microbatches, group, eager).makespan(costs)
    base = timetable(schedule, placement, short, group, eager).makespan(costs)
    more = timetable(schedule, placement, short + a_round, group, eager).makespan(costs)
    steady = base + (more - base) * (microbatches - short) / a_round
    return max(steady, _least(placement, microbatches, costs))


def _least(placement: tuple[int, ...], microbatches: int, costs: Costs) -> float:
    """What a rank's work takes after its first input: the slowest may take over after the warm-up."""
    least = 0.0
    for rank in range(max(placement) + 1):
        own = [stage for stage, owner in enumerate(placement) if owner == rank]
        work = sum(costs.f[s] + costs.b[s] + costs.w[s] for s in own)
        least = max(least, sum(costs.f[: own[0]]) + microbatches * work)
    return least
