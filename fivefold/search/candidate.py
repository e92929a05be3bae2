"""The evaluation of one layout: its memory, whether it fits, and its step time."""

from dataclasses import dataclass
from functools import cached_property

from fivefold.layout import Layout
from fivefold.predict.memory.peak import MemoryPrediction, peak_memory
from fivefold.predict.prediction import Prediction
from fivefold.predict.step import predict_all
from fivefold.predict.times.layer import TimesCache
from fivefold.search.proven import unproven
from fivefold.search.request import Request

AMPLE = 0.85  # share of the memory below which saving more is no advantage
STEP = 0.05  # share of the memory by which predicted peaks are off


@dataclass(frozen=True)
class Candidate:
    """A layout with its predicted memory and time.

    Attributes:
        layout: the layout.
        memory: predicted memory of each pipeline rank.
        prediction: predicted step time; None if the layout does not fit and was not timed.
        bound: lower bound on the step time in seconds; the predicted time itself if the layout was
            not part of the enumeration.
    """

    layout: Layout
    memory: MemoryPrediction
    prediction: Prediction | None
    bound: float

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step, or their lower bound if the layout was not timed."""
        return self.bound if self.prediction is None else self.prediction.step_time

    @property
    def predicted(self) -> Prediction:
        """The predicted step of a layout that was timed; every layout that fits was."""
        assert self.prediction is not None
        return self.prediction

    @property
    def mesh(self) -> tuple[int, ...]:
        """Degrees of parallelism (tp, cp, pp, ep, etp) by which layouts are grouped."""
        grid = self.layout.grid
        return (grid.tp, grid.cp, grid.pp, grid.ep, grid.etp)

    def preference(self, room: float) -> tuple[int, int, tuple[int, ...]]:
        """Sort key among equally fast layouts, lower is better: shortage of free memory, number of
        settings that no published run had, complexity.

        Args:
            room: bytes that a layout may allocate on one device.
        """
        crowded = max(0.0, self.memory.max_allocated / room - AMPLE)
        return round(crowded / STEP), unproven(self.layout), self.complexity

    @cached_property
    def complexity(self) -> tuple[int, ...]:
        """A measure of how many techniques the layout uses; on ties, the lower one is preferred."""
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
    layout: Layout,
    *,
    always: bool = False,
    times_cache: TimesCache | None = None,
) -> Candidate:
    """Predict the memory and the time of one layout.

    Args:
        request: the model, the cluster and the settings to plan for.
        layout: the layout.
        always: whether to predict the time even if the layout does not fit.
        times_cache: times to share with other layouts, as `LayerTimes` takes them.
    """
    memory = peak_memory(layout, request.cluster)
    if not always and not memory.fits:
        return Candidate(layout, memory, None, 0.0)
    (prediction,) = predict_all([layout], request.cluster, times_cache=times_cache)
    return Candidate(layout, memory, prediction, prediction.step_time)
