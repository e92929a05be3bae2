"""Close looks at the rows of a space, in the order of bounds that rise as more is known.

Branch and bound: of the row with the lowest bound first the program is timed, together with those
of other rows that run the same one; that time holds for all rows that differ in sharding alone, and
raises their bounds. A row whose bound is still the lowest is then looked at: what memory it needs,
and what it takes in all. Where one does not fit, neither does a like one that shards less.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fivefold.layout import Layout
from fivefold.mesh.grid import Grid
from fivefold.pipeline.rules import SYNTHESISED
from fivefold.pipeline.schedules.registry import Shape
from fivefold.predict.layer import Blocks
from fivefold.predict.software import Software
from fivefold.predict.step import program_times
from fivefold.search.bound_tables import Values
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.columns import Column
from fivefold.search.request import Request
from fivefold.search.space import SHARDINGS, Space
from fivefold.search.time_bound import TIMING, TimeBound, waits

TOGETHER = 48  # programs' costs that are timed in one walk, at most
APIECE = 600  # acts that take as long to walk for any number of costs as one cost more does
UNTIL_ONE = 2_000_000  # acts more that may be spent until a layout fits
TO_IMPROVE = 200_000  # acts that may be spent afterwards, at least
TO_TRADE = 25_000  # acts that may be spent to find the fastest layout within some memory
SOUGHT = 300_000  # acts that take as long as the search for one program
LOOK, TIMED = 500, 200  # acts that take as long to build and walk as one look, and one timing


@dataclass
class Ledger:
    """What the looks of a search have found, and what they may still cost.

    Attributes:
        work: acts that may still be built, swept and walked.
        found: layouts that fit, with their times.
        rejected: layouts that do not fit, with the least that they would take.
        timed: programs' times that were computed.
        looks: layouts whose memory was swept.
        blocks: times of modules, for all layouts of the search.
    """

    work: float
    found: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    timed: int = 0
    looks: int = 0
    blocks: Blocks = field(default_factory=dict)
    programs: set[tuple[object, ...]] = field(default_factory=set)

    @property
    def best(self) -> float:
        """Seconds of the fastest that was found."""
        return min((c.seconds for c in self.found), default=np.inf)

    @property
    def spent(self) -> bool:
        """Whether no more may be looked at: a first layout that fits may take longer."""
        return self.work <= 0 and (bool(self.found) or self.work <= -UNTIL_ONE)

    def charge(self, program: tuple[object, ...], acts: float) -> None:
        """Count a program's acts, the first time that it is needed."""
        if program not in self.programs:
            self.programs.add(program)
            self.work -= acts


class Frontier:
    """The rows of a space that have not been looked at.

    Args:
        request: the question.
        space: space whose memory bounds allow them to fit.
        bounds: bounds of their times.
        ledger: ledger to which looks are added.
    """

    def __init__(self, request: Request, space: Space, bounds: TimeBound, ledger: Ledger) -> None:
        self.request, self.space, self.ledger = request, space, ledger
        self.program, self.around = bounds.program.copy(), bounds.around
        self.lower: Values = self.program + self.around
        self._timing = _Groups(space.distinct(TIMING)[1])
        self._programs = _Groups(space.distinct(("way", "microbatches", "pairs"))[1])
        self._timed: set[int] = set()

    @property
    def unseen(self) -> float:
        """Seconds that a row that was not looked at takes at least."""
        return float(self.lower.min(initial=np.inf))

    def close_in(self, rows: Column | None = None) -> None:
        """Look until no bound is below the best, or the work is used up.

        Args:
            rows: rows to look at; None: all.
        """
        here = np.arange(len(self.space)) if rows is None else rows
        while len(here) and not self.ledger.spent:
            row = int(here[self.lower[here].argmin()])
            if self.lower[row] >= self.ledger.best:
                return
            if self._timing.of[row] in self._timed:
                self.look(row)
            else:
                self.time(self._alike(row))

    def within(self, rows: Column, size: float) -> None:
        """Look for the fastest of some rows that allocates no more than so many bytes, for a while.

        Args:
            rows: rows of the space.
            size: bytes of the fullest rank.
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

    def learn(self, other: "Frontier") -> None:
        """Raise bounds to those of another frontier's rows, to which these add only offloading."""
        bases = np.array([-1 if c.base is None else c.base for c in self.space.memory], np.intp)
        base = bases[self.space.columns["memory"]]
        mine = np.flatnonzero(base >= 0)
        plain = np.flatnonzero(other.space.columns["strategy"] <= 1)
        columns = {
            name: np.concatenate([other.space.columns[name][plain], column[mine]])
            for name, column in {**self.space.columns, "memory": base}.items()
        }
        _, alike = replace(other.space, columns=columns).distinct(TIMING)
        least = np.zeros(int(alike.max(initial=-1)) + 1)
        np.maximum.at(least, alike[: len(plain)], other.program[plain])
        self.program[mine] = np.maximum(self.program[mine], least[alike[len(plain) :]])
        self.lower = self.program + self.around

    def _alike(self, row: int) -> list[int]:
        """The row, and others of its program that may be faster than the best and are not timed."""
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
        """Time the programs of some rows of one program, and raise the bounds of all like them."""
        ledger, cluster = self.ledger, self.request.cluster
        layouts = [layout_of(self.space, row, sharded=False) for row in rows]
        acts, key = _acts(layouts[0], 5), (self._program(layouts[0]), "walk")
        ledger.charge(key, acts)
        ledger.work -= len(rows) * (TIMED + acts / 100)
        ledger.timed += len(rows)
        times = program_times(layouts, cluster, Software(), ledger.blocks)
        slowest = waits(self.space, cluster)
        for row, seconds in zip(rows, times, strict=True):
            alike = self._timing.members(row)
            self._timed.add(int(self._timing.of[row]))
            self.program[alike] = np.maximum(self.program[alike], seconds * slowest)
            open_ = alike[np.isfinite(self.lower[alike])]
            self.lower[open_] = self.program[open_] + self.around[open_]

    def look(self, row: int) -> Candidate:
        """Sweep the memory of a row, and predict it if it fits."""
        if int(self._timing.of[row]) not in self._timed:
            self.time([row])
        ledger, bound = self.ledger, float(self.lower[row])
        self.lower[row] = np.inf
        layout = layout_of(self.space, row)
        ledger.charge((self._program(layout), "sweep"), _acts(layout, 3))
        ledger.work -= LOOK
        ledger.looks += 1
        candidate = replace(
            evaluate(self.request, layout.config, layout=layout, blocks=ledger.blocks), bound=bound
        )
        if candidate.prediction is not None:
            if not ledger.found:
                ledger.work = max(ledger.work, TO_IMPROVE)
            ledger.found.append(candidate)
        else:
            ledger.rejected.append(candidate)
            self._miss(row)
        return candidate

    def _miss(self, row: int) -> None:
        """Close the rows that differ from one that does not fit in sharding less."""
        strategy, instances = self.space.columns["strategy"], self.space.columns["instances"]
        if SHARDINGS[strategy[row]].splits_parameters:  # it gathers what others keep: maybe more
            return
        rows = self._timing.members(row)
        less = (strategy[rows] <= strategy[row]) & (instances[rows] >= instances[row])
        whole = ~self.space.sharded("splits_optimizer")[rows]
        self.lower[rows[less | whole]] = np.inf

    @staticmethod
    def _program(layout: Layout) -> tuple[object, ...]:
        return (layout.schedule, layout.split.placement, layout.overlaps_pairs)


def layout_of(space: Space, row: int, *, sharded: bool = True) -> Layout:
    """What a row stands for; it is known, so that `check` need not find it again.

    Args:
        space: the candidates.
        row: row of the space.
        sharded: False: without what sharding adds to every microbatch.
    """
    config = space.config_of(row)
    if not sharded:
        config = config.with_values(data_parallel_sharding_strategy="no_shard")
    at = {name: int(column[row]) for name, column in space.columns.items()}
    way = space.ways[at["way"]]
    grid = Grid(
        pp=at["pp"],
        dp_replicate=at["instances"],
        dp_shard=at["dp"] // at["instances"],
        cp=at["cp"],
        tp=at["tp"],
        ep=at["ep"],
        etp=at["etp"],
    )
    return Layout(config, grid, way.split, way.schedule, at["microbatches"])


class _Groups:
    """Rows that agree in some columns."""

    def __init__(self, of: Column) -> None:
        self.of = of
        self._order = np.argsort(of, kind="stable")
        self._starts = np.searchsorted(of[self._order], np.arange(int(of.max(initial=-1)) + 2))

    def members(self, row: int) -> Column:
        """The rows that agree with one."""
        group = int(self.of[row])
        found: Column = self._order[self._starts[group] : self._starts[group + 1]]
        return found


def _acts(layout: Layout, rounds: int) -> float:
    """How many acts a few rounds of a layout's program have, at most; some are hard to order."""
    stages = len(layout.split.stages)
    each = 9 if layout.known.shape is Shape.V else 3
    sought = SOUGHT if layout.schedule == SYNTHESISED else 0
    return sought + min(layout.num_microbatches, rounds * layout.grid.pp) * stages * each
