"""Branch and bound over candidate layouts, lowest time bound first.

The pipeline program of the candidate with the lowest bound is simulated first, together with other
candidates that run the same program, and with what those that differ only in sharding send at least
once a step. These times raise the bounds of them all. If the candidate still has the lowest bound,
its memory and its whole step are predicted. If it does not fit, neither do the same layouts with
less sharding, and they are closed too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fivefold.config.sharding import Sharding
from fivefold.layout import Layout
from fivefold.mesh.degrees import grid_of
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import Shape
from fivefold.predict.data_parallel.transfers import StageTransfers
from fivefold.predict.step import program_times
from fivefold.predict.times.layer import TimesCache
from fivefold.search.bound_tables import module_counts, stage_kinds
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.columns import Column
from fivefold.search.per_step_bound import MANY, in_buckets
from fivefold.search.request import Request
from fivefold.search.space import SHARDINGS, Space
from fivefold.search.time_bound import TIMING, TimeBound

# Work is counted in pipeline actions that are built and simulated.
TOGETHER = 48  # most sets of costs that one walk over a program times
APIECE = 600  # actions whose walk takes as long as timing one more set of costs
UNTIL_ONE = 2_000_000  # further actions allowed until a first layout fits
TO_IMPROVE = 200_000  # actions allowed after the first layout that fits, at least
TO_TRADE = 25_000  # actions allowed to find the fastest layout within a memory limit
SOUGHT = 300_000  # actions that take as long as synthesising one schedule
LOOK, TIMED = 500, 200  # actions that take as long as one memory prediction, and one timing


@dataclass
class Ledger:
    """The findings of a search, and the work that it may still spend.

    Attributes:
        work: pipeline actions that may still be built and simulated.
        found: layouts that fit, with their predicted times.
        rejected: layouts that do not fit, with lower bounds on their times.
        timed: number of pipeline programs that were timed.
        looks: number of layouts whose memory was predicted.
        times_cache: times of layers and operations, shared by all layouts of the search.
        programs: programs that were paid for already.
        best: step time of the fastest layout found, in seconds; infinite if there is none.
    """

    work: float
    found: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    timed: int = 0
    looks: int = 0
    times_cache: TimesCache = field(default_factory=dict)
    programs: set[tuple[object, ...]] = field(default_factory=set)
    best: float = np.inf

    def add(self, candidate: Candidate) -> None:
        """Add a layout that fits to those found."""
        self.found.append(candidate)
        self.best = min(self.best, candidate.seconds)

    @property
    def spent(self) -> bool:
        """Whether the work is used up; finding a first layout that fits may exceed it."""
        return self.work <= 0 and (bool(self.found) or self.work <= -UNTIL_ONE)

    def looked(self, layout: Layout) -> None:
        """Count one prediction of a layout's memory."""
        self._charge((_program(layout), "sweep"), _acts(layout, 3))
        self.work -= LOOK
        self.looks += 1

    def walked(self, layout: Layout, count: int, sent: int = 0) -> None:
        """Count the work of timing a layout's program with `count` sets of costs, and `sent` more
        with messages sent once a step."""
        acts = _acts(layout, 5)
        self._charge((_program(layout), "walk"), acts)
        self.work -= count * TIMED + (count + sent) * acts / 100
        self.timed += count

    def _charge(self, program: tuple[object, ...], acts: float) -> None:
        """Subtract a program's actions from the work left, the first time it is needed."""
        if program not in self.programs:
            self.programs.add(program)
            self.work -= acts


class OpenCandidates:
    """The candidates that have neither been evaluated nor ruled out.

    Args:
        request: the model, the cluster and the settings to plan for.
        space: candidates that fit as far as their memory bounds tell.
        bounds: lower bounds on their times.
        ledger: findings and work of the whole search, which exploring adds to.
    """

    def __init__(self, request: Request, space: Space, bounds: TimeBound, ledger: Ledger) -> None:
        self.request, self.space, self.ledger = request, space, ledger
        self.bounds = replace(bounds, program=bounds.program.copy(), sent=bounds.sent.copy())
        self.lower = self.bounds.seconds
        self._timing = _Groups(space.distinct(TIMING)[1])
        self._programs = _Groups(space.distinct(("partition", "microbatches", "pairs"))[1])
        self._timed: set[int] = set()

    @property
    def unseen(self) -> float:
        """The lowest time bound of an open candidate, in seconds."""
        return float(self.lower.min(initial=np.inf))

    def explore(self, rows: Column | None = None) -> None:
        """Evaluate candidates until no bound is below the best time, or the work is used up.

        Args:
            rows: rows of the candidates to evaluate; None: all.
        """
        here = np.arange(len(self.space)) if rows is None else rows
        while len(here) and not self.ledger.spent:
            row = int(here[self.lower[here].argmin()])
            if self.lower[row] >= self.ledger.best:
                return
            if self._timing.of[row] in self._timed:
                self.look(row)
            else:
                self.time(self._of_same_program(row))

    def explore_within(self, rows: Column, size: float) -> None:
        """Search for the fastest of some candidates within a memory limit, up to TO_TRADE work.

        Args:
            rows: rows of the candidates.
            size: most bytes that any rank may allocate.
        """
        until = self.ledger.work - TO_TRADE
        while self.ledger.work > until:
            known = min(
                (c.seconds for c in self.ledger.found if c.memory.max_allocated <= size),
                default=np.inf,
            )
            lowest = self.lower[rows]
            if not len(rows) or lowest.min() >= known:
                return
            row = int(rows[lowest.argmin()])
            if self._timing.of[row] in self._timed:
                self.look(row)
            else:
                self.time([row])

    def raise_bounds_from(self, other: "OpenCandidates") -> None:
        """Raise each bound to that of the same layout in `other`, which differs only in
        offloading."""
        bases = np.array([-1 if c.base is None else c.base for c in self.space.memory], np.intp)
        base = bases[self.space.columns["memory"]]
        mine = np.flatnonzero(base >= 0)
        plain = np.flatnonzero(~other.space.sharded("splits_gradients"))
        columns = {
            name: np.concatenate([other.space.columns[name][plain], column[mine]])
            for name, column in {**self.space.columns, "memory": base}.items()
        }
        _, alike = replace(other.space, columns=columns).distinct(TIMING)
        least = np.zeros(int(alike.max(initial=-1)) + 1)
        np.maximum.at(least, alike[: len(plain)], other.bounds.program[plain])
        program = self.bounds.program
        program[mine] = np.maximum(program[mine], least[alike[len(plain) :]])
        self.lower = self.bounds.seconds

    def _of_same_program(self, row: int) -> list[int]:
        """The candidate, and untimed ones with the same program that may beat the best."""
        together = np.clip(_acts(layout_of(self.space, row), 5) // APIECE, 2, TOGETHER)
        rows = self._programs.members(row)
        rows = rows[self.lower[rows] < self.ledger.best]
        rows = rows[np.argsort(self.lower[rows], kind="stable")]
        chosen: dict[int, int] = {}
        for other in rows.tolist():
            timing = int(self._timing.of[other])
            if timing not in self._timed:
                chosen.setdefault(timing, other)
            if len(chosen) == together:
                break
        return list(chosen.values())

    def time(self, rows: Sequence[int]) -> None:
        """Time one program with the costs of some candidates; raise bounds of all it holds for."""
        ledger, cluster = self.ledger, self.request.cluster
        layouts = [layout_of(self.space, row, sharded=False) for row in rows]
        senders = [self._senders(row) for row in rows]
        ledger.walked(layouts[0], len(rows), sum(map(len, senders)))
        sent = [self._sent(others, layouts[0]) for others in senders]
        times = program_times(layouts, sent, cluster, ledger.times_cache)
        slowest, bounds = 1 + cluster.straggler_delay(self.space.world), self.bounds
        for row, others, (seconds, longer) in zip(rows, senders, times, strict=True):
            alike = self._timing.members(row)
            self._timed.add(int(self._timing.of[row]))
            bounds.program[alike] = np.maximum(bounds.program[alike], seconds * slowest)
            ended = seconds * slowest + np.array(longer)
            bounds.sent[others] = np.maximum(bounds.sent[others], ended)
            open_ = alike[np.isfinite(self.lower[alike])]
            self.lower[open_] = bounds.take(open_).seconds

    def _senders(self, row: int) -> Column:
        """Open candidates with the same program that may beat the best and send messages once a
        step."""
        alike = self._timing.members(row)
        sends = ~self.space.sharded("splits_parameters")[alike]
        found: Column = alike[sends & (self.lower[alike] < self.ledger.best)]
        return found

    def _sent(self, rows: Column, layout: Layout) -> list[tuple[Sharding, list[StageTransfers]]]:
        """Minimum times of the messages that these candidates send once a step; their stages equal
        the layout's."""
        _, kinds = stage_kinds(module_counts(layout.config.model, layout.split.stages))
        layers = [len(stage.layers) for stage in layout.split.stages]
        found = []
        for row, many in zip(rows.tolist(), in_buckets(self.space.take(rows)), strict=True):
            sharding = SHARDINGS[self.space.columns["strategy"][row]]
            each = zip(self.bounds.moved[row][kinds].tolist(), layers, strict=True)
            moves = [
                StageTransfers(gathered, reduced, MANY if many else count)
                for (gathered, reduced), count in each
            ]
            found.append((sharding, moves))
        return found

    def look(self, row: int) -> Candidate:
        """Predict the memory of a candidate, and its step time if it fits."""
        if int(self._timing.of[row]) not in self._timed:
            self.time([row])
        ledger, bound = self.ledger, float(self.lower[row])
        self.lower[row] = np.inf
        layout = layout_of(self.space, row)
        ledger.looked(layout)
        found = evaluate(self.request, layout, times_cache=ledger.times_cache)
        candidate = replace(found, bound=bound)
        if candidate.prediction is not None:
            if not ledger.found:
                ledger.work = max(ledger.work, TO_IMPROVE)
            ledger.add(candidate)
        else:
            ledger.rejected.append(candidate)
            self._close_smaller_sharding(row)
        return candidate

    def _close_smaller_sharding(self, row: int) -> None:
        """Close candidates that differ from one that does not fit only by less sharding."""
        strategy, instances = self.space.columns["strategy"], self.space.columns["instances"]
        if SHARDINGS[strategy[row]].splits_parameters:  # may need more, as it gathers
            return
        rows = self._timing.members(row)
        less = (strategy[rows] <= strategy[row]) & (instances[rows] >= instances[row])
        whole = ~self.space.sharded("splits_optimizer")[rows]
        self.lower[rows[less | whole]] = np.inf


def layout_of(space: Space, row: int, *, sharded: bool = True) -> Layout:
    """The layout of a candidate, built from its row without running `check`.

    Args:
        space: the candidates.
        row: row of the candidate.
        sharded: whether to keep the sharding strategy; False replaces it by no_shard.
    """
    config = space.config_of(row)
    if not sharded:
        config = config.with_values(data_parallel_sharding_strategy="no_shard")
    partition = space.partitions[space.columns["partition"][row]]
    microbatches = int(space.columns["microbatches"][row])
    grid = grid_of(config.parallel)
    return Layout(config, grid, partition.split, partition.schedule, microbatches)


class _Groups:
    """Rows grouped by their values in some columns."""

    def __init__(self, of: Column) -> None:
        self.of = of
        self._order = np.argsort(of, kind="stable")
        self._starts = np.searchsorted(of[self._order], np.arange(int(of.max(initial=-1)) + 2))

    def members(self, row: int) -> Column:
        """The rows in the same group as this one."""
        group = int(self.of[row])
        found: Column = self._order[self._starts[group] : self._starts[group + 1]]
        return found


def _program(layout: Layout) -> tuple[object, ...]:
    return (layout.schedule, layout.split.placement, layout.overlaps_pairs)


def _acts(layout: Layout, rounds: int) -> float:
    """Number of actions in a few rounds of a layout's program, at most, plus the work of a schedule
    search."""
    stages = len(layout.split.stages)
    each = 9 if layout.known.shape is Shape.V else 3
    sought = SOUGHT if layout.schedule == SYNTHESISED else 0
    return sought + min(layout.num_microbatches, rounds * layout.grid.pp) * stages * each
