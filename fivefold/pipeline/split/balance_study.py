"""Stage balancing for `fivefold schedule`: layers, load and memory of each stage, as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from fivefold.config.model import ModelConfig
from fivefold.description.kinds import layer_kind
from fivefold.errors import ConfigError, Mistake
from fivefold.pipeline.costs.parts import (
    ModelPart,
    Parts,
    modelled_parts,
    parts_of_kinds,
    stated_parts,
)
from fivefold.pipeline.draw.study import Study
from fivefold.pipeline.ir import loop_placement
from fivefold.pipeline.schedules.registry import SCHEDULES, Shape, build_program
from fivefold.pipeline.simulate import peak_in_flight
from fivefold.pipeline.split.balance import Balance, balance, schedule_clock, weigh
from fivefold.pipeline.split.cuts import MemoryLimit
from fivefold.pipeline.split.layout import SplitSettings
from fivefold.pipeline.split.stages import layout_string, stage_table
from fivefold.units import human_bytes


@dataclass(frozen=True)
class Cut:
    """A model split into pipeline stages.

    Attributes:
        parts: the model's pieces, with the study's times.
        balance: the stages and the loads of the ranks.
        room: memory limit of a rank.
        layout: the stages in the layout language.
    """

    parts: Parts
    balance: Balance
    room: MemoryLimit
    layout: str

    @property
    def stages(self) -> tuple[ModelPart, ...]:
        """Time and memory of each stage."""
        return tuple(self.parts.of(stage) for stage in self.balance.split.stages)

    @property
    def needs(self) -> tuple[float, ...]:
        """Peak memory of each rank, in the unit of the parts' memory."""
        split = self.balance.split
        needs = [0.0] * split.num_ranks
        for rank, part, held in zip(split.placement, self.stages, self.room.in_flight, strict=True):
            needs[rank] += part.state + held * part.held
        return tuple(needs)


def cut_model(
    model: ModelConfig,
    study: Study,
    *,
    schedule: str | None = None,
    layout: str | None = None,
    costs: Mapping[str, float] | None = None,
    measured: Mapping[str, ModelPart] | None = None,
    seq_length: int = 4096,
    memory: float = inf,
) -> Cut:
    """Split a model into the stages of a study, or evaluate a given layout.

    Args:
        model: the architecture.
        study: ranks, stages per rank, and the times F, dX and dW: of an average rank, or of a layer
            whose stated cost is 1.
        schedule: schedule that decides the placement and the microbatches in flight; None: 1f1b, or
            an interleaved one.
        layout: layout to evaluate instead of searching for a split.
        costs: costs by kind of piece (see `parts.KINDS`); None: proportional to forward FLOPs.
        measured: times of each kind of piece, used instead of `costs` and the study's times.
        seq_length: tokens per microbatch.
        memory: bytes that a rank may hold.

    Raises:
        ConfigError: the layout does not match the model, or no split fits.
    """
    parts = _timed(modelled_parts(model, seq_length), study)
    kinds = [layer_kind(model, layer).name for layer in range(model.num_layers)]
    if measured is not None:
        parts = _with_times(parts, parts_of_kinds(kinds, model.mtp_num_layers, measured))
    elif costs is not None:
        stated = stated_parts(kinds, model.mtp_num_layers, costs, study.times)
        parts = _with_times(parts, stated)
    everything = [parts.embedding, *parts.items, parts.head]
    if not any(part.time for part in everything):
        raise ConfigError("no piece of the model takes any time, so that nothing can be balanced")
    if layout is not None:
        known = SCHEDULES.get(schedule or "")
        split = SplitSettings(
            model.num_layers,
            study.num_ranks,
            layout=layout,
            mtp_num_layers=model.mtp_num_layers,
            in_a_v=known is not None and known.shape is Shape.V,
        ).split()
        found = weigh(parts, split)
        name = _order(schedule, split.placement, study)
        room = _room(name, split.placement, study, memory)
    else:
        loop = loop_placement(study.num_ranks, study.num_ranks * (study.num_chunks or 1))
        name = _order(schedule, loop, study)
        placement = study.placement_for(SCHEDULES[name].shape)
        room = _room(name, placement, study, memory)
        clock = schedule_clock(name, placement, study.num_microbatches, study.hop)
        found = balance(parts, placement, room if memory < inf else None, clock)
    return Cut(parts, found, room, layout_string(found.split.stages))


def cut_lines(cut: Cut) -> list[str]:
    """The stage table with the load and memory of each rank, and totals."""
    head, *rows, total = stage_table(cut.balance.split).splitlines()
    loads = cut.balance.loads
    mean = sum(loads) / len(loads)
    width = max(len(line) for line in (head, *rows)) + 2
    lines = [f"layout {cut.layout}", "", f"{head:<{width}}    load  of mean      memory"]
    for row, load, need in zip(rows, loads, cut.needs, strict=True):
        size = human_bytes(need)
        lines.append(f"{row:<{width}}{load:>8.4g}  {load / mean:>7.3f}  {size:>10}")
    return [*lines, total, f"largest load {cut.balance.unevenness:.4f} x mean"]


def cut_figures(cut: Cut) -> dict[str, Any]:
    """The same figures as JSON-serialisable values."""
    split = cut.balance.split
    return {
        "layout": cut.layout,
        "placement": list(split.placement),
        "layers": [len(stage.layers) for stage in split.stages],
        "loads": list(cut.balance.loads),
        "largest_over_mean": cut.balance.unevenness,
        "memory_bytes": list(cut.needs),
    }


def _timed(parts: Parts, study: Study) -> Parts:
    """Times proportional to forward FLOPs, scaled so that an average rank has the study's times."""
    everything = (parts.embedding, *parts.layers, *parts.prediction, parts.head)
    mean = sum(part.f for part in everything) / study.num_ranks

    def timed(part: ModelPart) -> ModelPart:
        f, b, w = (time * part.f / mean for time in study.times)
        return replace(part, f=f, b=b, w=w)

    return parts.each(timed)


def _with_times(parts: Parts, others: Parts) -> Parts:
    """The memory of `parts` with the times of `others`."""

    def joined(one: ModelPart, other: ModelPart) -> ModelPart:
        return replace(other, state=one.state, held=one.held)

    return parts.each(joined, others)


def _order(schedule: str | None, placement: tuple[int, ...], study: Study) -> str:
    """The fixed schedule used for memory and timing: the requested one, or a usual one."""
    if schedule is not None and schedule in SCHEDULES:
        if SCHEDULES[schedule].num_copies > 1:
            what = f"--balance cuts one copy of a model, {schedule} has two"
            raise ConfigError(Mistake(what, works=("dualpipe_v",)))
        return schedule
    for name in ("1f1b", "interleaved_1f1b", "looped_bfs", "zb_v"):
        known = SCHEDULES[name]
        takes = known.takes(study.num_ranks, study.num_microbatches, None)
        if takes and known.shape.fits(placement):
            return name
    return "gpipe"  # any placement


def _room(name: str, placement: tuple[int, ...], study: Study, memory: float) -> MemoryLimit:
    """The memory limit of a rank, with the microbatches in flight on each stage."""
    peaks = peak_in_flight(build_program(name, placement, study.num_microbatches))
    each = len(placement) // study.num_ranks
    return MemoryLimit(memory, tuple(peaks[rank] / each for rank in placement))
