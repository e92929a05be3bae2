"""How long a program takes, and how much it holds."""

from dataclasses import dataclass

from fivefold.errors import ConfigError
from fivefold.pipeline.graph import Stream, dependency_graph
from fivefold.pipeline.ir import Act, Kind, Program


@dataclass(frozen=True)
class Costs:
    """Seconds (or any one unit) of each stage, and of a hop.

    Attributes:
        f: forward of each stage; a recompute costs the same.
        b: dX of each stage.
        w: dW of each stage, all parts together; may be zero.
        hop: from the end of a producer to the arrival of its message on the next rank.
    """

    f: tuple[float, ...]
    b: tuple[float, ...]
    w: tuple[float, ...]
    hop: float = 0.0

    def __post_init__(self) -> None:
        if min(*self.f, *self.b) <= 0 or min(*self.w, self.hop) < 0:
            raise ConfigError("stage costs f and b must be positive, w and hop not negative")

    @classmethod
    def uniform(
        cls, num_stages: int, f: float = 1.0, b: float = 1.0, w: float = 1.0, hop: float = 0.0
    ) -> "Costs":
        """The same costs for every stage."""
        return cls((f,) * num_stages, (b,) * num_stages, (w,) * num_stages, hop)

    def of(self, act: Act, num_weight_parts: int = 1) -> float:
        """The time of a compute act; an FB takes the sum of its halves."""
        if act.kids:
            return sum(self.of(kid, num_weight_parts) for kid in act.kids)
        if act.kind is Kind.F or act.kind is Kind.R:
            return self.f[act.stage]
        if act.kind is Kind.B:
            return self.b[act.stage]
        if act.kind is Kind.BW:
            return self.b[act.stage] + self.w[act.stage]
        return self.w[act.stage] / num_weight_parts


@dataclass(frozen=True, slots=True)
class Timed:
    """A compute act and when it runs."""

    act: Act
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A program run against the clock.

    Attributes:
        timeline: the compute acts of each rank.
        makespan: from the first start to the last end over all ranks: the time of a step that ends
            with something global, such as a gradient norm ("flush").
        span: the longest time between the first start and the last end of one rank, the measure
            in which zero-bubble papers report; never more than the makespan.
        peaks: microbatches in flight on each rank at most, counted by stage (see
            `peak_in_flight`).
    """

    timeline: tuple[tuple[Timed, ...], ...]
    makespan: float
    span: float
    peaks: tuple[float, ...]

    @property
    def busy(self) -> float:
        """Mean compute time of a rank."""
        total = sum(timed.end - timed.start for row in self.timeline for timed in row)
        return total / len(self.timeline)

    @property
    def bubble(self) -> float:
        """Idle share of the makespan, 0 to 1."""
        return 1 - self.busy / self.makespan

    @property
    def span_bubble(self) -> float:
        """Idle share of the span, 0 to 1."""
        return 1 - self.busy / self.span


def simulate(program: Program, costs: Costs, stream: Stream | None = None) -> Simulation:
    """Run a valid program against the clock.

    A BW takes b + w, and its dX leaves at its end; simulate `lowering.eager_dx(program)` for a dX
    that leaves after b.

    Args:
        program: compute-only or lowered.
        costs: one entry a stage.
        stream: None: messages never wait for each other. Otherwise the program must be lowered,
            and messages that share a stream follow one another in the order of issue.

    Raises:
        ProgramError: a circular wait.
    """
    graph = dependency_graph(program, stream)
    weights = [costs.of(act, program.num_weight_parts) for _, act in graph.computes]
    starts, ends = graph.longest_paths(weights + [costs.hop] * len(graph.messages))
    rows: list[list[Timed]] = [[] for _ in program.ranks]
    for node, (rank, act) in enumerate(graph.computes):
        rows[rank].append(Timed(act, starts[node], ends[node]))
    return Simulation(
        tuple(tuple(row) for row in rows),
        max(row[-1].end for row in rows),
        max(row[-1].end - row[0].start for row in rows),
        peak_in_flight(program),
    )


def peak_in_flight(
    program: Program,
    activations: tuple[float, ...] | None = None,
    freed_by_b: float = 0.0,
) -> tuple[float, ...]:
    """The most that each rank holds for backward at any time.

    Args:
        program: compute-only or lowered.
        activations: what one microbatch of each stage holds (bytes, say); 1 each when None.
        freed_by_b: the share that B frees; W frees the rest, in equal parts.
    """
    peaks = []
    for acts in program.ranks:
        held = peak = 0.0
        for kid in (kid for act in acts for kid in act.elementary):
            size = 1.0 if activations is None else activations[kid.stage]
            size /= program.num_slices
            if kid.kind is Kind.F and not program.forward_only:
                held += size
            elif kid.kind is Kind.BW:
                held -= size
            elif kid.kind is Kind.B:
                held -= freed_by_b * size
            elif kid.kind is Kind.W:
                held -= (1 - freed_by_b) * size / program.num_weight_parts
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)
