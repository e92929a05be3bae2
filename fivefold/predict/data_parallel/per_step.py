"""Predicts data-parallel communication once a step: gathers before first forwards, reductions after
last backwards.

Both have times of their own within the pipeline program, so that they are hidden only where ranks
would wait anyway: making an action shorter never makes a step longer.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from fivefold.config.parallel import ParallelConfig
from fivefold.config.sharding import Sharding
from fivefold.hardware import Gpu
from fivefold.predict.data_parallel.transfers import StageTransfers
from fivefold.predict.times.compute import V, greater, lesser, overlapped

UNKNOWN = 1e9  # seconds of an update that hides what it may


@dataclass(frozen=True)
class StepTransfers:
    """Communication once a step, in seconds for each stage of a program.

    Attributes:
        placement: rank of each stage.
        ready: seconds from the start of the step until its first forward can begin.
        gathers: seconds by which that forward is longer than others.
        reductions: seconds of the reductions of its gradients.
        last_messages: seconds of the last of these messages.
        overlaps: whether reductions overlap the last backward of their stage; otherwise they begin
            when all backwards of the rank have ended.
        slowdown: share of the overlapped time that this backward loses.
    """

    placement: tuple[int, ...]
    ready: tuple[float, ...]
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    last_messages: tuple[float, ...]
    overlaps: bool
    slowdown: float

    def arrived(self, starts: Sequence[float], ends: Sequence[float]) -> float:
        """When all reductions have arrived.

        The reductions of a rank's stages run one after the other, the last message of each after
        the backward.

        Args:
            starts: start of each stage's last computation of weight gradients.
            ends: when it ends.
        """
        order = sorted(range(len(self.placement)), key=ends.__getitem__)
        free = {self.placement[stage]: 0.0 if self.overlaps else ends[stage] for stage in order}
        for stage in order:
            rank, moved, alone = (
                self.placement[stage],
                self.reductions[stage],
                self.last_messages[stage],
            )
            free[rank] += moved
            if self.overlaps:
                own = arrival(starts[stage], ends[stage], moved, alone, self.slowdown)
                free[rank] = max(free[rank], own)
        return max(free.values())


def arrival(start: V, end: V, moved: V, alone: V, slowdown: float) -> V:
    """Time in seconds at which reductions arrive that overlap the backward from `start` to `end`:
    they take `moved` seconds, and their last message starts only after the backward."""
    return greater(start + moved, end + alone) + slowdown * lesser(end - start, moved - alone)


def delays(
    gpu: Gpu, parallel: ParallelConfig, gathered: V, forward: V, layers: V, update: float
) -> tuple[V, V]:
    """Exposed seconds of gathering a stage's parameters: of its first layer, which the update may
    hide, and of its other layers, which the first forward may hide.

    `gathered`: seconds to gather all; `forward`, `update`: seconds of these; `layers`: at least 1.
    """
    first = gathered / layers
    hides = parallel.overlap_param_gather_with_optimizer_step * update * (1 - 1 / layers)
    return overlapped(gpu, hides, first), overlapped(gpu, forward, gathered - first)


def hides_gathers(parallel: ParallelConfig) -> bool:
    """Whether anything hides gathers that are made once a step."""
    return parallel.overlap_param_gather or parallel.overlap_param_gather_with_optimizer_step


def step_transfers(
    gpu: Gpu,
    parallel: ParallelConfig,
    sharding: Sharding,
    stages: Sequence[tuple[StageTransfers, float, int]],
    placement: tuple[int, ...],
    update: float,
    by_block: bool,
) -> StepTransfers:
    """Communication once a step: none for ZeRO-3, only weights for ZeRO-2.

    Args:
        gpu: the GPU.
        parallel: the settings of overlap.
        sharding: the strategy by which the software communicates.
        stages: transfers, seconds of the first forward, and number of layers of each stage of the
            model.
        placement: rank of each stage of the program, those of a second copy of the model last.
        update: seconds of the optimizer's update; `UNKNOWN` where only a bound is asked for.
        by_block: as in `Software.gathers_by_block`.
    """
    copies = len(placement) // len(stages)
    ready, gathers = [0.0] * len(placement), [0.0] * len(placement)
    if not sharding.splits_parameters:
        ready, gathers = _gathered(gpu, parallel, stages, placement, update, by_block)
    reductions = [0.0 if sharding.splits_gradients else moves.reduced for moves, *_ in stages]
    last = [
        sent / (moves.messages or 1) for sent, (moves, *_) in zip(reductions, stages, strict=True)
    ]
    return StepTransfers(
        placement,
        tuple(ready),
        tuple(gathers),
        tuple(reductions * copies),
        tuple(last * copies),
        parallel.overlap_grad_reduce,
        gpu.overlap_slowdown,
    )


def _gathered(
    gpu: Gpu,
    parallel: ParallelConfig,
    stages: Sequence[tuple[StageTransfers, float, int]],
    placement: Sequence[int],
    update: float,
    by_block: bool,
) -> tuple[list[float], list[float]]:
    """When the first forward of each stage can begin, and by how much gathers lengthen it.

    A rank gathers its stages' parameters one stage's after the other's, from the start of the step
    on, while it waits for its first microbatch, or already beside the update. By block, only those
    of a stage's first layer travel so early, and those of each other layer beside the layer before.
    """
    alone = by_block and not parallel.overlap_param_gather_with_optimizer_step
    ready, gathers = [0.0] * len(placement), [0.0] * len(placement)
    sent = defaultdict[int, float](float)
    for stage in sorted(range(len(placement)), key=lambda stage: stage % len(stages)):
        (moves, forward, layers), rank = stages[stage % len(stages)], placement[stage]
        layers = layers or 1
        first, rest = delays(gpu, parallel, moves.gathered, forward, layers, update)
        ready[stage] = sent[rank] + first + (0.0 if alone else rest)
        gathers[stage] = rest if alone else 0.0
        sent[rank] += first if alone and parallel.overlap_param_gather else moves.gathered
    if hides_gathers(parallel):
        return ready, gathers
    return [sent[rank] for rank in placement], [0.0] * len(placement)  # before anything else
