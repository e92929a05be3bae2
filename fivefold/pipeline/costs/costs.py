"""Costs of a program's actions: time and memory per stage."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

from fivefold.errors import ConfigError
from fivefold.pipeline.ir import Act, Kind

SHORTEST, LONGEST = 1e-12, 1e12  # accepted range of given times, in any unit
APART = 1e6  # maximum ratio of the longest to the shortest time, given float64's 16 digits


def times_problem(times: Iterable[float]) -> str | None:
    """Why these times (some may be 0) cannot be simulated together; None if they can."""
    positive = [time for time in times if time != 0]
    for time in positive:
        if not SHORTEST <= time <= LONGEST:
            return f"{time:g} is not between {SHORTEST:g} and {LONGEST:g}"
    if positive and max(positive) > APART * min(positive):
        return f"{max(positive):g} is more than {APART:,.0f} times {min(positive):g}"
    return None


@dataclass(frozen=True)
class Costs:
    """Times of each stage, and of a message, in seconds or any other unit.

    Attributes:
        f: forward time of each stage; a recompute costs the same.
        b: dX time of each stage.
        w: dW time of each stage, all parts together; may be 0.
        hop: latency from the end of a producer to the arrival of its message on the next rank.
        fb: time of an overlapped pair, by forward stage and backward stage; None: the sum of its
            halves.
    """

    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hop: float = 0.0
    fb: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not isfinite(sum(self.f) + sum(self.b) + sum(self.w) + self.hop):
            raise ConfigError("stage costs must be finite, and so must their sum")
        if min(*self.f, *self.b) <= 0 or min(*self.w, self.hop) < 0:
            raise ConfigError("stage costs f and b must be positive, w and hop not negative")

    @classmethod
    def uniform(
        cls, num_stages: int, f: float = 1.0, b: float = 1.0, w: float = 1.0, hop: float = 0.0
    ) -> "Costs":
        """The same costs for every stage."""
        return cls((f,) * num_stages, (b,) * num_stages, (w,) * num_stages, hop)

    def of(self, act: Act, num_weight_parts: int = 1, num_slices: int = 1) -> float:
        """The time of a compute action; slices divide the time of their microbatch evenly."""
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
        return time / num_slices


@dataclass(frozen=True)
class Footprint:
    """Activation memory that a microbatch holds until its backward.

    Attributes:
        activations: memory of one microbatch on each stage, in bytes or any unit; None: 1 each.
        freed_by_b: share that B frees; W frees the rest, in equal parts.
    """

    activations: tuple[float, ...] | None = None
    freed_by_b: float = 0.0

    def size(self, stage: int) -> float:
        """Memory of one microbatch on a stage."""
        return 1.0 if self.activations is None else self.activations[stage]


ONE_EACH = Footprint()
"""Counts microbatches in flight, separately for each stage; W frees them."""
