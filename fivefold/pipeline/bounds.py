"""Lower bounds on the makespan of any pipeline program (flush makespan, with a global step end)."""

from dataclasses import dataclass
from itertools import pairwise
from math import inf

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import COMPUTE, Program, stages_on
from fivefold.pipeline.list_scheduler import Problem


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on the makespan; the largest one applies.

    Attributes:
        work: time until the first input can reach a rank, plus all work of that rank.
        chain: time until the first input can reach a rank, plus its forwards and dX, plus the time
            for its last dX to reach stage 0.
        memory: Little's law: total activation memory x lifetime over the memory cap.
        first_b: until its first B can start, a rank can do only as many forwards as the cap holds.
    """

    work: float
    chain: float
    memory: float
    first_b: float

    @property
    def best(self) -> float:
        """The tightest bound."""
        return max(self.work, self.chain, self.memory, self.first_b)


def lower_bounds(problem: Problem) -> Bounds:
    """The bounds of a problem; each is the largest over the ranks."""
    paths = Paths(problem)
    each = [_of_rank(problem, paths, rank) for rank in range(problem.num_ranks)]
    return Bounds(*(max(values) for values in zip(*each, strict=True)))


def work_bound(program: Program, costs: Costs) -> float:
    """A bound for all programs with these stages, copies, slices and overlapped pairs.

    Unlike `lower_bounds` it also holds for two copies of the model and for slices. It is the time
    until the first input can reach a rank, plus the rank's work.
    """
    head = [0.0] * program.num_stages
    for path in {program.path(mb) for mb in range(program.num_microbatches)}:
        for before, stage in pairwise(path):
            hop = costs.hop if program.placement[before] != program.placement[stage] else 0.0
            head[stage] = head[before] + costs.f[before] / program.num_slices + hop
    parts, slices = program.num_weight_parts, program.num_slices
    return max(
        min(head[stage] for stage in program.stages_of(rank))
        + sum(costs.of(act, parts, slices) for act in acts if act.kind in COMPUTE)
        for rank, acts in enumerate(program.ranks)
    )


class Paths:
    """Shortest possible times along the pipeline, for a single microbatch.

    Attributes:
        forward: earliest arrival of each stage's input.
        backward: earliest arrival of each stage's dY; on the last stage, the end of its F.
        tail: time from the end of each stage's last B to the end of the step.
    """

    def __init__(self, problem: Problem) -> None:
        placement, costs = problem.placement, problem.costs
        stages = range(len(placement))

        def hop(stage: int) -> float:
            """Message latency between a stage and the previous one; 0 on the same rank."""
            return costs.hop if placement[stage - 1] != placement[stage] else 0.0

        self.forward = [0.0]
        for stage in stages[1:]:
            self.forward.append(self.forward[-1] + costs.f[stage - 1] + hop(stage))
        self.backward = [0.0] * len(stages)
        self.backward[-1] = self.forward[-1] + costs.f[-1]
        for stage in reversed(stages[:-1]):
            above = stage + 1
            self.backward[stage] = self.backward[above] + costs.b[above] + hop(above)
        self.tail = [costs.w[0]]
        for stage in stages[1:]:
            self.tail.append(self.tail[-1] + costs.b[stage - 1] + hop(stage))

    def lifetime(self, problem: Problem, stage: int) -> float:
        """Minimum time that a microbatch's activations are held, weighted by what W frees."""
        costs, early = problem.costs, problem.footprint.freed_by_b
        time = self.backward[stage] - self.forward[stage] + costs.b[stage]
        return time + (1 - early) * costs.w[stage]


def _of_rank(problem: Problem, paths: Paths, rank: int) -> tuple[float, float, float, float]:
    costs, total, cap = problem.costs, problem.num_microbatches, problem.cap
    stages = stages_on(problem.placement, rank)
    head = min(paths.forward[s] for s in stages)
    both = total * sum(costs.f[s] + costs.b[s] for s in stages)
    work = both + total * sum(costs.w[s] for s in stages)
    held = total * sum(problem.footprint.size(s) * paths.lifetime(problem, s) for s in stages)
    first_b = min(paths.backward[s] for s in stages)
    room = [cap * costs.f[s] / size if (size := problem.footprint.size(s)) else inf for s in stages]
    before = min(first_b - head, max(room))
    return (
        head + work,
        head + both + min(paths.tail[s] for s in stages),
        head + held / cap,
        first_b + work - before,
    )
