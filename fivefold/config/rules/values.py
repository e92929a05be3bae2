"""Checks the ranges of single settings."""

from math import gcd
from typing import Any

from fivefold.config.config import SECTION_SETTINGS, Config
from fivefold.config.records import CheckpointConfig
from fivefold.config.training import OptimizerConfig, TrainingConfig
from fivefold.errors import Mistakes

_OF_THE_RATE = {
    *("train_iters", "train_samples", "lr", "min_lr", "lr_decay_iters", "lr_decay_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_init"),
}


def check_ranges(section: str, values: Any, mistakes: Mistakes) -> set[str]:
    """Collect settings of a section that are out of range; return their names."""
    found = set()
    for setting in _RANGES[section]:
        if wrong := setting.beyond(getattr(values, setting.name)):
            mistakes.add(f"{setting.name} {wrong}")
            found.add(setting.name)
    return found


_RANGES = {
    section: [setting for setting in settings if setting.within]
    for section, settings in SECTION_SETTINGS.items()
}


def check_values(config: Config, mistakes: Mistakes) -> None:
    """Collect settings that are out of range, and pairs that contradict each other.

    The model is left to `check_model`.
    """
    out_of_range = set[str]()
    for section, values in config.sections():
        if section != "model":
            out_of_range |= check_ranges(section, values, mistakes)
    if not out_of_range & _OF_THE_RATE:
        _check_rate(config, mistakes)
    if not out_of_range & {"initial_loss_scale", "min_loss_scale"}:
        _check_loss_scale(config.optimizer, mistakes)
    if "global_batch_size" not in out_of_range:
        _check_ramp(config.training, mistakes)
    _check_retained(config.checkpoint, mistakes)


def _check_retained(checkpoint: CheckpointConfig, mistakes: Mistakes) -> None:
    """Collect reasons why there are no checkpoints at the multiples that are to stay."""
    retain, every = checkpoint.save_retain_interval, checkpoint.save_interval
    if retain is None or (every and retain % every == 0):
        return
    interval = "auto" if every is None else every
    mistakes.add(
        f"save_retain_interval {retain} is no multiple of save_interval, which is {interval}",
        "checkpoints of its multiples stay, and there would be none, or only some",
        works=[
            f"--save-interval {retain}",
            *([f"--save-retain-interval {-(-retain // every) * every}"] if every else []),
        ],
    )


def _check_ramp(training: TrainingConfig, mistakes: Mistakes) -> None:
    """Collect what is wrong with a growing batch in itself."""
    ramp, full, off = training.rampup_batch_size, training.global_batch_size, "--rampup-batch-size"
    if not ramp:
        return
    if len(ramp) != 3 or min(ramp) < 1:
        mistakes.add(
            f"rampup_batch_size has three numbers from 1 up, not {' '.join(map(str, ramp))}",
            "the first batch, what is added to it again and again, and the samples that this takes",
            works=[f"{off} none"],
        )
        return
    start, increment, samples = ramp
    if start >= full:
        mistakes.add(
            f"rampup_batch_size begins with {start}, which is not below global_batch_size {full}",
            works=[f"{off} none", f"--global-batch-size {start + increment}"],
        )
    elif (full - start) % increment:
        growth = full - start
        mistakes.add(
            f"rampup_batch_size does not reach global_batch_size {full} from {start} by "
            f"{increment} at a time",
            f"({full} - {start}) / {increment} = {growth / increment:.4g}",
            works=[
                f"{off} {start} {gcd(growth, increment)} {samples}",
                f"--global-batch-size {start + -(-growth // increment) * increment}",
            ],
        )


def _check_loss_scale(optimizer: OptimizerConfig, mistakes: Mistakes) -> None:
    first, least = optimizer.initial_loss_scale, optimizer.min_loss_scale
    if first < least:
        mistakes.add(
            f"initial_loss_scale {first:g} is below min_loss_scale {least:g}",
            works=[f"--initial-loss-scale {least:g}", f"--min-loss-scale {first:g}"],
        )


def _check_rate(config: Config, mistakes: Mistakes) -> None:
    """Collect settings of the learning rate that contradict each other."""
    optimizer, training = config.optimizer, config.training
    if optimizer.min_lr > optimizer.lr:
        mistakes.add(
            f"min_lr {optimizer.min_lr} exceeds lr {optimizer.lr}",
            works=[f"--min-lr {optimizer.lr}"],
        )
    ends = optimizer.of_ends
    if ends is not optimizer and ends.min_lr > ends.lr:
        mistakes.add(
            f"decoupled_lr {ends.lr} is below the rate that its decay ends at, {ends.min_lr}",
            works=[f"--decoupled-min-lr {ends.lr}"],
        )
    _check_growing_decay(optimizer, mistakes)
    if optimizer.lr_warmup_init > optimizer.lr:
        mistakes.add(
            f"lr_warmup_init {optimizer.lr_warmup_init} exceeds lr {optimizer.lr}",
            works=[f"--lr-warmup-init {optimizer.lr}"],
        )
    kind = training.counted_in
    warmup, end, last = optimizer.durations(training)
    if optimizer.lr_decay_style != "constant" and warmup >= end:
        own = config.value(f"lr_decay_{kind}") is not None
        mistakes.add(
            f"lr_warmup_{kind} {warmup} leaves nothing to decay before "
            f"{'step' if kind == 'iters' else 'sample'} {end}, which is "
            f"{'lr_decay' if own else 'train'}_{kind}",
            "a short run has a shorter warm-up, or is the beginning of a longer decay",
            works=[f"--lr-warmup-{kind} {end // 10}", f"--lr-decay-{kind} {10 * warmup}"],
        )
    if optimizer.lr_decay_style == "WSD" and last is None:
        mistakes.add(
            f"lr_decay_style WSD needs lr_wsd_decay_{kind}, the length of the final decay",
            works=[f"--lr-wsd-decay-{kind} {max(end // 10, 1)}"],
        )


def _check_growing_decay(optimizer: OptimizerConfig, mistakes: Mistakes) -> None:
    """Collect mistakes of a growing weight decay."""
    style, ends = optimizer.weight_decay_incr_style, ("start_weight_decay", "end_weight_decay")
    first, last = (getattr(optimizer, name) for name in ends)
    if style == "constant":
        return
    for name, value, other in zip(ends, (first, last), (0.0, optimizer.weight_decay), strict=True):
        if value is None:
            mistakes.add(
                f"weight_decay_incr_style {style} needs {name}",
                works=[f"--{name.replace('_', '-')} {other}"],
            )
    if first is not None and last is not None and first > last:
        mistakes.add(
            f"start_weight_decay {first} exceeds end_weight_decay {last}",
            works=[f"--end-weight-decay {first}"],
        )
