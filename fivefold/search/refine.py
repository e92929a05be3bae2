"""Tries finer memory techniques on found layouts, and on layouts that do not fit without them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fivefold.config.config import Config
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.predict.memory.liveness import moments
from fivefold.predict.memory.peak import peak_memory
from fivefold.search.branch_and_bound import LOOK, Ledger
from fivefold.search.by_stage import PartlyRecomputed
from fivefold.search.candidate import Candidate, evaluate
from fivefold.search.memory_choices import in_flight_limits, refinements
from fivefold.search.request import Request
from fivefold.search.stage_numbers import QUICK, Numbers, try_numbers, try_one_number

TRIES = 4  # layouts of different meshes that are tried with dW beside the messages of dX
FOUND, MISSED = 2, 8  # layouts that fit, and that do not, for which finer techniques are tried
BY_STAGE = 16_000  # pipeline actions allowed for numbers of recomputed layers by stage
SHARED = LOOK / 2  # actions that take as long as a memory prediction that shares stages with others


@dataclass
class Refiner:
    """Refines what a search has found so far.

    Attributes:
        request: the model, the cluster and the settings to plan for.
        ledger: findings of the search, which refining adds to.
    """

    request: Request
    ledger: Ledger

    def run(self, promising: Sequence[PartlyRecomputed]) -> None:
        """Try all finer techniques.

        Args:
            promising: layouts that may be fast if some of their layers are recomputed.
        """
        ledger = self.ledger
        best = ledger.best
        missed = sorted((c for c in ledger.rejected if c.bound < best), key=lambda c: c.bound)
        tight = sorted(missed, key=lambda c: c.memory.device_total)
        fastest = distinct(self._fastest(), FOUND)
        others = distinct([c for pair in zip(missed, tight, strict=True) for c in pair], MISSED)
        for base in fastest:
            layers = max(len(stage.layers) for stage in base.layout.split.stages)
            for settings in self._permitted(refinements(self.request.given, layers)):
                self._try(base.layout.config.with_values(**settings))
        for base in (*fastest, *others):
            for settings in self._limits(base):
                config = base.layout.config.with_values(**settings)
                if self._try(config, replace(base.layout, config=config)):
                    break
        self._by_stage(promising)
        if "pipeline_dx_first" not in self.request.given:
            for base in distinct(self._fastest(), TRIES):
                if base.layout.sends_dx_first and base.layout.grid.tp > 1:
                    self._try(base.layout.config.with_values(pipeline_dx_first=False))

    def _permitted(self, choices: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return filter(self.request.permits, choices)

    def _fastest(self) -> list[Candidate]:
        return sorted(self.ledger.found, key=lambda c: c.seconds)

    def _try(self, config: Config, layout: Layout | None = None) -> bool:
        """Evaluate a configuration, or its checked layout if given; return whether it fits."""
        return self._timed(config, layout) < inf

    def _timed(self, config: Config, layout: Layout | None = None) -> float:
        """Seconds of a step of a configuration; infinite if it is not legal or does not fit."""
        ledger = self.ledger
        try:
            layout = layout or self.request.checked(config)
            candidate = evaluate(self.request, layout, times_cache=ledger.times_cache)
        except ConfigError:
            return inf
        ledger.looked(layout)
        if candidate.prediction is None:
            return inf
        ledger.add(candidate)
        return candidate.seconds

    def _limits(self, base: Candidate) -> Iterator[dict[str, Any]]:
        """Limits on microbatches in flight with which a too large layout may fit."""
        layout = base.layout
        if base.memory.fits or layout.config.memory.recompute_granularity == "full":
            return
        worst = base.memory.worst
        held = moments(layout, splits_backward=layout.sends_dx_first)[worst.pp_rank].kept
        in_flight = round(held.sum(axis=1).max())
        each = (worst.parts.get("activations", 0.0) + worst.parts.get("loss", 0.0)) / in_flight
        excess = worst.peak - self.request.cluster.room
        yield from self._permitted(in_flight_limits(self.request.given, in_flight, each, excess))

    def _by_stage(self, promising: Sequence[PartlyRecomputed]) -> None:
        """Recompute the fewest layers of each stage with which layouts fit.

        The most promising come first, until the allowed work is used up.
        """
        ledger = self.ledger
        until = ledger.work - BY_STAGE
        fits: dict[Config, bool] = {}

        def holds(layout: Layout) -> bool:
            if layout.config not in fits:
                fits[layout.config] = peak_memory(layout, self.request.cluster).fits
                ledger.looked(layout)
            return fits[layout.config]

        for base in sorted(promising, key=lambda p: p.estimate):
            if ledger.work <= until:
                return
            if base.bound < ledger.best and not holds(base.plain) and holds(base.whole):
                self._numbers(base.whole)

    def _numbers(self, layout: Layout) -> None:
        """Add layouts with the fewest recomputed layers of each stage, or of all stages alike."""
        request, ledger, config = self.request, self.ledger, layout.config

        def seconds(numbers: Numbers) -> float:
            numbered = config.with_values(recompute_num_layers=numbers)
            ledger.walked(layout, 1)
            return self._timed(numbered, replace(layout, config=numbered))

        some = replace(config.memory, recompute_num_layers=(1,) * len(layout.split.stages))
        if request.permits(vars(some)):
            tried = try_numbers(layout, request.cluster, seconds, QUICK)
            ledger.work -= SHARED * tried.looks
            ledger.looks += tried.looks
        elif config.memory.recompute_granularity == "full":  # what has one number has whole layers
            number = try_one_number(layout, request.cluster)
            alike = replace(some, recompute_num_layers=(number or 1,))
            if number is not None and request.permits(vars(alike)):
                seconds((number,))


def distinct(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """The first `count` candidates with different meshes."""
    seen: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        seen.setdefault(candidate.mesh, candidate)
    return list(seen.values())[:count]
