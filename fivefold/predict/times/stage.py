"""The time of a stage for one microbatch by cause, and the properties that determine it."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.description.kinds import LayerKind, layer_kind
from fivefold.description.shape import ModelParts, all_layers
from fivefold.layout import Layout
from fivefold.pipeline.split.stages import StageSpec
from fivefold.predict.times.compute import Phases

_NOTHING = Phases()


def _plus(a: Phases, b: Phases) -> Phases:
    """The sum of two times, one of which is often zero."""
    return a if b is _NOTHING else b if a is _NOTHING else a + b


class Times(NamedTuple):
    """Seconds by cause: computation, recomputation, and exposed communication.

    `offload` is the exposed part of copies to host memory and back, `host` what is left of the time
    in which the host issues it all.
    """

    compute: Phases = _NOTHING
    recompute: Phases = _NOTHING
    tp: Phases = _NOTHING
    cp: Phases = _NOTHING
    ep: Phases = _NOTHING
    dp: Phases = _NOTHING
    offload: Phases = _NOTHING
    host: Phases = _NOTHING

    def __add__(self, other: "Times") -> "Times":  # type: ignore[override]
        # Written out for speed: a search adds some hundred thousand of these, mostly zeros.
        return Times(
            _plus(self.compute, other.compute),
            _plus(self.recompute, other.recompute),
            _plus(self.tp, other.tp),
            _plus(self.cp, other.cp),
            _plus(self.ep, other.ep),
            _plus(self.dp, other.dp),
            _plus(self.offload, other.offload),
            _plus(self.host, other.host),
        )

    def __mul__(self, count: float) -> "Times":  # type: ignore[override]
        return Times(*[each if each is _NOTHING else each * count for each in self])

    def without_dw(self) -> "Times":
        """The same without the products that make weight gradients."""
        return self._replace(compute=self.compute._replace(dw=0.0))

    @property
    def work(self) -> Phases:
        """Seconds of computation, including recomputation."""
        return _plus(self.compute, self.recompute)

    @property
    def total(self) -> Phases:
        """The sum over all causes."""
        found = _NOTHING
        for cause in self:
            if cause is not _NOTHING:
                found = _plus(found, cause)
        return found


def added(times: Iterable[Times]) -> Times:
    """The sum of times, without intermediate results, for speed: most additions of a search are
    here."""
    totals = [*Times()]
    for each in times:
        for place, cause in enumerate(each):
            if cause is not _NOTHING:
                totals[place] = _plus(totals[place], cause)
    return Times(*totals)


def repeated(times: Times) -> Times:
    """The times of a forward that the backward repeats; communication keeps its cause."""

    def again(phases: Phases) -> Phases:
        return Phases(0.0, phases.forward)

    return Times(
        recompute=again(times.compute),
        tp=again(times.tp),
        cp=again(times.cp),
        ep=again(times.ep),
    )


Again = tuple[str, ...] | None
"""Modules of a layer that its backward runs again; None: all of it."""


def run_again(memory: MemoryConfig) -> Again:
    """What the backward of a recomputed layer runs again."""
    return None if memory.recompute_granularity == "full" else memory.recomputed_modules


@dataclass(frozen=True)
class StageKind:
    """The properties of a stage that determine its time.

    Attributes:
        embedding: whether it holds the embedding.
        head: whether it holds the head.
        mtp: number of multi-token prediction layers.
        layers: number of layers by kind and by what is run again of them; MTP modules last.
    """

    embedding: bool
    head: bool
    mtp: int
    layers: tuple[tuple[tuple[LayerKind, Again], int], ...]

    @classmethod
    def of(cls, layout: Layout, stage: int) -> "StageKind":
        """The kind of a stage; stages of one kind take the same time."""
        memory, spec = layout.memory_of(stage), layout.split.stages[stage]
        first = len(spec.layers)
        if memory.recomputes_first_layers:
            (first,) = memory.recompute_num_layers
        return _kind(layout.config.model, spec, run_again(memory), first)


@lru_cache(maxsize=4096)
def _kind(model: ModelConfig, spec: StageSpec, again: Again, first: int) -> StageKind:
    """The kind of a stage of which the `first` layers, and MTP modules, run `again`."""
    layers = Counter(
        (layer_kind(model, layer), again if place < first else ())
        for place, layer in enumerate(spec.layers)
    )
    for layer in all_layers(model, ModelParts(mtp=spec.mtp)):
        layers[layer_kind(model, layer), again] += 1

    def place(item: tuple[tuple[LayerKind, Again], int]) -> tuple[bool, LayerKind, bool]:
        (kind, repeated), _ = item
        return kind.predicts, kind, repeated == ()

    return StageKind(spec.embedding, spec.head, spec.mtp, tuple(sorted(layers.items(), key=place)))
