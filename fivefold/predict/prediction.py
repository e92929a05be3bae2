"""What is predicted of a step, how sure that is, and what makes it less so."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fivefold.hardware import GPUS
from fivefold.layout import Layout
from fivefold.pipeline.costs import Costs
from fivefold.pipeline.lowering import lower
from fivefold.pipeline.sharding import with_sharding_actions
from fivefold.pipeline.simulate import Simulation, simulate
from fivefold.predict.cluster import Cluster
from fivefold.predict.software import Software

# Half-widths of the 80 % interval, as logarithms: of the published rows of a kind, four in five lie
# within them (fivefold plan --score). Dense bf16 rows are the oldest and most varied.
_INTERVAL = {"dense": 0.12, "narrow": 0.08, "experts": 0.26}
_FITTED = frozenset(
    {"A100-80", "H100", "H100-96", "H800", "H200", "B200", "B300", "GB200", "GB300"}
)
_SEEN_GPUS = 16384  # of the largest published run
_SEEN_SCHEDULES = ("1f1b", "interleaved_1f1b")


@dataclass(frozen=True)
class TimePart:
    """A part of the step's time and what it is."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a layout.

    Attributes:
        layout: layout that is estimated.
        cluster: cluster that runs it.
        software: software that runs it.
        costs: costs of the pipeline program's acts, in seconds.
        step_time: seconds of a step.
        low: and `high`: the step takes between them with a probability of 80 %.
        parts: the waterfall: seconds that add up to step_time.
        model_flops: model FLOPs of a step, forward and backward: causal attention counts half,
            nothing is added for recomputation (`model.shape`).
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
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_second_per_gpu(self) -> float:
        """Of the global batch, over the step and all GPUs."""
        training = self.layout.config.training
        tokens = training.global_batch_size * training.seq_length
        return tokens / self.step_time / self.layout.grid.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the GPUs could do at the peak of the precision they multiply in."""
        peak = self.cluster.gpu.peak.of(precision_of(self.layout))
        return self.model_flops / (self.step_time * self.layout.grid.world_size * peak)

    @cached_property
    def simulation(self) -> Simulation:
        """The whole program, event by event."""
        layout = self.layout
        eager = sends_dx_early(layout, self.software)
        program = layout.order().executed(pairs=layout.overlaps_pairs, eager=eager)
        return simulate(with_sharding_actions(lower(program, self.costs)), self.costs)


def precision_of(layout: Layout) -> str:
    """In which most multiplications run."""
    training = layout.config.training
    return "fp4" if training.fp4_format else "fp8" if training.fp8_format else training.precision


def sends_dx_early(layout: Layout, software: Software) -> bool:
    """Whether a dX that is not in a pair leaves before its dW is computed."""
    return layout.defers_weights if software.eager_dx is None else software.eager_dx


def interval(layout: Layout, notes: Sequence[str]) -> float:
    """Half-width of the interval of 80 %, as a logarithm; wider if there is something to note."""
    return _INTERVAL[_kind(layout)] * (1.5 if notes else 1.0)


def _kind(layout: Layout) -> str:
    """Which published rows a layout is like."""
    if layout.config.model.num_experts:
        return "experts"
    return "narrow" if precision_of(layout) in ("fp8", "fp4") else "dense"


def unusual(layout: Layout, cluster: Cluster) -> Iterator[str]:
    """In what a layout lies outside of the published runs that the constants were fitted on."""
    gpu, grid = cluster.gpu, layout.grid
    if GPUS.get(gpu.name) == gpu and gpu.name not in _FITTED:
        yield f"no run on {gpu.name} was fitted: its kernels are taken to be like others"
    if grid.world_size > _SEEN_GPUS:
        yield f"{grid.world_size:,} GPUs are more than the {_SEEN_GPUS:,} of any published run"
    if grid.pp > 1 and layout.schedule not in _SEEN_SCHEDULES:
        yield f"no published run used {layout.schedule}"
    if grid.ep * grid.etp > cluster.gpus_per_node:
        yield "experts are spread over nodes, where published runs differ most"
    if layout.config.training.fp4_format:
        yield "few runs with 4-bit multiplications were published"
