"""The fastest layouts that fit: enumerate, bound, look closely at the promising ones, refine.

Branch and bound: every legal layout gets a quick lower bound on its time; those that it leaves get
lower bounds on memory and time, and are looked at in the order of the latter, until no bound is
below the best that was found, or the work that may be spent is used up. Where a layout that could
be faster does not fit, it is tried again with finer techniques to save memory.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from time import perf_counter

import numpy as np

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.predict.context import best_context
from fivefold.predict.liveness import moments
from fivefold.predict.memory import peak_memory
from fivefold.predict.software import Software
from fivefold.search.bound_tables import Ranks, Values
from fivefold.search.branch_and_bound import Frontier, Ledger, layout_of
from fivefold.search.candidate import Candidate, capacity, evaluate
from fivefold.search.columns import Column
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import memory_bound
from fivefold.search.memory_choices import (
    MemoryChoice,
    further_choices,
    in_flight_limits,
    refinements,
)
from fivefold.search.request import Request
from fivefold.search.space import Space
from fivefold.search.time_bound import TimeBound, quick_time_bound, time_bound

WORK = 450_000  # acts of programs that are built, swept and walked at most, or as much other work
LONG = 15_000  # acts of a program that is looked at only after all shorter ones
REACH = 1.5  # times the best, up to which layouts are shown
MESHES = 10  # of which the best layout is shown
TRIES = 4  # plain layouts of each of them that are looked at first
LESS_MEMORY = 1e10  # bytes; what a device with so much less would take is found out, too
SHARES = (0.75, 0.6, 0.45)  # of the memory, for each of which the fastest layout is looked for
WORTH = 0.02  # share of the memory that a slower layout must save to be told
SMALLEST = 3  # layouts of least memory that are looked at where nothing fits
ALIKE = 0.004  # share of a step by which a simpler layout may be slower and still be preferred


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        request: the question.
        found: layouts that fit, the best first.
        rejected: promising ones that do not fit.
        legal: layouts that were enumerated.
        bounded: layouts near enough to the best for bounds on memory and time.
        too_large: layouts whose memory bound exceeds the device.
        timed: pipeline programs that were timed, event by event.
        looked_at: layouts whose memory was swept.
        gap: share by which a layout that was not looked at could at most be faster than the best.
        smallest: bytes that the smallest of the legal layouts needs at least, if none fits.
        seconds: seconds that the search took.
    """

    request: Request
    found: tuple[Candidate, ...] = ()
    rejected: tuple[Candidate, ...] = ()
    legal: int = 0
    bounded: int = 0
    too_large: int = 0
    timed: int = 0
    looked_at: int = 0
    gap: float = 0.0
    smallest: float = 0.0
    seconds: float = 0.0

    @property
    def best(self) -> Candidate:
        """The recommended layout."""
        return self.found[0]

    def by_mesh(self) -> list[Candidate]:
        """The best layout of every mesh, the best first."""
        return _distinct(self.found, len(self.found))

    def pareto(self) -> list[Candidate]:
        """Layouts than which none is both faster and smaller, the fastest first.

        Of some that need nearly the same, one: each saves a share of memory that is worth telling.
        """
        front: list[Candidate] = []
        for candidate in sorted(self.found, key=lambda c: (c.seconds, c.memory.max_allocated)):
            size = candidate.memory.max_allocated
            if not front or size < (1 - WORTH) * front[-1].memory.max_allocated:
                front.append(candidate)
        return front


def search(request: Request) -> SearchResult:
    """The best layouts for a request; `found` is empty if nothing fits."""
    began = perf_counter()
    space = legal_space(request)
    if not len(space):
        return SearchResult(request, seconds=perf_counter() - began)
    result = _Search(request, space).run()
    return replace(result, seconds=perf_counter() - began)


def legal_space(request: Request) -> Space:
    """Every legal layout that is worth a try; where none is, every legal one."""
    question = request.config, request.world, request.given
    space = enumerate_space(*question, widest=2 * request.cluster.gpus_per_node)
    if not len(space):
        space = enumerate_space(*question, widest=request.world, shortest=1)
    return with_context(space, request)


@dataclass
class _Search:
    """One run: the space, what has been found so far, and what was left."""

    request: Request
    space: Space
    ledger: Ledger = field(default_factory=lambda: Ledger(WORK))
    bounded: int = 0
    too_large: int = 0
    unseen: float = np.inf

    @cached_property
    def ranks(self) -> Ranks:
        """Of every way, what bounds look at."""
        return Ranks.of(self.request.config.model, self.space.ways)

    def run(self) -> SearchResult:
        request, ledger = self.request, self.ledger
        quick = quick_time_bound(self.space, self.ranks, request.cluster, Software(), ledger.blocks)
        start, end = 0.0, REACH * float(quick.min())
        while start < REACH * ledger.best and not ledger.spent:
            rows = np.flatnonzero((quick >= start) & (quick < end))
            if len(rows):
                self._look(self.space.take(rows))
            start = float(quick[quick >= end].min(initial=np.inf))
            end = REACH * start
            if start == np.inf:
                break
        self.unseen = min(self.unseen, start)
        smallest = 0.0
        if not ledger.found:  # the work was used up among fast layouts that do not fit
            sizes = memory_bound(self.space, self.ranks)
            smallest = float(sizes.min())
            for layout in smallest_of(self.space, sizes):
                candidate = evaluate(request, layout.config, layout=layout, blocks=ledger.blocks)
                ledger.found += [candidate] if candidate.prediction is not None else []
        self._refine()
        found = self._checked(ledger.found)
        gap = found[0].seconds / min(self.unseen, found[0].seconds) - 1 if found else 0.0
        return SearchResult(
            request=request,
            found=tuple(found),
            rejected=tuple(sorted(ledger.rejected, key=lambda c: c.bound)),
            legal=len(self.space),
            bounded=self.bounded,
            too_large=self.too_large,
            timed=ledger.timed,
            looked_at=ledger.looks,
            gap=gap,
            smallest=smallest,
        )

    def _look(self, space: Space) -> None:
        """At layouts whose quick bounds are near each other, and at finer techniques for them."""
        bounds, fits = self._bounded(space)
        self.bounded += len(space)
        self.too_large += len(space) - len(fits)
        frontier = self._frontier(space, bounds, fits)
        known = {candidate.mesh for candidate in self.ledger.found}
        for rows in _plain_first(frontier, known):
            for row in rows:
                if frontier.look(row).prediction is not None:
                    break
        frontier.close_in(short_programs(frontier.space))
        least = bounds.seconds
        least[fits] = frontier.program + frontier.around
        frontiers = [frontier]
        faster = np.flatnonzero(least < self.ledger.best)
        if len(faster):
            choices = further_choices(self.request.config, self.request.given)
            more = space.take(faster).with_memory(choices)
            frontiers.append(self._frontier(more, *self._bounded(more)))
            frontiers[-1].learn(frontier)
            frontiers[-1].close_in(short_programs(frontiers[-1].space))
        for each in frontiers:
            each.close_in()
            self.unseen = min(self.unseen, each.unseen)
        self._trade(frontier)

    def _trade(self, frontier: Frontier) -> None:
        """Time for memory: the fastest of the layouts that need less of it."""
        if not len(frontier.space):
            return
        room = capacity(self.request)
        sizes = memory_bound(frontier.space, self.ranks)
        sizes[np.setdiff1d(np.arange(len(sizes)), short_programs(frontier.space))] = np.inf
        for size in (room - LESS_MEMORY, *(room * share for share in SHARES)):
            frontier.within(np.flatnonzero(sizes <= size), size)

    def _bounded(self, space: Space) -> tuple[TimeBound, Column]:
        """Bounds on time, and the layouts whose bounds on memory fit."""
        cluster, blocks = self.request.cluster, self.ledger.blocks
        bounds = time_bound(space, self.ranks, cluster, Software(), blocks)
        sizes = memory_bound(space, self.ranks)
        return bounds, np.flatnonzero(sizes <= capacity(self.request))

    def _frontier(self, space: Space, bounds: TimeBound, fits: Column) -> Frontier:
        bounds = TimeBound(bounds.program[fits], bounds.around[fits])
        return Frontier(self.request, space.take(fits), bounds, self.ledger)

    def _refine(self) -> None:
        """Finer memory techniques, on the best layouts and on faster ones that do not fit."""
        ledger = self.ledger
        best = ledger.best
        missed = sorted((c for c in ledger.rejected if c.bound < best), key=lambda c: c.bound)
        tight = sorted(missed, key=lambda c: c.memory.device_total)
        bases = [
            *_distinct(sorted(ledger.found, key=lambda c: c.seconds), 2),
            *_distinct([c for pair in zip(missed, tight, strict=True) for c in pair], 8),
        ]
        for base in bases:
            for choice in self._choices(base):
                self._try(base.layout.config.with_values(**choice.settings))
        for base in bases:
            for choice in self._limits(base):
                config = base.layout.config.with_values(**choice.settings)
                if self._try(config, replace(base.layout, config=config)):
                    break

    def _try(self, config: Config, layout: Layout | None = None) -> bool:
        """Whether a layout is legal and fits; `layout` is what `config` means, if that is known."""
        ledger = self.ledger
        try:
            candidate = evaluate(self.request, config, layout=layout, blocks=ledger.blocks)
        except ConfigError:
            return False
        ledger.looks += 1
        if candidate.prediction is None:
            return False
        ledger.found.append(candidate)
        return True

    def _choices(self, base: Candidate) -> Iterator[MemoryChoice]:
        layers = max(len(stage.layers) for stage in base.layout.split.stages)
        yield from refinements(self.request.given, layers)

    def _limits(self, base: Candidate) -> Iterator[MemoryChoice]:
        """Of a layout that is too large, how many microbatches its ranks may hold to fit."""
        layout = base.layout
        if base.memory.fits or layout.config.memory.recompute_granularity == "full":
            return
        worst = base.memory.worst
        held = moments(layout, splits_backward=layout.defers_weights)[worst.pp_rank].kept
        in_flight = round(held.sum(axis=1).max())
        each = (worst.parts.get("activations", 0.0) + worst.parts.get("loss", 0.0)) / in_flight
        excess = worst.peak - capacity(self.request)
        yield from in_flight_limits(self.request.given, in_flight, each, excess)

    def _checked(self, found: Sequence[Candidate]) -> list[Candidate]:
        """In the order of preference, and only what `check` lets pass."""
        ordered = sorted(found, key=lambda c: c.seconds)
        if ordered:
            limit = ordered[0].seconds * (1 + ALIKE)
            alike = [c for c in ordered if c.seconds <= limit]
            best = min(alike, key=lambda c: (c.complexity, c.seconds))
            ordered.remove(best)
            ordered.insert(0, best)
        return _legal(ordered, self.request)


def smallest_layouts(request: Request) -> list[Candidate]:
    """The legal layouts whose memory bounds are lowest, fit or not; none of them is timed."""
    space = legal_space(request)
    if not len(space):
        return []
    sizes = memory_bound(space, Ranks.of(request.config.model, space.ways))
    return [
        Candidate(layout, peak_memory(layout, request.cluster), None, 0.0)
        for layout in smallest_of(space, sizes)
    ]


def smallest_of(space: Space, sizes: Values) -> list[Layout]:
    """Those of some layouts whose memory bounds are lowest."""
    rows = np.argsort(sizes, kind="stable")[:SMALLEST].tolist()
    return [layout_of(space, row) for row in rows]


def with_context(space: Space, request: Request) -> Space:
    """The space, in which context parallelism communicates in the fastest way, unless it is given.

    How fast a way is depends on few columns, and on nothing that is added around attention.
    """
    few, _ = space.distinct(("tp", "cp", "mbs"))
    context = {}
    for row in np.flatnonzero(few.columns["cp"] > 1).tolist():
        tp, cp, mbs = (int(few.columns[name][row]) for name in ("tp", "cp", "mbs"))
        context[tp, cp, mbs] = best_context(few.config_of(row), request.cluster, request.given)
    return replace(space, context=context)


def _plain_first(frontier: Frontier, known: Set[tuple[int, ...]]) -> Iterator[list[int]]:
    """A few layouts of each promising mesh that is not known, with usual schedules and one group.

    They nearly always fit where their bounds do, and so soon give a time for others to beat.
    """
    space = frontier.space
    c = space.columns
    usual = np.array([way.known.fused for way in space.ways])[c["way"]]
    plain = usual & (c["instances"] == 1) & (c["strategy"] <= 1)
    short = short_programs(space)
    rows = short[plain[short]]
    rows = rows[np.argsort(frontier.lower[rows], kind="stable")]
    few, of = space.take(rows).distinct(("tp", "cp", "pp", "ep", "etp"))
    columns = (few.columns[name].tolist() for name in ("tp", "cp", "pp", "ep", "etp"))
    new = [mesh not in known for mesh in zip(*columns, strict=True)]
    promising = dict.fromkeys(of[np.array(new, bool)[of]].tolist())
    for mesh in islice(promising, max(0, MESHES - len(known))):
        yield rows[of == mesh][:TRIES].tolist()


def short_programs(space: Space) -> Column:
    """The layouts whose programs take little time to build and to walk."""
    c = space.columns
    stages = np.array([len(way.split.stages) for way in space.ways])[c["way"]]
    acts = np.minimum(c["microbatches"], 4 * c["pp"]) * stages * 3
    return np.flatnonzero(acts <= LONG)


def _distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first so many of different meshes."""
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        seen.setdefault(candidate.mesh, candidate)
    return list(seen.values())[:count]


def _legal(candidates: list[Candidate], request: Request) -> list[Candidate]:
    """The candidates from the first one on that `check` lets pass: it has the last word.

    Raises:
        ConfigError: it lets none pass, and says why.
    """
    refusal = None
    for number, candidate in enumerate(candidates):
        try:
            check(candidate.layout.config, request.world, planned=True)
        except ConfigError as error:
            refusal = refusal or error
            continue
        return candidates[number:]
    if refusal is not None:
        raise refusal
    return []
