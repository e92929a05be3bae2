"""What the acts of a program cost: time and memory, per stage."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from fivefold.errors import ConfigError
from fivefold.pipeline.ir import Act, Kind

SHORTEST, LONGEST = 1e-12, 1e12  # times that are given, in whatever unit
APART = 1e6  # times the shortest that the longest may take: a clock has some 16 digits


def times_problem(times: Iterable[float]) -> str | None:
    """Why times, of which some may be 0, cannot be put on one clock; None: they can."""
    positive = [time for time in times if time != 0]
    for time in positive:
        if not SHORTEST <= time <= LONGEST:
            return f"{time:g} is not between {SHORTEST:g} and {LONGEST:g}"
    if positive and max(positive) > APART * min(positive):
        return f"{max(positive):g} is more than {APART:,.0f} times {min(positive):g}"
    return None


@dataclass(frozen=True)
class Costs:
    """Seconds (or any one unit) of each stage, and of a hop.

    Attributes:
        f: forward of each stage; a recompute costs the same.
        b: dX of each stage.
        w: dW of each stage, all parts together; may be zero.
        hop: time from the end of a producer to the arrival of its message on the next rank.
        fb: an overlapped pair, by the stage of its forward and of its backward; None: a pair takes
            the sum of its halves.
        scale: scale of each microbatch, by which all its costs are multiplied; None: 1 each.
    """

    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hop: float = 0.0
    fb: tuple[tuple[float, ...], ...] | None = None
    scale: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isfinite(sum(self.f) + sum(self.b) + sum(self.w) + self.hop):
            raise ConfigError("stage costs must be finite, and so must their sum")
        if min(*self.f, *self.b) <= 0 or min(*self.w, self.hop) < 0:
            raise ConfigError("stage costs f and b must be positive, w and hop not negative")
        if min(self.scale or (1.0,)) <= 0:
            raise ConfigError("microbatch scales must be positive")

    @classmethod
    def uniform(
        cls, num_stages: int, f: float = 1.0, b: float = 1.0, w: float = 1.0, hop: float = 0.0
    ) -> "Costs":
        """The same costs for every stage."""
        return cls((f,) * num_stages, (b,) * num_stages, (w,) * num_stages, hop)

    def of(self, act: Act, num_weight_parts: int = 1, num_slices: int = 1) -> float:
        """The time of a compute act; slices share the time of their microbatch."""
        if act.kids:
            forward, backward = act.kids
            if self.fb is None:
                return sum(self.of(kid, num_weight_parts, num_slices) for kid in act.kids)
            time = self.fb[forward.stage][backward.stage]
        elif act.kind is Kind.F or act.kind is Kind.R:
            time = self.f[act.stage]
        elif act.kind is Kind.B:
            time = self.b[act.stage]
        elif act.kind is Kind.BW:
            time = self.b[act.stage] + self.w[act.stage]
        else:
            time = self.w[act.stage] / num_weight_parts
        scale = 1.0 if self.scale is None else self.scale[act.mb]
        return time * scale / num_slices


@dataclass(frozen=True)
class Footprint:
    """What a microbatch holds for backward.

    Attributes:
        activations: activations of each stage (bytes, say); 1 each when None.
        freed_by_b: the share that B frees; W frees the rest, in equal parts.
    """

    activations: tuple[float, ...] | None = None
    freed_by_b: float = 0.0

    def size(self, stage: int) -> float:
        """What one microbatch of a stage holds."""
        return 1.0 if self.activations is None else self.activations[stage]


ONE_EACH = Footprint()
"""Counts the microbatches in flight, each stage for itself; W frees."""
