"""Simulates a program: its step time, idle time by reason, and activation memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from statistics import median

from fivefold.pipeline.costs.costs import ONE_EACH, Costs, Footprint
from fivefold.pipeline.graph import Graph, dependency_graph
from fivefold.pipeline.ir import COMPUTE, Act, Kind, Message, Program


@dataclass(frozen=True, slots=True)
class Timed:
    """A compute action and when it runs."""

    act: Act
    start: float
    end: float


class Reason(StrEnum):
    """Why a rank is idle."""

    FILL = "fill"  # before its first action
    DRAIN = "drain"  # after its last action
    UPSTREAM = "late upstream"  # the rank that produces its input is not ready
    STREAM = "stream head-of-line"  # the message is ready, but queued behind another one
    IN_FLIGHT = "message in flight"
    READY = "ready, not started"  # only in measured times: the input is there


@dataclass(frozen=True, slots=True)
class Gap:
    """Idle time of a rank for one reason; a wait is split where the reason changes."""

    rank: int
    start: float
    end: float
    reason: Reason


@dataclass(frozen=True, slots=True)
class Step:
    """An element of the critical path: a compute action of a rank, or a message."""

    rank: int | None
    act: Act | None
    message: Message | None
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A program with simulated or measured times.

    Attributes:
        timeline: compute actions of each rank.
        makespan: time from the first start to the last end over all ranks: the time of a step that
            ends with a global operation, such as a gradient norm ("flush").
        span: the longest time from first start to last end of one rank, which zero-bubble papers
            report; at most the makespan.
    """

    timeline: tuple[tuple[Timed, ...], ...]
    makespan: float
    span: float
    _program: Program = field(repr=False)
    _graph: Graph = field(repr=False)
    _starts: tuple[float, ...] = field(repr=False)
    _ends: tuple[float, ...] = field(repr=False)

    @cached_property
    def peaks(self) -> tuple[float, ...]:
        """Maximum number of microbatches in flight on each rank, counted per stage (see
        `peak_in_flight`)."""
        return peak_in_flight(self._program)

    @property
    def busy(self) -> float:
        """Mean compute time per rank."""
        total = sum(timed.end - timed.start for row in self.timeline for timed in row)
        return total / len(self.timeline)

    @property
    def bubble(self) -> float:
        """Idle fraction of the makespan, 0 to 1."""
        return 1 - self.busy / self.makespan

    @property
    def span_bubble(self) -> float:
        """Idle fraction of the span, 0 to 1."""
        return 1 - self.busy / self.span

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All idle time, rank by rank; with the actions it adds up to ranks x makespan."""
        gaps: list[Gap] = []
        node = 0
        for rank, row in enumerate(self.timeline):
            clock, first = 0.0, True
            for timed in row:
                if first and timed.start > 0:
                    gaps.append(Gap(rank, 0.0, timed.start, Reason.FILL))
                elif timed.start > clock:
                    gaps += self._explained(rank, clock, timed.start, self._latest[node])
                clock, first = timed.end, False
                node += 1
            if clock < self.makespan:
                gaps.append(Gap(rank, clock, self.makespan, Reason.DRAIN))
        return tuple(gaps)

    @property
    def idle(self) -> dict[Reason, float]:
        """Idle time by reason, summed over the ranks."""
        total = dict.fromkeys(Reason, 0.0)
        for gap in self.gaps:
            total[gap.reason] += gap.end - gap.start
        return total

    @property
    def median_flight(self) -> float:
        """Median latency of the messages that take any time."""
        first = len(self._graph.computes)
        nodes = range(first, first + len(self._graph.messages))
        flights = [self._ends[node] - self._starts[node] for node in nodes]
        return median([time for time in flights if time > 0] or [0.0])

    @cached_property
    def critical_path(self) -> tuple[Step, ...]:
        """A chain of actions and messages without slack, as long as the makespan."""
        node, path = max(range(len(self._ends)), key=self._ends.__getitem__), []
        while node >= 0:
            path.append(self._step(node))
            node = self._latest[node]
        return tuple(reversed(path))

    @cached_property
    def _latest(self) -> list[int]:
        """For each node, its dependency that ends last; -1 if it has none.

        On ties, the dependency on another rank, which explains more than the previous action.
        """
        latest = [-1] * len(self._ends)
        for node, successors in enumerate(self._graph.successors):
            for successor in successors:
                before = latest[successor]
                if before < 0 or self._ends[node] >= self._ends[before]:
                    latest[successor] = node
        return latest

    def _explained(self, rank: int, start: float, end: float, cause: int) -> Iterator[Gap]:
        """The wait for node `cause`, split by reason."""
        marks = [(Reason.READY, end)]
        if self._graph.is_message(cause):
            producer = self._graph.producers[cause - len(self._graph.computes)]
            marks = [
                (Reason.UPSTREAM, self._ends[producer]),
                (Reason.STREAM, self._starts[cause]),
                (Reason.IN_FLIGHT, end),
            ]
        for reason, mark in marks:
            if mark > start:
                yield Gap(rank, start, mark, reason)
                start = mark

    def _step(self, node: int) -> Step:
        times = (self._starts[node], self._ends[node])
        computes, messages = self._graph.computes, self._graph.messages
        if node < len(computes):
            return Step(*computes[node], None, *times)
        return Step(None, None, messages[node - len(computes)], *times)


def simulate(program: Program, costs: Costs, *, one_stream: bool = False) -> Simulation:
    """Simulate a valid program.

    A BW takes b + w, and its dX is sent at its end; simulate `lowering.eager_dx(program)` to send
    dX after b.

    Args:
        program: compute-only or lowered.
        costs: costs of each stage.
        one_stream: whether all messages of a rank of a lowered program wait for each other, in the
            order in which it issues them.

    Raises:
        ProgramError: a circular wait.
    """
    graph = dependency_graph(program, one_stream=one_stream)
    return _simulation(program, graph, *graph.longest_paths(graph.weights(program, costs)))


def replay(program: Program, times: Sequence[Sequence[tuple[float, float]]]) -> Simulation:
    """A program with its measured times.

    A message is assumed to be sent when its producer ends, and to be in flight for as long as the
    rank that needs it has nothing else to do.

    Args:
        program: compute-only.
        times: (start, end) of each rank's compute actions in order; the first start is 0.
    """
    graph = dependency_graph(program)
    of_acts = [pair for row in times for pair in row]
    starts, ends = ([pair[i] for pair in of_acts] for i in (0, 1))
    free = [before[1] for row in times for before in ((0.0, 0.0), *row[:-1])]
    for node, producer in enumerate(graph.producers, len(of_acts)):
        made = ends[producer]
        consumer = graph.successors[node][0]
        starts.append(made)
        ends.append(max(made, starts[consumer]) if made > free[consumer] else made)
    return _simulation(program, graph, starts, ends)


def _simulation(
    program: Program, graph: Graph, starts: Sequence[float], ends: Sequence[float]
) -> Simulation:
    rows: list[list[Timed]] = [[] for _ in program.ranks]
    for node, (rank, act) in enumerate(graph.computes):
        rows[rank].append(Timed(act, starts[node], ends[node]))
    return Simulation(
        tuple(tuple(row) for row in rows),
        max((row[-1].end for row in rows if row), default=0.0),
        max((row[-1].end - row[0].start for row in rows if row), default=0.0),
        program,
        graph,
        tuple(starts),
        tuple(ends),
    )


def peak_in_flight(program: Program, footprint: Footprint = ONE_EACH) -> tuple[float, ...]:
    """Peak activation memory of each rank; the program may be compute-only or lowered."""
    peaks = []
    for rank in range(program.num_ranks):
        held = peak = 0.0
        for taken, freed in _holdings(program, rank, footprint):
            held += taken
            peak = max(peak, held)
            held -= freed
        peaks.append(peak)
    return tuple(peaks)


def memory_curve(
    program: Program, simulation: Simulation, footprint: Footprint = ONE_EACH
) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each rank, the activation memory after every change.

    Args:
        program: simulated program.
        simulation: its simulation.
        footprint: activation memory of a microbatch on each stage.

    Returns:
        (time, held) of every change, in order of time.
    """
    curves = []
    for rank, row in enumerate(simulation.timeline):
        held, points = 0.0, [(0.0, 0.0)]
        changes = _holdings(program, rank, footprint)
        for timed, (taken, freed) in zip(row, changes, strict=True):
            for time, change in ((timed.start, taken), (timed.end, -freed)):
                if change:
                    held += change
                    points.append((time, held))
        curves.append(tuple(points))
    return tuple(curves)


def _holdings(program: Program, rank: int, footprint: Footprint) -> Iterator[tuple[float, float]]:
    """Memory that each compute action of a rank takes at its start and frees at its end.

    A forward that is recomputed takes nothing; its R takes all.
    """
    acts = program.ranks[rank]
    recomputed = {act.piece for act in acts if act.kind is Kind.R}
    for act in acts:
        if act.kind not in COMPUTE:
            continue
        taken = freed = 0.0
        for kid in () if program.forward_only else act.elementary:
            size = footprint.size(kid.stage) / program.num_slices
            match kid.kind:
                case Kind.F:
                    again = kid.piece in recomputed
                    taken += 0.0 if again else size
                case Kind.R:
                    taken += size
                case Kind.BW:
                    freed += size
                case Kind.B:
                    freed += footprint.freed_by_b * size
                case Kind.W:
                    freed += (1 - footprint.freed_by_b) * size / program.num_weight_parts
        yield taken, freed
