"""The exact steady-state time of a program per microbatch, after the pipeline has filled.

In its steady state every rank repeats its actions, for later microbatches. The dependencies then
form a cyclic graph, and the time of one round is its maximum cycle ratio: the maximum over all
cycles of total time divided by the number of rounds that the cycle spans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.ir import COMPUTE, Act, Direction, Kind, Program


@dataclass(frozen=True)
class SteadyState:
    """The periodic middle part of a program.

    Attributes:
        microbatches: microbatches per round.
        period: time of a round.
    """

    microbatches: int
    period: float

    @property
    def per_microbatch(self) -> float:
        """Time that one more microbatch adds to the step."""
        return self.period / self.microbatches


class _Edge(NamedTuple):
    """A dependency between two actions of a round."""

    source: int
    target: int
    time: float  # duration of the source plus message latency
    rounds: int  # number of rounds by which the target is later


def steady_state(program: Program, costs: Costs) -> SteadyState | None:
    """The steady state; None if the program has none, for example with too few microbatches.

    Assumes that messages do not wait for each other and that all microbatches cost the same.
    """
    for microbatches in range(1, program.num_microbatches // 3 + 1):
        rounds = [_round(acts, program, microbatches) for acts in program.ranks]
        if all(rounds):
            edges = _edges(program, rounds, microbatches, costs)
            return SteadyState(microbatches, maximum_cycle_ratio(edges))
    return None


def _round(acts: tuple[Act, ...], program: Program, microbatches: int) -> list[Act]:
    """The repeated actions of a rank, taken from the middle of its order; empty if none repeat."""
    acts = tuple(act for act in acts if act.kind in COMPUTE)
    middle = len(acts) // 2
    anchor = _places(acts[middle], microbatches)
    end = next((i for i in range(middle, len(acts)) if _places(acts[i]) == anchor), middle)
    start = 2 * middle - end
    first, second = acts[max(start, 0) : middle], acts[middle:end]
    if [_places(act, microbatches) for act in first] != [_places(act) for act in second]:
        return []
    kids = [kid for act in first for kid in act.elementary]
    once = {(kid.kind, kid.stage, kid.mb % microbatches, kid.slice, kid.part) for kid in kids}
    forwards = sum(kid.kind is Kind.F for kid in kids)
    stages = {kid.stage for act in acts for kid in act.elementary}
    complete = forwards == microbatches * program.num_slices * len(stages)
    return list(first) if complete and len(once) == len(kids) else []


def _places(act: Act, later: int = 0) -> list[tuple[Kind, int, int, int, int]]:
    """Identifies an action, shifted by `later` microbatches."""
    return [(kid.kind, kid.stage, kid.slice, kid.part, kid.mb + later) for kid in act.elementary]


def _edges(
    program: Program, rounds: Sequence[Sequence[Act]], microbatches: int, costs: Costs
) -> list[_Edge]:
    nodes = [(rank, act) for rank, acts in enumerate(rounds) for act in acts]
    times = [costs.of(act, program.num_weight_parts, program.num_slices) for _, act in nodes]
    edges, node = [], 0
    makers: dict[tuple[Direction, int, int, int], tuple[int, int]] = {}
    for acts in rounds:
        for place, act in enumerate(acts):
            last = place == len(acts) - 1
            after = node - place if last else node + 1
            edges.append(_Edge(node, after, times[node], int(last)))
            for kid in act.elementary:
                if (way := kid.direction) is not None:
                    makers[way, kid.stage, kid.mb % microbatches, kid.slice] = (node, kid.mb)
            node += 1
    for (way, stage, residue, piece), (target, mb) in makers.items():
        before = stage - 1 if way is Direction.FORWARD else stage + 1
        if (way, before, residue, piece) in makers and before in program.path(mb):
            source, made = makers[way, before, residue, piece]
            hop = costs.hop if nodes[source][0] != nodes[target][0] else 0.0
            edges.append(_Edge(source, target, times[source] + hop, (made - mb) // microbatches))
    return edges


def maximum_cycle_ratio(edges: Sequence[_Edge]) -> float:
    """The maximum time per round of any cycle, by Lawler's method with exact steps.

    Guess a ratio; while some cycle takes longer, guess that cycle's ratio.
    """
    ratio = 0.0
    while cycle := _longer_cycle(edges, ratio):
        ratio = sum(edge.time for edge in cycle) / sum(edge.rounds for edge in cycle)
    return ratio


def _longer_cycle(edges: Sequence[_Edge], ratio: float) -> list[_Edge]:
    """A cycle that takes longer than `ratio` per round; empty if there is none."""
    size = 1 + max(max(edge.source, edge.target) for edge in edges)
    slack = 1e-10 * sum(edge.time for edge in edges)
    distance = [0.0] * size
    before: list[_Edge | None] = [None] * size
    check = 1
    for turn in range(1, size + 2):
        changed = False
        for edge in edges:
            reached = distance[edge.source] + edge.time - ratio * edge.rounds
            if reached > distance[edge.target] + slack:
                distance[edge.target], before[edge.target], changed = reached, edge, True
        if not changed:
            return []
        if turn == check:
            check *= 2
            cycle = _cycle(before)
            if cycle:
                return cycle
    return _cycle(before)


def _cycle(before: Sequence[_Edge | None]) -> list[_Edge]:
    """A cycle among the edges that last improved each node."""
    seen = [0] * len(before)
    for start in range(len(before)):
        node, path = start, []
        while seen[node] == 0 and (edge := before[node]):
            seen[node] = start + 1
            path.append(edge)
            node = edge.source
        if seen[node] == start + 1 and path:
            sources = [edge.target for edge in path]
            return path[sources.index(node) :]
    return []
