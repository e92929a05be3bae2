"""The optimizer of a job of torchtitan and its rates, in settings."""

from collections.abc import Iterator, Mapping
from math import inf, isinf
from types import MappingProxyType

from fivefold.config.torchtitan_job.job import TitanJob
from fivefold.config.translation import Named

DECAYS: Mapping[str, str] = MappingProxyType(
    {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
)
"""Shape of torchtitan's decay -> its name here."""


def of_optimizer(job: TitanJob, lost: list[str]) -> Named:
    """The optimizer, clipping, and the rate of each step."""
    name = job.choice("optimizer.name", "AdamW", "Adam")
    lr = job.number("optimizer.lr", 8e-4)
    yield "lr", lr
    yield "adam_beta1", job.number("optimizer.beta1", 0.9)
    yield "adam_beta2", job.number("optimizer.beta2", 0.95)
    yield "adam_eps", job.number("optimizer.eps", 1e-8)
    decay = job.number("optimizer.weight_decay", 0.1)
    yield "weight_decay", decay
    if decay:
        lost.append("its weight decay falls on norms and biases, too: here they have none")
    if decay and name == "Adam":
        lost.append("optimizer.name = Adam: decay is AdamW's here, not a part of gradients")
    at_once = job.flag("optimizer.early_step_in_backward")
    if at_once:
        lost.append("optimizer.early_step_in_backward: weights are updated after the backward here")
    most = job.get("training.max_norm")
    most = inf if isinstance(most, float) and isinf(most) else job.number("training.max_norm", 1.0)
    if most <= 0:
        job.mistakes.add(
            f"training.max_norm = {most}: it makes all gradients 0 there",
            works=["training.max_norm = inf, which clips none"],
        )
    yield "clip_grad", 0.0 if isinf(most) else most
    yield from _of_rates(job, lr, lost)


def _of_rates(job: TitanJob, lr: float, lost: list[str]) -> Iterator[tuple[str, object]]:
    """A warm-up to the rate, a stable phase, and a decay over the last steps.

    torchtitan's warm-up is one step ahead: its first step has a share of the rate, and the last one
    the whole, which is one step before the decay begins.
    """
    steps = job.count("training.steps") or 1
    yield "train_iters", steps
    total = job.count("lr_scheduler.total_steps") if job.get("lr_scheduler.total_steps") else steps
    total = total or steps
    warm_up = min(max(job.number("lr_scheduler.warmup_steps", 200), 0), total)
    length = total - warm_up
    if job.get("lr_scheduler.decay_ratio") is not None:
        ratio = job.number("lr_scheduler.decay_ratio", 0.0)
        if not 0 <= ratio <= 1:
            job.mistakes.add(f"lr_scheduler.decay_ratio = {ratio}: it is in 0 .. 1")
        length = min(round(total * min(max(ratio, 0.0), 1.0)), length)
    shape = job.choice("lr_scheduler.decay_type", *DECAYS)
    factor = job.number("lr_scheduler.min_lr_factor", 0.0)
    if warm_up > 1:
        yield "lr_warmup_iters", warm_up - 1
        yield "lr_warmup_init", lr / warm_up
    if length == 0:
        yield "lr_decay_style", "constant"
        return
    yield "min_lr", factor * lr
    if total != steps:
        yield "lr_decay_iters", total
    if total < steps:
        lost.append(
            f"lr_scheduler.total_steps = {total}: there the rate goes on beyond the end of its "
            "decay, and here it stays at min_lr"
        )
    if length == total and shape != "sqrt":
        yield "lr_decay_style", shape
        return
    yield "lr_decay_style", "WSD"
    yield "lr_wsd_decay_iters", length
    yield "lr_wsd_decay_style", DECAYS[shape]
