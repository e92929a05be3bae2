"""Seconds of a stage by what they are spent on, to be added up."""

from dataclasses import dataclass, fields

from fivefold.predict.compute import Phases

_NOTHING = Phases()


def _plus(a: Phases, b: Phases) -> Phases:
    """The sum, which is often one of the two."""
    return a if b is _NOTHING else b if a is _NOTHING else a + b


@dataclass(frozen=True)
class Times:
    """Seconds by cause: computation, its repetition, and communication that nothing hides.

    `offload` is the part of copies to the host's memory and back that nothing hides.
    """

    compute: Phases = _NOTHING
    recompute: Phases = _NOTHING
    tp: Phases = _NOTHING
    cp: Phases = _NOTHING
    ep: Phases = _NOTHING
    dp: Phases = _NOTHING
    offload: Phases = _NOTHING

    def __add__(self, other: "Times") -> "Times":
        # Written out: a search adds them some hundred thousand times, most of them nothing.
        return Times(
            _plus(self.compute, other.compute),
            _plus(self.recompute, other.recompute),
            _plus(self.tp, other.tp),
            _plus(self.cp, other.cp),
            _plus(self.ep, other.ep),
            _plus(self.dp, other.dp),
            _plus(self.offload, other.offload),
        )

    def __mul__(self, count: float) -> "Times":
        return Times(*(getattr(self, f.name) * count for f in fields(self)))

    @property
    def work(self) -> Phases:
        """Computation, first or again."""
        return _plus(self.compute, self.recompute)

    @property
    def total(self) -> Phases:
        """All causes together."""
        communication = (self.tp, self.cp, self.ep, self.dp)
        causes = (self.compute, self.recompute, *communication, self.offload)
        return Phases(
            sum(cause.forward for cause in causes),
            sum(cause.dx for cause in causes),
            sum(cause.dw for cause in causes),
        )


def repeated(times: Times) -> Times:
    """The forward again, in the backward: its communication counts where it belongs."""

    def again(phases: Phases) -> Phases:
        return Phases(0.0, phases.forward)

    return Times(
        recompute=again(times.compute),
        tp=again(times.tp),
        cp=again(times.cp),
        ep=again(times.ep),
    )
