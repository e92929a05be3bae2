"""The optimizer and the scheduler of a file for DeepSpeed, in settings."""

from collections.abc import Mapping
from math import isclose
from types import MappingProxyType

from fivefold.config.deepspeed_job.file import DeepSpeedJob
from fivefold.config.translation import Named
from fivefold.errors import shown

_ADAM = ("adam", "adamw", "fusedadam", "muadam", "muadamw")
_SCHEDULERS = ("warmuplr", "warmupdecaylr", "warmupcosinelr")
LEAST_WARM_UP = 2  # steps; its schedulers take no fewer
_OPEN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "optimizer.params.lr": ("lr", "min_lr", "lr_warmup_init"),
        "scheduler.params.warmup_max_lr": ("lr", "lr_warmup_init"),
        "scheduler.params.warmup_num_steps": ("lr_warmup_iters", "lr_warmup_init"),
        "scheduler.params.warmup_min_lr": ("min_lr", "lr_warmup_init"),
    }
)
"""Field that DeepSpeed fills in ('auto') -> settings that are then unknown."""


def of_rates(job: DeepSpeedJob, lost: list[str]) -> Named:
    """The optimizer, its rates and its weight decay."""
    params = "optimizer.params"
    kind, lr = job.word("optimizer.type"), job.number(f"{params}.lr", 1e-3)
    if not kind:
        lost.append("its optimizer is code there: --lr and the others are the recipe's to set")
    elif kind == "muon":
        yield "optimizer", "muon"
        yield "muon_scale_mode", "shape_scaling"
        yield from job.setting("muon_momentum", f"{params}.momentum", 0.95)
        lr = job.number(f"{params}.muon_lr", lr)
    elif kind not in _ADAM:
        lost.append(f"optimizer.type = {kind}: AdamW here")
    if kind:
        yield from _of_adam(job, params, lost)
    rates = dict(_of_scheduler(job, lr, bool(kind), lost))
    unknown = {name for path in job.left_open for name in _OPEN.get(path, ())}
    yield from ((name, value) for name, value in rates.items() if name not in unknown)


def _of_adam(job: DeepSpeedJob, params: str, lost: list[str]) -> Named:
    path = f"{params}.betas"
    betas = job.get(path) or [0.9, 0.999]
    if not isinstance(betas, list) or len(betas) != 2:
        job.mistakes.add(f"{path} cannot be {shown(betas)}: they are two numbers")
    elif path not in job.left_open:
        yield from zip(("adam_beta1", "adam_beta2"), betas, strict=True)
    yield from job.setting("adam_eps", f"{params}.eps", 1e-8)
    yield from job.setting("weight_decay", f"{params}.weight_decay", 0.0)
    decay = job.number(f"{params}.weight_decay", 0.0)
    if decay and not job.flag(f"{params}.adam_w_mode", True):
        lost.append(f"{params}.adam_w_mode is off: decay is AdamW's here, not a part of gradients")
    if decay:
        lost.append(
            "which weights decay is code there, and all by default: here biases and norms do not"
        )
    if not job.flag(f"{params}.bias_correction", True):
        lost.append(f"{params}.bias_correction is off: moments are corrected here")
    if job.flag(f"{params}.amsgrad"):
        lost.append(f"{params}.amsgrad: AdamW without it here")


def _of_scheduler(job: DeepSpeedJob, lr: float, known: bool, lost: list[str]) -> Named:
    """Warm-up and decay.

    Step s of its schedulers has the index s + `last_batch_iteration`, by default s - 1, and the
    rate of the first step is the optimizer's, unless that is the default.
    """
    kind, params = job.word("scheduler.type"), "scheduler.params"
    if kind not in _SCHEDULERS:
        yield "lr_decay_style", "constant"
        if known:
            yield "lr", lr
        lost.append("how many steps it takes is code there (train_iters)")
        lost.append(
            f"scheduler.type = {kind}: a constant rate here"
            if kind
            else "its scheduler, if there is one, is code there: a constant rate here"
        )
        return
    ahead = begun = job.number(f"{params}.last_batch_iteration", -1)
    warm_up = max(LEAST_WARM_UP, job.number(f"{params}.warmup_num_steps", 1000))
    total = job.number(f"{params}.total_num_steps", 0)
    if kind == "warmupcosinelr":
        peak, begins = lr, lr * job.number(f"{params}.warmup_min_ratio", 0.0)
        yield "lr_decay_style", "cosine"
        yield "min_lr", lr * job.number(f"{params}.cos_min_ratio", 1e-4)
        ahead += 1  # its cosine is a step ahead of its count
    else:
        usual = lr if kind == "warmuplr" else 1e-3
        peak = job.number(f"{params}.warmup_max_lr", usual)
        begins = job.number(f"{params}.warmup_min_lr", 0.0)
        yield "lr_decay_style", "constant" if kind == "warmuplr" else "linear"
        if kind == "warmupdecaylr":
            yield "min_lr", begins
    yield "lr", peak
    left = max(warm_up - ahead, 0)
    yield "lr_warmup_iters", left
    first = peak - (peak - begins) * min(left / warm_up, 1.0)
    if left:
        yield "lr_warmup_init", first
        if job.word(f"{params}.warmup_type") != "linear":
            lost.append("its warm-up grows by the logarithm of the step, and linearly here")
        elif begun < 0 or kind == "warmupcosinelr":
            lost.append("its warm-up begins a step later than here")
    if begun >= 0 and not isclose(first, lr):
        lost.append(f"its first step has the optimizer's rate, {lr:g}")
    if ahead > warm_up and kind != "warmuplr":
        lost.append(
            f"it begins within its decay (last_batch_iteration = {begun}), and here with it"
        )
    if total and kind != "warmuplr":
        yield "train_iters", total - max(ahead, 0)
        if ahead < 0:
            yield "lr_decay_iters", total - ahead
    else:
        lost.append("how many steps it takes is code there (train_iters)")
