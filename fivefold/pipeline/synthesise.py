"""Schedule synthesis: searches a program for given stage costs, latency and memory cap.

The candidates are every fixed schedule that fits, the published zero-bubble heuristic, and runs of
the list scheduler. Such a run may keep the beginning of a fixed schedule, because fixed schedules
fill the pipeline well and have a good steady state, while list scheduling is better with irregular
costs and at the drain. The best runs are improved by hill climbing. All of it is deterministic, so
that every rank finds the same program.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice, product, zip_longest
from math import ceil, inf
from random import Random

from fivefold.errors import ConfigError
from fivefold.pipeline.bounds import Paths, lower_bounds
from fivefold.pipeline.ir import Act, Kind, Program, stages_on
from fivefold.pipeline.list_scheduler import (
    ListScheduler,
    Problem,
    ReplayedRun,
    Run,
    SchedulingPolicy,
)
from fivefold.pipeline.schedules.automatic import ALL_OPTIONS, AutomaticZeroBubble, HeuristicOptions
from fivefold.pipeline.schedules.fixed import Orders
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program

_Prefixes = list[list[tuple[int, int]]]
_INDEX = {Kind.F: (0,), Kind.B: (1,), Kind.W: (2,), Kind.BW: (1, 2)}
_TRIES = 40  # minimum number of runs that a search should make
_CLIMBERS = 2
EFFORT = 300_000  # actions: about a second; every rank searches for itself
_NEAR = 0.005  # relative to the bound: smaller gains on few microbatches rarely carry over to many


@dataclass(frozen=True)
class Synthesis:
    """The result of a search.

    Attributes:
        program: compute-only program.
        name: description of how it was made.
        makespan: its makespan.
    """

    program: Program
    name: str
    makespan: float


class Priority(Enum):
    """Which F or B runs first."""

    DEEPEST = "the B of the lowest stage, then the F of the highest"
    ON_TIME = "what an ideal pipeline would do first"
    OLDEST_F = "any F before any B, the oldest microbatch first"
    DEEPEST_F = "any F before any B, the F of the lowest stage first"


@dataclass(frozen=True)
class _RunParameters:
    """Parameters of a list-scheduler run, for any number of microbatches.

    Attributes:
        priority: which F or B runs first.
        stretch: microbatches in flight on a stage, as a multiple of those its round trip takes.
        extra: additional microbatches in flight, for each stage.
        patience: patience of each rank (see `SchedulingPolicy`).
        seed: fixed schedule whose beginning is kept; None: none.
        left: how long before its end the fixed schedule is left, in rank times per microbatch.
        weights: whether its W's are kept as well.
    """

    priority: Priority
    stretch: float
    extra: tuple[int, ...]
    patience: tuple[float, ...]
    seed: str | None = None
    left: float = 0.0
    weights: bool = False

    def __str__(self) -> str:
        start = f"{self.seed} until {self.left:.3g} microbatches before its end, then "
        return f"{start if self.seed else ''}list scheduling"


def synthesise(problem: Problem, *, effort: int = EFFORT) -> Synthesis:
    """A program at least as good as every fixed schedule that fits.

    Args:
        problem: placement, costs, microbatches and memory cap.
        effort: number of actions to schedule in search, at about 3 microseconds each.

    Raises:
        ConfigError: not even one microbatch fits.
    """
    fixed = dict(fixed_runs(problem))
    found = [(run.makespan, name, run) for name, run in fixed.items()]
    few = _search_size(problem, effort)
    enough = 1e-9 if few == problem.num_microbatches else _NEAR
    if min(found, default=(inf,))[0] <= lower_bounds(problem).best * (1 + enough):
        effort = 0  # no gain is possible, or none that a search on few microbatches would find
    search = _ParameterSearch(replace(problem, num_microbatches=few), effort, Random(1), fixed)
    factory = _RunFactory(problem, fixed)
    for parameters in search.best():
        run = factory.schedule(parameters)
        if run.makespan < inf:
            # Replaying removes waits that turned out useless.
            run = ReplayedRun(problem, run.orders)
            found.append((run.makespan, str(parameters), run))
    if not found:
        run = _one_by_one(problem)
        found.append((run.makespan, "one microbatch after the other", run))
    makespan, name, run = min(found, key=lambda entry: entry[0])
    return Synthesis(run.program(), name, makespan)


def _search_size(problem: Problem, effort: int) -> int:
    """Number of microbatches in the search: all, or enough for a steady state and several tries."""
    affordable = effort // (3 * len(problem.placement) * _TRIES)
    enough = 2 * problem.num_ranks
    return min(problem.num_microbatches, max(affordable, enough))


def fixed_runs(problem: Problem) -> Iterator[tuple[str, Run]]:
    """Every fixed schedule that supports the placement and fits, with dX sent before dW."""
    total = problem.num_microbatches
    for name, schedule in SCHEDULES.items():
        if schedule.num_copies > 1 or schedule.slices or not schedule.shape.fits(problem.placement):
            continue
        if schedule.shape is Shape.LOOP and Shape.LINE.fits(problem.placement):
            continue  # with one stage per rank these equal schedules already tried
        try:
            program = build_program(name, problem.placement, total)
        except ConfigError:
            continue  # too few microbatches for it
        run = _timed(problem, program.ranks)
        if max(run.peaks) <= problem.cap * (1 + 1e-9):
            yield name, run
    if Shape.LINE.fits(problem.placement):
        orders = _automatic(problem)
        if orders:
            yield "automatic zero-bubble", _timed(problem, orders)


def _automatic(problem: Problem) -> Orders | None:
    """The published heuristic with its best options on few microbatches; None if it gets stuck."""

    def run(options: HeuristicOptions, total: int) -> AutomaticZeroBubble:
        return AutomaticZeroBubble(problem.costs, total, problem.cap, problem.footprint, options)

    few = min(problem.num_microbatches, 3 * problem.num_ranks)
    ranked = sorted(ALL_OPTIONS, key=lambda options: run(options, few).makespan)
    best = run(ranked[0], problem.num_microbatches)
    return best.orders if best.makespan < inf else None


def _timed(problem: Problem, ranks: Sequence[Sequence[Act]]) -> Run:
    """Time a whole program; a BW becomes B and W, and an FB its two halves."""
    return ReplayedRun(
        problem,
        [
            [
                (index, kid.stage)
                for act in acts
                for kid in act.elementary
                for index in _INDEX[kid.kind]
            ]
            for acts in ranks
        ],
    )


def _one_by_one(problem: Problem) -> Run:
    """Each microbatch forward and backward before the next, which needs the least memory."""
    orders = []
    for rank in range(problem.num_ranks):
        own = sorted(stages_on(problem.placement, rank))
        kinds = [(Kind.F, stage) for stage in own]
        kinds += [(kind, stage) for stage in reversed(own) for kind in (Kind.B, Kind.W)]
        acts = [(index, stage) for kind, stage in kinds for index in _INDEX[kind]]
        orders.append(acts * problem.num_microbatches)
    return ReplayedRun(problem, orders)


class _RunFactory:
    """Makes list-scheduler runs from their parameters.

    Args:
        problem: what to schedule.
        fixed: fixed schedules whose beginnings may be kept.
    """

    def __init__(self, problem: Problem, fixed: dict[str, Run]) -> None:
        self.problem, self.fixed = problem, fixed
        costs, placement = problem.costs, problem.placement
        self._paths = Paths(problem)
        self._work = [f + b + w for f, b, w in zip(costs.f, costs.b, costs.w, strict=True)]
        self.period = max(
            sum(self._work[stage] for stage in stages_on(placement, rank))
            for rank in range(problem.num_ranks)
        )

    def schedule(self, parameters: _RunParameters) -> Run:
        """The run with these parameters."""
        stages, total = range(len(self.problem.placement)), self.problem.num_microbatches
        forward, backward, pace = self._keys(parameters.priority)
        policy = SchedulingPolicy(
            [[forward[s] + pace * mb for mb in range(total)] for s in stages],
            [[backward[s] + pace * mb for mb in range(total)] for s in stages],
            tuple(self._limit(parameters, stage) for stage in stages),
            parameters.patience,
        )
        return ListScheduler(self.problem, policy, self._kept(parameters))

    def _keys(self, priority: Priority) -> tuple[list[float], list[float], float]:
        """Priorities of each stage's F and B for microbatch 0, and the step per microbatch."""
        last = len(self.problem.placement)
        match priority:
            case Priority.ON_TIME:
                return self._paths.forward, self._paths.backward, self.period
            case Priority.DEEPEST:
                return [-s for s in range(last)], [s - 2.0 * last for s in range(last)], 0.0
            case Priority.DEEPEST_F:
                return [-s for s in range(last)], [s + 1.0 for s in range(last)], 0.0
        before = -2.0 * self.problem.num_microbatches
        return [before] * last, [0.0] * last, 1.0

    def _limit(self, parameters: _RunParameters, stage: int) -> int:
        if parameters.stretch == inf:
            return self.problem.num_microbatches
        trips = self._paths.lifetime(self.problem, stage) / self.period
        return max(1, ceil(parameters.stretch * trips) + parameters.extra[stage])

    def _kept(self, parameters: _RunParameters) -> _Prefixes:
        if parameters.seed is None:
            return []
        run = self.fixed[parameters.seed]
        end = run.makespan - parameters.left * self.period
        return [
            [
                act
                for act, start in zip(order, times, strict=True)
                if start < end and (parameters.weights or act[0] < 2)
            ]
            for order, times in zip(run.orders, run.times, strict=True)
        ]


class _ParameterSearch:
    """Searches for good parameters: a grid, then hill climbing from its best.

    Args:
        problem: what to schedule.
        effort: number of actions to schedule.
        random: random numbers of the hill climbing.
        seeds: fixed schedules whose beginnings may be kept: those that fit the whole problem.
    """

    def __init__(
        self, problem: Problem, effort: int, random: Random, seeds: Collection[str]
    ) -> None:
        fixed = {name: run for name, run in fixed_runs(problem) if name in seeds}
        self._factory = _RunFactory(problem, fixed)
        self._random = random
        self._tries = effort // (3 * len(problem.placement) * problem.num_microbatches)
        self._scores: dict[_RunParameters, float] = {}

    def best(self) -> list[_RunParameters]:
        """The best two parameter sets that beat every fixed schedule."""
        for parameters in islice(self._grid(), self._tries // 2):
            self._score(parameters)
        climbers = self._ranked()[:_CLIMBERS]
        for turn in range(self._tries // 2):
            old = climbers[turn % len(climbers)]
            new = self._changed(old)
            if self._score(new) <= self._score(old):
                climbers[turn % len(climbers)] = new
        known = min((run.makespan for run in self._factory.fixed.values()), default=inf)
        return [parameters for parameters in self._ranked()[:2] if self._scores[parameters] < known]

    def _ranked(self) -> list[_RunParameters]:
        return sorted(self._scores, key=self._scores.__getitem__)

    def _score(self, parameters: _RunParameters) -> float:
        if parameters not in self._scores:
            self._scores[parameters] = self._factory.schedule(parameters).makespan
        return self._scores[parameters]

    def _grid(self) -> Iterator[_RunParameters]:
        """Half of it starts with a fixed schedule; the most promising come first."""
        problem, fixed = self._factory.problem, self._factory.fixed
        ranks, none = problem.num_ranks, (0,) * len(problem.placement)
        seeds = sorted(fixed, key=lambda name: fixed[name].makespan)[:2]
        length = problem.num_microbatches + ranks
        mixed = (
            _RunParameters(priority, inf, none, (patience,) * ranks, name, share * length, weights)
            for share, patience, name, priority, weights in product(
                (0.6, 0.2, 0.3, 0.4, 0.8, 0.1, 0.5, 0.7),
                (0.3, 0.7),
                seeds,
                (Priority.OLDEST_F, Priority.DEEPEST),
                (False, True),
            )
        )
        plain = (
            _RunParameters(priority, stretch, none, (patience,) * ranks)
            for stretch, patience, priority in product(
                (1.1, 2.0, 1.3, 0.9, 1.0, 1.5, inf), (0.6, 0.3, 0.8, 0.0), Priority
            )
        )
        for pair in zip_longest(mixed, plain):
            yield from (parameters for parameters in pair if parameters)

    def _changed(self, parameters: _RunParameters) -> _RunParameters:
        """A neighbour with one or two changed parameters."""
        random, ranks = self._random, self._factory.problem.num_ranks
        for _ in range(random.choice((1, 1, 2))):
            move = random.randrange(4 if parameters.seed else 3)
            if move == 0:
                patience = list(parameters.patience)
                patience[random.randrange(ranks)] = random.randrange(11) / 10
                parameters = replace(parameters, patience=tuple(patience))
            elif move == 1 and parameters.stretch < inf:
                extra, step = list(parameters.extra), random.choice((-1, 1))
                first = random.randrange(len(extra))
                for stage in range(first, min(first + random.choice((1, 1, ranks)), len(extra))):
                    extra[stage] += step
                parameters = replace(parameters, extra=tuple(extra))
            elif move == 2:
                patience = [random.randrange(11) / 10] * ranks
                parameters = replace(parameters, patience=tuple(patience))
            else:
                left = max(0.0, parameters.left + random.choice((-2, -1, -0.5, 0.5, 1, 2)))
                parameters = replace(parameters, left=left)
        return parameters
