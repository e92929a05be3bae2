"""Fits a given layout into a memory budget by choosing what to recompute and to offload.

The choice is the fastest that fits among all that is the same for every stage: no recomputation,
each set of modules, whole layers in groups or some of each stage; with each of them each set of
offloaded modules and tensors, and each limit on microbatches in flight. Not every combination is
predicted. A way of recomputing cannot get faster by offloading or by a limit, and the least memory
that it can take is that with all offloading and a limit of 1, so that a branch and bound over the
ways finds the same time as trying everything.

Then each stage gets a number of layers of its own, whole or of modules, with nothing offloaded and
with what the choice before offloads. Kinds of recomputation that another one beats in time and in
the memory of every rank are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import combinations, product
from math import inf
from typing import Any, get_args

from fivefold.check import check
from fivefold.config.config import SETTINGS, Config
from fivefold.config.memory import OffloadModule, OffloadTensor, RecomputeModule
from fivefold.config.rules.memory import check_memory
from fivefold.errors import ConfigError, Mistakes
from fivefold.memory.rules import check_techniques
from fivefold.predict.memory.liveness import moments
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.times.layer import TimesCache
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.memory_choices import LIMIT, OFFLOAD, RECOMPUTE
from fivefold.search.request import Request
from fivefold.search.stage_numbers import Numbers, try_numbers

MOVED = (*OFFLOAD, "offload_tensors")
CHOSEN = (*RECOMPUTE, LIMIT, *MOVED)
"""Settings that a budget may choose."""
NEARLY = 0.1  # share of the need that may be missing for other choices to be tried
Settings = Mapping[str, Any]
Items = frozenset[str]
NONE: Settings = {}


@dataclass(frozen=True)
class MemoryFit:
    """The outcome of a choice.

    Attributes:
        plain: the layout with nothing but the settings that were given.
        best: the fastest that fits; None if nothing fits.
        smallest: `best`, or the lowest peak that was found if nothing fits.
        timed: number of settings whose step was predicted.
    """

    plain: Candidate
    best: Candidate | None
    smallest: Candidate
    timed: int


def fit_memory(request: Request) -> MemoryFit:
    """The fastest memory settings with which a layout fits the request's device.

    Args:
        request: a configuration whose layout is complete, its cluster, and in `given` the memory
            settings that stay as they are.

    Raises:
        ConfigError: the configuration is wrong, whatever its memory settings are.
    """
    free = [
        name
        for group in (RECOMPUTE, (LIMIT,), MOVED)
        if not request.given & set(group)
        for name in group
    ]
    usual = {name: SETTINGS[name].default for name in free}
    config = request.config.with_values(**usual)
    check(config, request.world)
    return MemoryChooser(replace(request, config=config), frozenset(free)).run()


@dataclass
class MemoryChooser:
    """One search over the free settings, with its results so far."""

    request: Request
    free: frozenset[str]
    times_cache: TimesCache = field(default_factory=dict)
    known: dict[Config, Candidate | None] = field(default_factory=dict)
    best: Candidate | None = None
    least: list[tuple[float, Settings]] = field(default_factory=list)

    def run(self) -> MemoryFit:
        """The fastest settings that fit, by branch and bound over the ways of recomputing."""
        plain = self.timed(NONE)
        assert plain is not None
        ways = [(found, way) for way in self.ways() if (found := self.timed(way)) is not None]
        for found, _ in ways:
            self._offer(found)
        for found, way in sorted(ways, key=lambda pair: pair[0].seconds):
            if self._beats(found):
                self._more(way, found)
        if not plain.memory.fits:
            self._stages(ways)
        timed = [c for c in self.known.values() if c is not None]
        if self.best is not None:
            return MemoryFit(plain, self._simplest(self.best), self.best, len(timed))
        least = self.timed(min(self.least, key=lambda pair: pair[0])[1]) if self.least else None
        smallest = min((plain, *timed, *filter(None, [least])), key=_peak)
        return MemoryFit(plain, None, smallest, len(timed))

    def ways(self) -> Iterator[Settings]:
        """The ways of recomputing: nothing, sets of modules, or whole layers."""
        yield NONE
        if "recompute_granularity" not in self.free:
            return
        for modules in _subsets(get_args(RecomputeModule)):
            if modules:
                yield {"recompute_granularity": "selective", "recompute_modules": modules}
        split = check(self.request.config, self.request.world).split
        most = max(len(stage.layers) for stage in split.stages)
        for method, last in (("block", most - 1), ("uniform", most)):
            for layers in range(1, last + 1):
                yield {
                    "recompute_granularity": "full",
                    "recompute_method": method,
                    "recompute_num_layers": (layers,),
                }

    def moves(self, way: Settings) -> list[Settings]:
        """The legal sets of offloaded items for a way of recomputing, small ones first."""
        if "offload_modules" not in self.free:
            return [NONE]
        items = (*get_args(OffloadModule), *get_args(OffloadTensor))
        sets = [_moving(each) if each else NONE for each in _subsets(items)]
        return [each for each in sets if self._is_legal({**way, **each})]

    @cached_property
    def limits(self) -> range:
        """Limits on microbatches in flight below the number that some rank would hold."""
        if LIMIT not in self.free:
            return range(0)
        layout = check(self.request.config, self.request.world)
        each = moments(layout, splits_backward=layout.sends_dx_first)
        return range(1, round(max(float(found.kept.max()) for found in each)))

    def timed(self, settings: Settings) -> Candidate | None:
        """The layout with these settings, its memory and time; None if it is not legal."""
        config = self.request.config.with_values(**settings)
        if config not in self.known:
            self.known[config] = self._timed(config) if self._is_legal(settings) else None
        return self.known[config]

    def _timed(self, config: Config) -> Candidate | None:
        try:
            layout = check(config, self.request.world)
        except ConfigError:
            return None
        return evaluate(self.request, layout, always=True, times_cache=self.times_cache)

    def _is_legal(self, settings: Settings) -> bool:
        """A quick check before that of the whole configuration."""
        config, mistakes = self.request.config, Mistakes()
        memory = replace(config.memory, **settings)
        check_memory(memory, config.model, mistakes)
        if not mistakes.found:
            check_techniques(replace(config, memory=memory), mistakes)
        return not mistakes.found

    def _offer(self, found: Candidate) -> None:
        if found.memory.fits and self._beats(found):
            self.best = found

    def _beats(self, found: Candidate) -> bool:
        return self.best is None or found.seconds < self.best.seconds

    def _may_fit(
        self, way: Settings, moves: Mapping[Items, Settings], largest: Iterable[Items]
    ) -> bool:
        """Whether a way fits at its smallest: one microbatch in flight, and all offloaded.

        With so few in flight, offloading less can need less memory, as what is offloaded needs room
        when it comes back. So where little is missing, the set of offloaded items is changed one by
        one as long as that saves memory.
        """
        granularity = way.get(
            "recompute_granularity", self.request.config.memory.recompute_granularity
        )
        limit = {LIMIT: 1} if len(self.limits) and granularity != "full" else {}

        @cache
        def filled(items: Items) -> float:
            settings = {**way, **moves.get(items, NONE), **limit}
            try:
                layout = check(self.request.config.with_values(**settings), self.request.world)
            except ConfigError:
                return 0.0  # a smaller fraction may be legal, and fit
            memory = peak_memory(layout, self.request.cluster)
            self.least.append((memory.max_allocated, settings))
            return 0.0 if memory.fits else 1.0 + max(memory.missing, 0.0) / memory.max_allocated

        return any(_falls_below_one(filled, start, moves) for start in (*largest, Items()))

    def _more(self, way: Settings, alone: Candidate) -> None:
        """Offer a way together with offloading and with limits.

        All that can be offloaded comes first: where copies are hidden it costs nothing, and
        nothing beside this way can then be faster.
        """
        moves = {_moved_by(moved): moved for moved in self.moves(way)}
        largest = [each for each in moves if not any(each < others for others in moves)]
        if not self._may_fit(way, moves, largest):
            return
        slower: list[Items] = []
        for items in (*largest, *moves):
            if any(known <= items for known in slower):
                continue
            found = self.timed({**way, **moves[items]})
            if found is None:
                continue
            if found.memory.fits or not self._beats(found):
                slower.append(items)
            self._offer(found)
            if not found.memory.fits and self._beats(found):
                self._limited({**way, **moves[items]})
            if not self._beats(alone):
                return

    def _limited(self, settings: Settings) -> None:
        """Offer the highest limit on microbatches in flight with which these settings fit.

        A lower limit is never faster, so that only limits that beat the best so far are of use.
        """
        low, middle, high = 0, len(self.limits), len(self.limits)
        while low < high:  # the limits up to `low` fit, those above `high` do not
            found = self.timed({**settings, LIMIT: middle})
            if found is not None and found.memory.fits:
                self._offer(found)
                low = middle
            elif found is not None and not self._beats(found):
                return
            else:
                high = middle - 1
            middle = (low + high + 1) // 2

    def _stages(self, ways: Sequence[tuple[Candidate, Settings]]) -> None:
        """Offer numbers of recomputed layers for each stage."""
        if "recompute_granularity" not in self.free:
            return
        moved = [NONE]
        if self.best is not None and (memory := self.best.layout.config.memory).moved_items:
            moved.append({name: getattr(memory, name) for name in MOVED})
        for settings, way in product(moved, _unbeaten(ways)):
            self._by_stage({**way, **settings, "recompute_method": "block"})

    def _by_stage(self, settings: Settings) -> None:
        """Offer numbers of layers by stage with which this kind of recomputation fits."""
        try:
            layout = check(self.request.config.with_values(**settings), self.request.world)
        except ConfigError:
            return

        def timed(numbers: Numbers) -> float:
            found = self.timed({**settings, "recompute_num_layers": numbers})
            if found is not None:
                self._offer(found)
            return inf if found is None else found.seconds

        tried = try_numbers(layout, self.request.cluster, timed)
        self.least.append((tried.peak, {**settings, "recompute_num_layers": tried.numbers}))

    def _simplest(self, best: Candidate) -> Candidate:
        """The same settings without all that can be omitted without losing time or fit."""
        memory = best.layout.config.memory
        for name in ("offload_modules", "offload_tensors"):
            for item in getattr(memory, name):
                moved = {*memory.offload_modules, *memory.offload_tensors} - {item}
                found = self.timed({**_chosen(memory), **_moving(moved)})
                if found and found.memory.fits and found.seconds <= best.seconds:
                    return self._simplest(found)
        return best


def _unbeaten(ways: Sequence[tuple[Candidate, Settings]]) -> list[Settings]:
    """Ways of recomputing every layer alike, fastest first, without those that another way beats in
    time and in every rank's memory."""
    usual = {"recompute_method": "uniform", "recompute_num_layers": (1,)}
    kinds = [
        (candidate, way)
        for candidate, way in ways
        if way and all(way.get(name, value) == value for name, value in usual.items())
    ]
    found: list[tuple[list[float], Settings]] = []
    for candidate, way in sorted(kinds, key=lambda pair: (pair[0].seconds, _peak(pair[0]))):
        peaks = [rank.peak for rank in candidate.memory.ranks]
        if not any(all(map(float.__le__, known, peaks)) for known, _ in found):
            found.append((peaks, {**way, **usual}))
    return [way for _, way in found]


def _falls_below_one(
    filled: Callable[[Items], float], start: Items, others: Iterable[Items]
) -> bool:
    """Whether a function of a set falls below 1 when the set is changed by one item at a time as
    long as the function falls."""
    best, near = inf, [start]
    while near:
        lowest = min(near, key=filled)
        if filled(lowest) < 1:
            return True
        if filled(lowest) >= min(best, 1 + NEARLY):
            return False
        best, near = filled(lowest), [each for each in others if len(each ^ lowest) == 1]
    return False


def _subsets(items: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (each for size in range(len(items) + 1) for each in combinations(items, size))


def _moving(items: Iterable[str]) -> Settings:
    """Settings that offload these modules and tensors."""
    chosen = set(items)
    modules = tuple(name for name in get_args(OffloadModule) if name in chosen)
    tensors = tuple(name for name in get_args(OffloadTensor) if name in chosen)
    values = (bool(chosen), modules, tensors)
    return dict(zip(MOVED, values, strict=True))


def _moved_by(settings: Settings) -> Items:
    return frozenset((*settings.get("offload_modules", ()), *settings.get("offload_tensors", ())))


def _chosen(memory: Any) -> Settings:
    return {name: getattr(memory, name) for name in CHOSEN}


def _peak(candidate: Candidate) -> float:
    return candidate.memory.max_allocated
