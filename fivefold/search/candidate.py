"""One layout, looked at closely: what memory it needs, whether it fits, and what it takes."""

from dataclasses import dataclass
from functools import cached_property

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.layout import Layout
from fivefold.predict.layer import Blocks
from fivefold.predict.memory import MemoryPrediction, peak_memory
from fivefold.predict.prediction import Prediction
from fivefold.predict.step import predict_all
from fivefold.search.request import Request


@dataclass(frozen=True)
class Candidate:
    """A layout that was looked at closely.

    Attributes:
        layout: layout that is estimated.
        memory: what each pipeline rank needs.
        prediction: its time; None: it does not fit, and was not timed.
        bound: seconds that it takes at least; for layouts that were not enumerated, its time.
    """

    layout: Layout
    memory: MemoryPrediction
    prediction: Prediction | None
    bound: float

    @property
    def seconds(self) -> float:
        """Of a step, or at least."""
        return self.bound if self.prediction is None else self.prediction.step_time

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees by which layouts are told apart."""
        grid = self.layout.grid
        return (grid.tp, grid.cp, grid.pp, grid.ep, grid.etp)

    @cached_property
    def complexity(self) -> tuple[int, ...]:
        """What has to be understood and to work; less is preferred among equals."""
        grid, parallel = self.layout.grid, self.layout.config.parallel
        memory = self.layout.config.memory
        plain = self.layout.schedule in ("1f1b", "interleaved_1f1b")
        techniques = (
            sum(size > 1 for size in (grid.tp, grid.cp, grid.pp, grid.etp)),
            not plain,
            memory.recompute_granularity is not None,
            memory.recompute_in_flight_limit is not None,
            memory.fine_grained_activation_offloading,
            parallel.num_distributed_optimizer_instances > 1,
            parallel.pipeline_model_parallel_layout is not None,
        )
        degrees = (grid.tp * grid.cp * grid.pp, self.layout.split.num_virtual)
        return (sum(map(int, techniques)), *degrees)


def evaluate(
    request: Request,
    config: Config,
    *,
    always: bool = False,
    layout: Layout | None = None,
    blocks: Blocks | None = None,
) -> Candidate:
    """A close look at one layout.

    Args:
        request: where it would run.
        config: configuration of the layout.
        always: predict its time even if it does not fit.
        layout: what `config` means, if that is known.
        blocks: as `LayerTimes` shares them.

    Raises:
        ConfigError: it is not legal.
    """
    layout = layout or check(config, request.world, planned=True)
    memory = peak_memory(layout, request.cluster)
    if not always and not memory.fits:
        return Candidate(layout, memory, None, 0.0)
    (prediction,) = predict_all([layout], request.cluster, blocks=blocks)
    return Candidate(layout, memory, prediction, prediction.step_time)


def capacity(request: Request) -> float:
    """Bytes that a layout may allocate on a device."""
    return request.cluster.gpu.memory_bytes - request.cluster.reserved_bytes
