"""Stage costs estimated from FLOPs, for schedules that are made before anything is measured."""

from collections.abc import Sequence
from functools import lru_cache

from fivefold.config.model import ModelConfig
from fivefold.description.shape import StageParts, forward_flops
from fivefold.pipeline.costs.costs import Costs, Footprint
from fivefold.pipeline.ir import Program
from fivefold.pipeline.list_scheduler import Problem
from fivefold.pipeline.synthesise import synthesise

_HOP = 0.02  # latency, as a share of a rank's mean forward; 0 would give schedules without slack
_LEAST = 1e-3  # share of a mean stage that an empty stage takes in time and memory


def modelled_problem(
    model: ModelConfig,
    seq_length: int,
    stages: Sequence[StageParts],
    placement: tuple[int, ...],
    num_microbatches: int,
    limit: float | None,
) -> Problem:
    """The scheduling problem of a model's stages.

    F takes its FLOPs; B those of linear layers once and of attention twice; W those of linear
    layers once. The unit is a rank's mean forward.

    Args:
        model: the architecture.
        seq_length: tokens per sequence.
        stages: contents of each stage.
        placement: stage -> rank.
        num_microbatches: microbatches per step.
        limit: activations that a rank may hold, in microbatches of 1/P of the layers; None: P,
            which is what 1F1B's first rank holds.

    Raises:
        ConfigError: not even one microbatch fits.
    """
    ranks = max(placement) + 1
    flops = [forward_flops(model, seq_length, parts) for parts in stages]
    mean = sum(each.total for each in flops) / ranks
    least = _LEAST * mean

    def times(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(max(value, least) / mean for value in values)

    costs = Costs(
        times([each.total for each in flops]),
        times([each.dx for each in flops]),
        times([each.matmul for each in flops]),
        _HOP,
    )
    share = ranks / sum(len(parts.layers) for parts in stages)
    held = tuple(max(share * len(parts.layers), _LEAST) for parts in stages)
    most = float(ranks) if limit is None else limit
    return Problem(placement, num_microbatches, costs, most, Footprint(held))


@lru_cache(maxsize=32)
def searched_program(problem: Problem) -> Program:
    """The program synthesised for a problem; the same on every rank."""
    return synthesise(problem).program
