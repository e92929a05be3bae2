"""A predicted step time: its parts, its uncertainty, and what makes it more uncertain."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.hardware import GPUS
from fivefold.layout import Layout
from fivefold.pipeline.costs.costs import Costs
from fivefold.pipeline.simulate import Simulation, simulate
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software

# Half-widths of the 80 % interval for a publisher that was never seen, as logarithms: from the
# errors of published runs, by publisher (python -m benchmarks.intervals).
_INTERVAL = {"dense": 0.161, "narrow": 0.108, "experts": 0.326}
_FITTED = frozenset(
    {"A100-80", "H100", "H100-96", "H800", "H200", "B200", "B300", "GB200", "GB300"}
)
_SEEN_GPUS = 16384  # GPUs of the largest published run
SEEN_SCHEDULES = frozenset({"1f1b", "interleaved_1f1b", "combined_1f1b", "dualpipe"})
"""The schedules of published runs."""


@dataclass(frozen=True)
class TimePart:
    """A part of the step time: its name, and its length in seconds."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step time of a layout.

    Attributes:
        layout: the layout whose step time is predicted.
        cluster: the hardware it runs on.
        software: the framework's kernels and habits.
        costs: times of the pipeline actions, in seconds.
        step_time: predicted time of one step, in seconds.
        low: lower end of the 80 % interval of the step time, in seconds.
        high: upper end of the 80 % interval of the step time, in seconds.
        parts: parts of the step time, in seconds, which add up to `step_time`.
        model_flops: model FLOPs of a step, forward and backward: causal attention counts half,
            of documents where their length is given, and recomputation not at all; see
            `description.shape`.
        notes: ways in which the layout lies outside of what the planner was fitted on.
    """

    layout: Layout
    cluster: Cluster
    software: Software
    costs: Costs
    step_time: float
    low: float
    high: float
    parts: tuple[TimePart, ...]
    model_flops: float
    notes: tuple[str, ...]

    @property
    def losses(self) -> list[TimePart]:
        """The parts of the step beyond the ideal time."""
        return [part for part in self.parts if part.name != "ideal"]

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Tokens of the global batch, divided by the step time and the number of GPUs."""
        tokens = self.layout.config.training.step_tokens
        return tokens / self.step_time / self.layout.grid.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs of a step, divided by the GPUs' peak in the precision they multiply in."""
        peak = self.cluster.gpu.peak.of(self.layout.config.product_precision)
        return self.model_flops / (self.step_time * self.layout.grid.world_size * peak)

    @cached_property
    def simulation(self) -> Simulation:
        """An event-by-event simulation of the whole pipeline program."""
        program = self.layout.program(
            eager=sends_dx_early(self.layout, self.software),
            costs=self.costs,
        )
        return simulate(program, self.costs)


def sends_dx_early(layout: Layout, software: Software) -> bool:
    """Whether a dX that is not in a pair is sent before its dW is computed."""
    return layout.sends_dx_first if software.eager_dx is None else software.eager_dx


def interval(layout: Layout, notes: Sequence[str]) -> float:
    """Half-width of the 80 % interval, as a logarithm; half as wide again if there are notes."""
    return _INTERVAL[_kind(layout)] * (1.5 if notes else 1.0)


def _kind(layout: Layout) -> str:
    """The kind of published runs that the layout belongs to."""
    if layout.config.model.num_experts:
        return "experts"
    return "narrow" if layout.config.narrow_products else "dense"


def unusual(layout: Layout, cluster: Cluster) -> Iterator[str]:
    """The ways in which a layout differs from the published runs that were fitted."""
    gpu, grid = cluster.gpu, layout.grid
    if GPUS.get(gpu.name) == gpu and gpu.name not in _FITTED:
        yield f"no run on {gpu.name} was fitted: its kernels are taken to be like others"
    if grid.world_size > _SEEN_GPUS:
        yield f"{grid.world_size:,} GPUs are more than the {_SEEN_GPUS:,} of any published run"
    if grid.pp > 1 and layout.schedule not in SEEN_SCHEDULES:
        yield f"no published run used {layout.schedule}"
    if grid.ep * grid.etp > cluster.gpus_per_node:
        yield "experts are spread over nodes, where published runs differ most"
    if layout.config.training.fp4_format:
        yield "few runs with 4-bit multiplications were published"
