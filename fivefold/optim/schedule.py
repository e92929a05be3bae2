"""Learning rates and weight decay as functions of the step, with Megatron-LM's semantics."""

import math
from typing import NamedTuple

from fivefold.config.training import OptimizerConfig, TrainingConfig


class StepRates(NamedTuple):
    """Learning rates and weight decay of one step.

    Attributes:
        lr: learning rate of the layers.
        of_ends: learning rate of the embedding and of the output layer.
        decay: weight decay of all that decays.
    """

    lr: float
    of_ends: float
    decay: float


def rates(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> StepRates:
    """The rates of the optimizer step that follows `step` completed ones."""
    return StepRates(
        learning_rate(step, optimizer, training),
        learning_rate(step, optimizer.of_ends, training),
        weight_decay(step, optimizer, training),
    )


def weight_decay(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Weight decay of the optimizer step that follows `step` completed ones.

    It grows over the whole run, in samples where the run counts them
    (`OptimizerParamScheduler.get_wd` of Megatron-LM).
    """
    first, last = optimizer.start_weight_decay, optimizer.end_weight_decay
    if first is None or last is None:
        return optimizer.weight_decay
    done = step / training.train_iters
    if training.train_samples is not None:
        done = training.batch_sizes.samples(step) / training.train_samples
    done = min(done, 1.0)
    if optimizer.weight_decay_incr_style == "cosine":
        done = 0.5 * (math.cos(math.pi * (1.0 - done)) + 1.0)
    return first + (last - first) * done


def learning_rate(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Learning rate of the optimizer step that follows `step` completed ones.

    Linear warm-up from `lr_warmup_init` to `lr` over `lr_warmup_iters`, then decay to `min_lr`
    until `lr_decay_iters` (default: `train_iters`), then `min_lr`; with `train_samples` all of
    these are counted in samples. As in Megatron-LM (`OptimizerParamScheduler.get_lr`), the first
    step of a warm-up runs at `lr_warmup_init`, and a constant rate never falls to `min_lr`.
    """
    peak, floor = optimizer.lr, optimizer.min_lr
    warmup, end, last = optimizer.durations(training)
    done = step if training.train_samples is None else training.batch_sizes.samples(step)
    if warmup > 0 and done <= warmup:
        return optimizer.lr_warmup_init + (peak - optimizer.lr_warmup_init) * done / warmup
    if optimizer.lr_decay_style == "constant":
        return peak
    if optimizer.lr_decay_style == "inverse-square-root" and done <= end:
        return max(floor, peak * math.sqrt(max(warmup, 1) / max(done, 1)))
    if done >= end:
        return floor
    if optimizer.lr_decay_style == "WSD":
        assert last is not None, "check_values asks for it"
        start, style = end - last, str(optimizer.lr_wsd_decay_style)
    else:
        start, style = warmup, optimizer.lr_decay_style
    if done <= start:
        return peak
    return floor + (peak - floor) * _remaining((done - start) / (end - start), style)


def _remaining(progress: float, style: str) -> float:
    """Fraction of the decay that remains: 1 at `progress` 0, 0 at 1."""
    match style:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (math.cos(math.pi * progress) + 1.0)
        case "exponential":
            return 2.0 * 0.5**progress - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(progress)
    raise ValueError(style)
