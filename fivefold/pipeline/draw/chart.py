"""Common data of all pipeline drawings: a program, the times of its actions, and its memory."""

from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase

from fivefold import pages
from fivefold.pipeline.costs.costs import ONE_EACH, Footprint
from fivefold.pipeline.ir import Act, Kind, Program
from fivefold.pipeline.simulate import Simulation, memory_curve, peak_in_flight
from fivefold.units import human_seconds

MEANINGS = {
    Kind.F: "forward",
    Kind.B: "backward to the input (dX)",
    Kind.W: "backward to the weights (dW)",
    Kind.BW: "backward, dX and dW in one",
    Kind.R: "recomputed forward",
    Kind.FB: "a forward and a backward, overlapped",
}

# Per kind: colour on a rank's first stage, colour on its other stages.
COLOURS = {
    Kind.F: (pages.FORWARD, pages.FORWARD_LIGHT),
    Kind.B: (pages.DX, pages.DX_LIGHT),
    Kind.BW: (pages.DX_AND_DW, pages.DX_AND_DW_LIGHT),
    Kind.W: (pages.DW, pages.DW_LIGHT),
    Kind.R: (pages.RECOMPUTED, pages.RECOMPUTED_LIGHT),
}
HELD_MEANING = "held for backward"
ORDINALS = ("first", "second", "third")


@dataclass(frozen=True)
class Chart:
    """A program with simulated or measured times.

    Attributes:
        title: one-line description.
        program: program whose actions are shown.
        simulation: times of the actions.
        footprint: activation memory of a microbatch on each stage.
        unit: unit of time: "s" if measured, else empty.
    """

    title: str
    program: Program
    simulation: Simulation
    footprint: Footprint = ONE_EACH
    unit: str = ""

    def said(self, time: float) -> str:
        """A time of the whole picture in words: of measured ones with a fitting unit."""
        return human_seconds(time) if self.unit else f"{time:.6g}"

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Peak activation memory of each rank, in the units of the footprint."""
        return peak_in_flight(self.program, self.footprint)

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """For each rank, (time, held): activation memory held from that time on."""
        return memory_curve(self.program, self.simulation, self.footprint)

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of compute actions that occur, in the order of `Kind`."""
        found = {timed.act.kind for row in self.simulation.timeline for timed in row}
        return tuple(kind for kind in Kind if kind in found)

    @cached_property
    def parts(self) -> tuple[Kind, ...]:
        """The kinds that occur, with an overlapped pair split into its two actions."""
        acts = (timed.act for row in self.simulation.timeline for timed in row)
        found = {kid.kind for act in acts for kid in act.elementary}
        return tuple(kind for kind in Kind if kind in found)

    @cached_property
    def has_chunks(self) -> bool:
        """Whether a rank holds several stages."""
        return self.program.num_stages > self.program.num_ranks

    @cached_property
    def _chunks(self) -> dict[int, int]:
        return {
            stage: chunk
            for rank in range(self.program.num_ranks)
            for chunk, stage in enumerate(self.program.stages_of(rank))
        }

    def ticks(self, most: float) -> list[float]:
        """Round times from 0 to the makespan, about `most` of them at most."""
        step = next(
            base * 10.0**power
            for power in range(-15, 99)
            for base in (1, 2, 5)
            if base * 10.0**power * most >= self.simulation.makespan
        )
        return [step * i for i in range(int(self.simulation.makespan / step + 1e-9) + 1)]

    def chunk(self, act: Act) -> int:
        """Index of an action's stage among the rank's stages; for a pair, the forward's stage."""
        return self._chunks[act.elementary[0].stage]

    def place(self, act: Act) -> str:
        """Microbatch, stage letter and slice of an action: '3', '3b', '3.1'."""
        letter = ascii_lowercase[self._chunks[act.stage] % 26] if self.has_chunks else ""
        piece = f".{act.slice}" if self.program.num_slices > 1 else ""
        return f"{act.mb}{letter}{piece}"

    def label(self, act: Act) -> str:
        """Kind and place of an action: 'F3', 'B3b', 'F3a&B1b'."""
        return "&".join(f"{kid.kind[0]}{self.place(kid)}" for kid in act.elementary)

    @property
    def figures(self) -> str:
        """The main figures in one line."""
        simulation = self.simulation
        return (
            f"makespan {self.said(simulation.makespan)}, bubble {simulation.bubble:.2%}; "
            f"span {self.said(simulation.span)}, bubble {simulation.span_bubble:.2%}; "
            f"at most {max(self.peaks):.3g} microbatches held"
        )

    @property
    def note(self) -> str:
        """What lighter shades mean; empty if there are none."""
        return "lighter: a rank's later stages" if self.has_chunks else ""

    @property
    def legend(self) -> str:
        """What the labels mean, in one line for first-time readers."""
        words = dict(MEANINGS)
        if {Kind.B, Kind.BW} <= set(self.kinds):
            words[Kind.B] = "backward: dX, and dW too unless a W follows"
            del words[Kind.BW]  # its letter is the same
        parts = [
            f"{'F&B' if kind is Kind.FB else kind[0]} {word}"
            for kind, word in words.items()
            if kind in self.kinds
        ]
        number = "number = microbatch"
        if self.has_chunks:
            count = max(self._chunks.values()) + 1
            names = ORDINALS[:count]
            letters, more = ascii_lowercase[: len(names)], ", ..." if count > len(names) else ""
            number += f", {' '.join(letters)} = {', '.join(names)}{more} stage of the rank"
        if self.program.num_slices > 1:
            number += ", .0 .1 = slice of the sequence"
        return "; ".join([*parts, number])
