"""Finds the fastest layouts that fit, by branch and bound.

Every legal layout gets a quick lower bound on its step time. The layouts that this bound cannot
rule out get closer lower bounds on memory and time, and are evaluated in the order of the latter,
until no bound is below the best time found, or the allowed work is used up. A layout that could be
faster but does not fit is tried again with finer memory techniques.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from time import perf_counter

import numpy as np

from fivefold.errors import ConfigError
from fivefold.predict.cluster import Cluster
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.times.context import best_context
from fivefold.search.bound_tables import Ranks, Values
from fivefold.search.branch_and_bound import Ledger, OpenCandidates, layout_of
from fivefold.search.by_stage import PARTIALS, PartlyRecomputed, partials
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.columns import Column
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import least_state, memory_bound
from fivefold.search.memory_choices import further_choices
from fivefold.search.refine import Refiner, distinct
from fivefold.search.request import Request
from fivefold.search.space import Space
from fivefold.search.time_bound import TimeBound, quick_time_bound, time_bound
from fivefold.search.trained import trained

WORK = 450_000  # most pipeline actions to build and simulate, or as much other work
LONG = 15_000  # actions of a program that is evaluated only after all shorter ones
REACH = 1.5  # evaluate layouts up to this multiple of the best step time
MESHES = 10  # meshes whose best layout is shown
TRIES = 4  # plain layouts of each mesh that are evaluated first
LESS_MEMORY = 1e10  # bytes; also find the fastest layout for a device with this much less memory
SHARES = (0.75, 0.6, 0.45)  # also find the fastest layout within these shares of device memory
WORTH = 0.02  # share of the memory that a slower layout must save to be listed
SMALLEST = 3  # layouts with the least memory to evaluate if nothing fits
LEAST_BOUNDS = 16  # layouts with the least bounds on memory among which these are sought
NOISE = 0.02  # relative spread of a step's time in repeated runs: no prediction resolves less


@dataclass(frozen=True)
class SearchResult:
    """The result of a layout search.

    Attributes:
        request: the request that was searched for.
        found: layouts that fit, the best first.
        rejected: layouts that could be faster, but do not fit.
        legal: number of legal layouts.
        bounded: number of layouts that got the closer bounds on memory and time.
        too_large: number of layouts whose memory bound exceeds the device.
        timed: number of pipeline programs that were simulated.
        looked_at: number of layouts whose memory was predicted.
        gap: largest share by which a layout that was not evaluated could be faster than all others.
        smallest: lower bound on the bytes of the smallest legal layout, if none fits.
        seconds: time that the search took, in seconds.
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

    @property
    def fastest(self) -> float:
        """Seconds of the fastest layout found; the best one may be slower within noise."""
        return min(candidate.seconds for candidate in self.found)

    @property
    def behind(self) -> float:
        """The largest share by which any legal layout could be faster than the best."""
        return self.best.seconds / self.fastest * (1 + self.gap) - 1

    def ties(self) -> list[Candidate]:
        """Layouts of other meshes that are as fast as the fastest within noise."""
        limit = self.fastest * (1 + NOISE)
        return [c for c in self.by_mesh()[1:] if c.seconds <= limit]

    def by_mesh(self) -> list[Candidate]:
        """The best layout of each mesh, the best first."""
        return distinct(self.found, len(self.found))

    def pareto(self) -> list[Candidate]:
        """The Pareto front of step time and memory, by at least 2 % of memory, fastest first."""
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
    """The legal layouts within the usual sizes; if there are none, all legal layouts."""
    question = request.config, request.world, request.given
    widest = 2 * request.cluster.gpus_per_node
    space = enumerate_space(*question, widest=widest, only=request.only)
    if not len(space):
        space = enumerate_space(*question, widest=request.world, shortest=1, only=request.only)
    return trained(with_context(space, request))


@dataclass
class _Search:
    """One run of the search: its candidates, and its findings so far."""

    request: Request
    space: Space
    ledger: Ledger = field(default_factory=lambda: Ledger(WORK))
    bounded: int = 0
    too_large: int = 0
    unseen: float = np.inf
    partials: list[PartlyRecomputed] = field(default_factory=list)

    @cached_property
    def refiner(self) -> Refiner:
        """Tries finer memory techniques on found layouts."""
        return Refiner(self.request, self.ledger)

    @cached_property
    def ranks(self) -> Ranks:
        """The tables of pipeline ranks that the bounds use."""
        return Ranks.of(self.request.config.model, self.space.partitions)

    def run(self) -> SearchResult:
        request, ledger = self.request, self.ledger
        quick = quick_time_bound(self.space, self.ranks, request.cluster, ledger.times_cache)
        start, end = 0.0, REACH * float(quick.min())
        while start < REACH * ledger.best and not ledger.spent:
            rows = np.flatnonzero((quick >= start) & (quick < end))
            if len(rows):
                self._look(self.space.take(rows))
            start = float(quick[quick >= end].min(initial=np.inf))
            end = REACH * start
        self.unseen = min(self.unseen, start)
        smallest = 0.0
        if not ledger.found:  # all work was spent on fast layouts that do not fit
            sizes = memory_bound(self.space, self.ranks)
            smallest = float(sizes.min())
            for small in smallest_of(self.space, self.ranks, request.cluster):
                candidate = evaluate(request, small.layout, times_cache=ledger.times_cache)
                if candidate.prediction is not None:
                    ledger.add(candidate)
        self.refiner.run(self.partials)
        found = self._checked(ledger.found)
        least = min((candidate.seconds for candidate in found), default=0.0)
        gap = least / min(self.unseen, least) - 1 if found else 0.0
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
        """Evaluate layouts with similar quick bounds, also with further memory techniques."""
        bounds, sizes = self._bounded(space)
        fits = self._fitting(sizes)
        self.bounded += len(space)
        self.too_large += len(space) - len(fits)
        candidates = self._open(space, bounds, fits)
        known = {candidate.mesh for candidate in self.ledger.found}
        for rows in _plain_first(candidates, known):
            for row in rows:
                if candidates.look(row).prediction is not None:
                    break
        candidates.explore(short_programs(candidates.space))
        least = _raised(bounds, fits, candidates)
        self._note(space, least, sizes)
        rounds = [candidates]
        faster = np.flatnonzero(least < self.ledger.best)
        if len(faster):
            choices = further_choices(self.request.config, self.request.given)
            permitted = [each for each in choices if self.request.permits(each.settings)]
            more = space.take(faster).with_memory(permitted)
            more = trained(more, like=space)
            bounds, sizes = self._bounded(more)
            fits = self._fitting(sizes)
            rounds.append(self._open(more, bounds, fits))
            rounds[-1].raise_bounds_from(candidates)
            rounds[-1].explore(short_programs(rounds[-1].space))
            self._note(more, _raised(bounds, fits, rounds[-1]), sizes)
        for each in rounds:
            each.explore()
            self.unseen = min(self.unseen, each.unseen)
        self._trade(candidates)

    def _trade(self, candidates: OpenCandidates) -> None:
        """Find the fastest layouts that need less memory than the device has."""
        if not len(candidates.space):
            return
        room = self.request.cluster.room
        sizes = memory_bound(candidates.space, self.ranks)
        sizes[np.setdiff1d(np.arange(len(sizes)), short_programs(candidates.space))] = np.inf
        for size in (room - LESS_MEMORY, *(room * share for share in SHARES)):
            candidates.explore_within(np.flatnonzero(sizes <= size), size)

    def _note(self, space: Space, seconds: Values, sizes: Values) -> None:
        """Remember layouts that may be fast if some of their layers are recomputed."""
        room, best = self.request.cluster.room, self.ledger.best
        found = partials(space, seconds, sizes, room, best)
        self.partials = sorted([*self.partials, *found], key=lambda p: p.estimate)[:PARTIALS]

    def _bounded(self, space: Space) -> tuple[TimeBound, Values]:
        """Lower bounds on time, and on memory in bytes."""
        cluster, cache = self.request.cluster, self.ledger.times_cache
        bounds = time_bound(space, self.ranks, cluster, cache)
        return bounds, memory_bound(space, self.ranks)

    def _fitting(self, sizes: Values) -> Column:
        """The rows whose lower bounds on memory fit the device."""
        return np.flatnonzero(sizes <= self.request.cluster.room)

    def _open(self, space: Space, bounds: TimeBound, fits: Column) -> OpenCandidates:
        return OpenCandidates(self.request, space.take(fits), bounds.take(fits), self.ledger)

    def _checked(self, found: Sequence[Candidate]) -> list[Candidate]:
        """The layouts from the first one that `check` accepts: first those as fast as the fastest
        within noise, by preference, then the others by time."""
        ordered = sorted(found, key=lambda c: c.seconds)
        if ordered:
            limit = ordered[0].seconds * (1 + NOISE)
            number = sum(c.seconds <= limit for c in ordered)
            room = self.request.cluster.room
            best = min(ordered[:number], key=lambda c: (c.preference(room), c.seconds))
            ordered.remove(best)
            ordered.insert(0, best)
        return _legal(ordered, self.request)


def smallest_layouts(request: Request) -> list[Candidate]:
    """The legal layouts that seem to need the least memory, whether or not they fit; none is
    timed."""
    space = legal_space(request)
    if not len(space):
        return []
    ranks = Ranks.of(request.config.model, space.partitions)
    return smallest_of(space, ranks, request.cluster)


def smallest_of(space: Space, ranks: Ranks, cluster: Cluster) -> list[Candidate]:
    """The layouts that need the least memory of those with the lowest bounds on it, not timed."""
    return _smallest(_least_bounds(space, ranks, cluster))


@lru_cache(maxsize=256)  # who explains a no asks for the same change more than once
def has_plan(request: Request) -> bool:
    """Whether the search would find a layout, that is whether one of `smallest_layouts`, which it
    always tries, fits."""
    return any(each.memory.fits for each in _that_may_fit(request))


def fitting_layouts(request: Request) -> list[Candidate]:
    """Those of `smallest_layouts` that fit."""
    return _smallest(each for each in _that_may_fit(request) if each.memory.fits)


def _smallest(found: Iterable[Candidate]) -> list[Candidate]:
    return sorted(found, key=lambda candidate: candidate.memory.shortage)[:SMALLEST]


def _that_may_fit(request: Request) -> Iterator[Candidate]:
    """The layouts with the lowest bounds on memory; none if no layout's bound fits."""
    if least_state(request.config) > request.world * request.cluster.room:
        return
    space = legal_space(request)
    if len(space):
        ranks = Ranks.of(request.config.model, space.partitions)
        if memory_bound(space, ranks).min() <= request.cluster.room:
            yield from _least_bounds(space, ranks, request.cluster)


def _least_bounds(space: Space, ranks: Ranks, cluster: Cluster) -> Iterator[Candidate]:
    """The layouts with the lowest bounds on memory, one by one, as each takes a while.

    A bound leaves out what deferred weight gradients keep, which may be most of a layout's memory.
    """
    rows = np.argsort(memory_bound(space, ranks, estimate=True), kind="stable")[:LEAST_BOUNDS]
    for row in rows.tolist():
        layout = layout_of(space, row)
        yield Candidate(layout, peak_memory(layout, cluster), None, 0.0)


def with_context(space: Space, request: Request) -> Space:
    """The candidates with the fastest kind of context-parallel communication, unless it is given.

    The time of each kind depends on few columns, and on nothing but attention.
    """
    few, _ = space.distinct(("tp", "cp", "mbs"))
    context = {}
    for row in np.flatnonzero(few.columns["cp"] > 1).tolist():
        tp, cp, mbs = (int(few.columns[name][row]) for name in ("tp", "cp", "mbs"))
        # Recomputation is chosen together with it, not before.
        config = replace(few.config_of(row), memory=request.config.memory)
        context[tp, cp, mbs] = best_context(config, request.cluster, request.given, request.only)
    return replace(space, context=context)


def _raised(bounds: TimeBound, fits: Column, candidates: OpenCandidates) -> Values:
    """Lower bounds on time of layouts that may fit, as raised by timed programs."""
    least = bounds.seconds
    least[fits] = candidates.bounds.seconds
    return least


def _plain_first(candidates: OpenCandidates, known: Set[tuple[int, ...]]) -> Iterator[list[int]]:
    """A few plain layouts of each promising mesh that is not in `known`, the fastest mesh first.

    Plain layouts have a common schedule and one sharding group. They nearly always fit if their
    memory bounds do, and so quickly give a time to beat.
    """
    space = candidates.space
    c = space.columns
    usual = space.by_partition(lambda partition: partition.known.fused)
    plain = usual & (c["instances"] == 1) & ~space.sharded("splits_gradients")
    short = short_programs(space)
    rows = short[plain[short]]
    rows = rows[np.argsort(candidates.lower[rows], kind="stable")]
    few, of = space.take(rows).distinct(("tp", "cp", "pp", "ep", "etp"))
    columns = (few.columns[name].tolist() for name in ("tp", "cp", "pp", "ep", "etp"))
    new = [mesh not in known for mesh in zip(*columns, strict=True)]
    promising = dict.fromkeys(of[np.array(new, bool)[of]].tolist())
    for mesh in islice(promising, max(0, MESHES - len(known))):
        yield rows[of == mesh][:TRIES].tolist()


def short_programs(space: Space) -> Column:
    """The rows of the layouts whose programs are quick to build and simulate."""
    c = space.columns
    stages = space.by_partition(lambda partition: len(partition.split.stages))
    acts = np.minimum(c["microbatches"], 4 * c["pp"]) * stages * 3
    return np.flatnonzero(acts <= LONG)


def _legal(candidates: list[Candidate], request: Request) -> list[Candidate]:
    """The candidates from the first one that `check` accepts.

    Raises:
        ConfigError: `check` accepts none of them.
    """
    refusal = None
    for number, candidate in enumerate(candidates):
        try:
            request.checked(candidate.layout.config)
        except ConfigError as error:
            refusal = refusal or error
            continue
        return candidates[number:]
    if refusal is not None:
        raise refusal
    return []
