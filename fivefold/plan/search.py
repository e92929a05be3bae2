"""The fastest layouts that fit: enumerate, bound, look closely at the promising ones, refine.

Branch and bound: every legal layout gets lower bounds on memory and time; in the order of the time
bounds they are then predicted, until no bound is below the best that was found, or enough have been
looked at. Layouts that miss the device's memory by little are tried again with finer techniques.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from fivefold.check import Layout, check
from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.mesh.grid import Grid
from fivefold.plan.blocks import Ranks, Values
from fivefold.plan.context import SETTINGS, best_context
from fivefold.plan.memory import MemoryPrediction, peak_memory
from fivefold.plan.memory_bound import memory_bound
from fivefold.plan.memory_choices import MemoryChoice, refinements
from fivefold.plan.request import Request
from fivefold.plan.software import Software
from fivefold.plan.space import Column, Space, enumerate_space
from fivefold.plan.step import Prediction, predict
from fivefold.plan.time_bound import time_bound
from fivefold.plan.ways import FUSED

CLOSE_LOOKS = 200  # layouts that are predicted at most
WORK = 120_000  # acts of programs that are swept and timed at most, each look counted as LOOK
UNTIL_ONE = 4  # times as many, until a layout fits
LOOK = 1_000
LONG = 15_000  # acts of a program that is looked at only after all shorter ones
MESHES = 10  # of which the best layout is shown
TRIES = 4  # plain layouts of each of them that are looked at first
PAIRS = 2  # layouts whose schedules run in pairs that are looked at next
SMALLEST = 3  # layouts of least memory that are looked at where nothing fits
ALIKE = 0.004  # share of a step by which a simpler layout may be slower and still be preferred


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at closely.

    Attributes:
        layout: of which.
        memory: what each pipeline rank needs.
        prediction: its time; None: it does not fit, and was not timed.
        bound: seconds that it takes at least; for layouts that were not enumerated, its time.
    """

    layout: Layout
    memory: MemoryPrediction
    prediction: Prediction | None
    bound: float

    @property
    def seconds(self) -> float:
        """Of a step, or at least."""
        return self.bound if self.prediction is None else self.prediction.step_time

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees by which layouts are told apart."""
        grid = self.layout.grid
        return (grid.tp, grid.cp, grid.pp, grid.ep, grid.etp)

    @cached_property
    def complexity(self) -> tuple[int, ...]:
        """What has to be understood and to work; less is preferred among equals."""
        grid, parallel = self.layout.grid, self.layout.config.parallel
        memory = self.layout.config.memory
        plain = self.layout.schedule in ("1f1b", "interleaved_1f1b")
        techniques = (
            sum(size > 1 for size in (grid.tp, grid.cp, grid.pp, grid.etp)),
            not plain,
            memory.recompute_granularity is not None,
            memory.fine_grained_activation_offloading,
            parallel.num_distributed_optimizer_instances > 1,
            parallel.pipeline_model_parallel_layout is not None,
        )
        degrees = (grid.tp * grid.cp * grid.pp, self.layout.split.num_virtual)
        return (sum(map(int, techniques)), *degrees)


@dataclass(frozen=True)
class Result:
    """What a search found.

    Attributes:
        request: the question.
        found: layouts that fit, the best first.
        rejected: promising ones that do not fit.
        legal: layouts that were enumerated.
        too_large: of them, those whose memory bound exceeds the device.
        looked_at: of them, those that were predicted or whose memory was swept.
        gap: share by which a layout that was not looked at could at most be faster than the best.
        smallest: bytes that the smallest of the legal layouts needs at least.
        seconds: that the search took.
    """

    request: Request
    found: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    legal: int
    too_large: int
    looked_at: int
    gap: float
    smallest: float
    seconds: float

    @property
    def best(self) -> Candidate:
        """The recommended layout."""
        return self.found[0]

    def by_mesh(self) -> list[Candidate]:
        """The best layout of every mesh, the best first."""
        seen: dict[tuple[int, ...], Candidate] = {}
        for candidate in self.found:
            seen.setdefault(candidate.mesh, candidate)
        return list(seen.values())

    def pareto(self) -> list[Candidate]:
        """Layouts than which none is both faster and smaller, the fastest first."""
        front: list[Candidate] = []
        for candidate in sorted(self.found, key=lambda c: (c.seconds, c.memory.max_allocated)):
            if not front or candidate.memory.max_allocated < front[-1].memory.max_allocated:
                front.append(candidate)
        return front


def search(request: Request) -> Result:
    """The best layouts for a request; `found` is empty if nothing fits."""
    return _Search(request).run()


def evaluate(
    request: Request, config: Config, *, always: bool = False, layout: Layout | None = None
) -> Candidate:
    """A close look at one layout.

    Args:
        request: where it would run.
        config: of the layout.
        always: predict its time even if it does not fit.
        layout: what `config` means, if that is known.

    Raises:
        ConfigError: it is not legal.
    """
    layout = layout or check(config, request.world, planned=True)
    memory = peak_memory(layout, request.cluster)
    prediction = predict(layout, request.cluster) if always or memory.fits else None
    return Candidate(layout, memory, prediction, prediction.step_time if prediction else 0.0)


@dataclass
class _Search:
    """One run: the space with its bounds, and what has been found so far."""

    request: Request
    found: list[Candidate] = field(default_factory=list)
    rejected: list[Candidate] = field(default_factory=list)
    looks: int = 0

    def run(self) -> Result:
        began = perf_counter()
        request = self.request
        space = self.space()
        legal = len(space)
        if not legal:
            return Result(request, (), (), 0, 0, 0, 0.0, 0.0, perf_counter() - began)
        ranks = Ranks.of(request.config.model, space.ways)
        memory = memory_bound(space, ranks)
        fits = np.flatnonzero(memory <= capacity(request))
        smallest = float(memory.min())
        unseen = np.inf
        if len(fits):
            space = space.take(fits)
            bounds = time_bound(space, ranks, request.cluster, Software()).seconds
            unseen = self._look(space, bounds, memory[fits])
            if not self.found:  # the looks ran out among fast layouts that do not fit
                smallest_ones = self.smallest(space, memory[fits], bounds)
                self.found += [c for c in smallest_ones if c.prediction is not None]
            self._refine()
        found = self._checked(self.found)
        return Result(
            request=request,
            found=tuple(found),
            rejected=tuple(sorted(self.rejected, key=lambda c: c.bound)),
            legal=legal,
            too_large=legal - len(fits),
            looked_at=self.looks,
            gap=max(0.0, found[0].seconds / unseen - 1) if found else 0.0,
            smallest=smallest,
            seconds=perf_counter() - began,
        )

    def space(self) -> Space:
        """Every legal layout."""
        request = self.request
        widest = 2 * request.cluster.gpus_per_node
        space = enumerate_space(request.config, request.world, request.given, widest)
        return with_context(space, request)

    def _look(self, space: Space, bounds: Values, states: Values) -> float:
        """Predict in the order of the bounds; the lowest bound of what was not looked at.

        Of layouts that differ in their sharding alone, the fastest that fits is enough, and where
        one does not fit, none fits that shards less. A layout whose like took so much longer than
        their bounds that it cannot win is passed over, and counts for the gap.
        """
        ordered = np.lexsort((bounds, _acts(space) > LONG))
        order = np.concatenate([_plain_first(space, ordered), ordered])
        families = _numbered(space, (*_DEGREES, "sp", "mbs", "way", "memory"))
        likes = _numbered(space, ("tp", "cp", "mbs", "way"))
        meshes = _numbered(space, _DEGREES)
        seen = _Seen()
        best, unseen, predicted = np.inf, np.inf, 0
        for place, row in enumerate(order.tolist()):
            family, like, bound = int(families[row]), int(likes[row]), float(bounds[row])
            known = int(meshes[row]) in seen.meshes
            if bound >= best and (len(seen.meshes) >= MESHES or bound > 1.5 * best):
                continue
            if predicted >= CLOSE_LOOKS or seen.work > WORK * (1 if predicted else UNTIL_ONE):
                unseen = min(unseen, float(bounds[order[place:]].min()))
                break
            if row in seen.rows or states[row] >= seen.missed.get(family, np.inf):
                continue
            if family in seen.done or (known and bound * seen.excess.get(like, 1.0) >= best):
                unseen = min(unseen, bound)
                continue
            candidate = self.candidate(space, row, bound)
            seen.look(candidate)
            seen.rows.add(row)
            if candidate.prediction is None:
                self.rejected.append(candidate)
                seen.missed[family] = float(states[row])
                continue
            seen.done.add(family)
            seen.meshes.add(int(meshes[row]))
            seen.excess[like] = candidate.seconds / bound
            predicted += 1
            self.found.append(candidate)
            best = min(best, candidate.seconds)
        return unseen

    def smallest(self, space: Space, sizes: Values, bounds: Values) -> list[Candidate]:
        """A close look at the layouts whose memory bounds are lowest."""
        rows = np.argsort(sizes, kind="stable")[:SMALLEST].tolist()
        return [self.candidate(space, row, float(bounds[row])) for row in rows]

    def candidate(self, space: Space, row: int, bound: float) -> Candidate:
        """A row of the space; its layout is known, so that `check` need not find it again."""
        self.looks += 1
        config = space.config_of(row)
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
        layout = Layout(config, grid, way.split, way.schedule, at["microbatches"])
        return replace(evaluate(self.request, config, layout=layout), bound=bound)

    def _refine(self) -> None:
        """Finer memory techniques, on the best layouts and on faster ones that do not fit."""
        best = min((c.seconds for c in self.found), default=np.inf)
        missed = sorted((c for c in self.rejected if c.bound < best), key=lambda c: c.bound)
        tight = sorted(missed, key=lambda c: c.memory.device_total)
        bases = [
            *_distinct(sorted(self.found, key=lambda c: c.seconds), 2),
            *_distinct([c for pair in zip(missed, tight, strict=True) for c in pair], 8),
        ]
        for base in bases:
            for choice in self._choices(base):
                with_choice = base.layout.config.with_values(**choice.settings)
                try:
                    candidate = evaluate(self.request, with_choice)
                except ConfigError:
                    continue
                self.looks += 1
                if candidate.prediction is not None:
                    self.found.append(candidate)

    def _choices(self, base: Candidate) -> Iterator[MemoryChoice]:
        layers = max(len(stage.layers) for stage in base.layout.split.stages)
        yield from refinements(base.layout.config, self.request.given, layers)

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
    """A close look at the legal layouts whose memory bounds are lowest, fit or not."""
    run = _Search(request)
    space = run.space()
    memory = memory_bound(space, Ranks.of(request.config.model, space.ways))
    return run.smallest(space, memory, np.full(len(space), np.inf))


def with_context(space: Space, request: Request) -> Space:
    """The space, in which context parallelism communicates in the fastest way, unless it is given.

    How fast a way is depends on few columns, and on nothing that is added around attention.
    """
    if request.given & SETTINGS or not len(space):
        return space
    few, _ = space.distinct(("tp", "cp", "mbs"))
    context = {}
    for row in np.flatnonzero(few.columns["cp"] > 1).tolist():
        tp, cp, mbs = (int(few.columns[name][row]) for name in ("tp", "cp", "mbs"))
        context[tp, cp, mbs] = best_context(few.config_of(row), request.cluster)
    return replace(space, context=context)


def capacity(request: Request) -> float:
    """Bytes that a layout may allocate on a device."""
    return request.cluster.gpu.memory_bytes - request.cluster.reserved_bytes


_DEGREES = ("tp", "cp", "pp", "ep", "etp")


@dataclass
class _Seen:
    """What the close looks have taught.

    Attributes:
        done: families of which one fits.
        missed: of families of which one did not fit, the bytes of state of the last that did not.
        excess: of layouts that are alike, how much longer they take than their bounds.
        meshes: that have a layout that fits.
        work: acts that were swept.
        programs: that were built for it.
        rows: that were looked at.
    """

    done: set[int] = field(default_factory=set)
    missed: dict[int, float] = field(default_factory=dict)
    excess: dict[int, float] = field(default_factory=dict)
    meshes: set[int] = field(default_factory=set)
    work: int = 0
    programs: set[tuple[object, ...]] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)

    def look(self, candidate: Candidate) -> None:
        """Count the work of a look: programs are kept from one look to the next."""
        layout = candidate.layout
        ranks, stages = layout.grid.pp, len(layout.split.stages)
        program = (layout.schedule, layout.split.placement, candidate.prediction is None)
        self.work += LOOK
        if program not in self.programs:
            self.programs.add(program)
            self.work += min(layout.num_microbatches, 4 * ranks) * stages * 3


def _plain_first(space: Space, ordered: Column) -> Column:
    """A few layouts of each promising mesh, with usual schedules, then with pairs, and one group.

    They nearly always fit where their bounds do, and so soon give a time for others to beat.
    """
    c = space.columns
    usual = np.array([way.schedule in FUSED for way in space.ways])[c["way"]]
    plain = (c["instances"] == 1) & (c["strategy"] <= 1) & (_acts(space) <= LONG)
    meshes = _numbered(space, _DEGREES)
    rows: list[int] = []
    for kind, tries in ((usual, TRIES), (c["pairs"] == 1, PAIRS)):
        taken: dict[int, list[int]] = {}
        for row in ordered[(plain & kind)[ordered]].tolist():
            mine = taken.setdefault(int(meshes[row]), [])
            if len(mine) < tries:
                mine.append(row)
            if len(taken) > MESHES:
                break
        rows += [row for mine in taken.values() for row in mine]
    return np.array(rows, np.int64)


def _acts(space: Space) -> Column:
    """How many acts of a layout's program are swept, at most."""
    c = space.columns
    stages = np.array([len(way.split.stages) for way in space.ways])[c["way"]]
    return np.minimum(c["microbatches"], 4 * c["pp"]) * stages * 3


def _numbered(space: Space, names: Sequence[str]) -> Column:
    """Candidates that agree in these columns have the same number."""
    key = np.zeros(len(space), np.int64)
    for name in names:
        column = space.columns[name]
        key = key * (int(column.max(initial=0)) + 1) + column
    return key


def _distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first so many of different meshes."""
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        seen.setdefault(candidate.mesh, candidate)
    return list(seen.values())[:count]


def _legal(candidates: list[Candidate], request: Request) -> list[Candidate]:
    """The candidates from the first one on that `check` lets pass: it has the last word."""
    for number, candidate in enumerate(candidates):
        try:
            check(candidate.layout.config, request.world, planned=True)
        except ConfigError:
            continue
        return candidates[number:]
    return []
