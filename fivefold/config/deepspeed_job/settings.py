"""Translates DeepSpeed's settings.

Settings without a counterpart are named, never dropped silently. The model and the training loop,
which are code in DeepSpeed, come from elsewhere: the model from its name; the rest is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Any

from fivefold.config.deepspeed_job.file import DeepSpeedJob
from fivefold.config.deepspeed_job.harmless import is_harmless
from fivefold.config.deepspeed_job.rates import of_rates
from fivefold.config.job_settings import Left
from fivefold.config.sharding import SHARDING
from fivefold.config.translation import Named, Translation, fitting
from fivefold.errors import shown

TRAINER = "DeepSpeed"
_DEGREES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tensor_model_parallel_size": ("tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
        "context_parallel_size": ("sequence_parallel_size",),
        "pipeline_model_parallel_size": ("pipeline.stages",),
    }
)
"""What leaves the ranks of a job for data parallelism, and where a file says it."""
_MOST_POWER = 127  # of a number in fp32
_BF16 = ("bf16", "bfp16", "bfloat16", "torch.bfloat16")
_FP32 = ("", "fp32", "float32", "float", "torch.float32")
_CODE = (
    "the loop that trains is code there: seq_length, seed, data_path and tokenizer_model are the "
    "recipe's to set",
    "how the loss is averaged is code there: here every token of the global batch weighs the same",
)
_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "activation_checkpointing": "what is recomputed is code there; --recompute-granularity "
        "full recomputes all layers",
        "torch_autocast": "--bf16 computes in bf16, with weights in fp32 beside",
        "elasticity": "--max-restarts starts again, --layout auto on other numbers of ranks",
    }
)


_ZERO = "zero_optimization"


def translate(job: DeepSpeedJob, ranks: int | None = None) -> Translation:
    """The settings of a job, without its model.

    Args:
        job: its file.
        ranks: number of its ranks; None: not known, unless the file tells.

    Raises:
        ConfigError: settings are of the wrong kind, or contradict each other.
    """
    lost = [*_CODE]
    degrees = dict(_of_degrees(job))
    batches = dict(_of_batches(job, prod(degrees.values()), ranks))
    ranks = batches.pop("ranks", ranks)
    degrees |= {name: batches[name] for name in degrees if name in batches}
    named = (
        *{**batches, **degrees}.items(),
        *_of_formats(job, lost),
        *_of_sharding(job, prod(degrees.values()), ranks, lost),
        *_of_offloading(job, lost),
        *of_rates(job, lost),
        *_of_the_rest(job, lost),
    )
    values = fitting(named, job.mistakes)
    unread = job.unread()
    harmless = tuple(left.path for left in unread if left.off or is_harmless(left.path))
    lost += _without_counterpart([left for left in unread if left.path not in harmless])
    steps = job.get("gradient_accumulation_steps")
    if steps not in (None, 1) and "global_batch_size" not in values:
        lost.append(f"gradient_accumulation_steps = {shown(steps)}: of a batch that code makes")
    lost += [f"{path} is left open, for the Trainer's arguments" for path in job.left_open]
    job.mistakes.raise_if_any()
    return Translation(TRAINER, values, tuple(lost), harmless, ranks)


def _of_degrees(job: DeepSpeedJob) -> Iterator[tuple[str, int]]:
    for name, paths in _DEGREES.items():
        yield name, max(job.number(path, 1) or 1 for path in paths)


def _of_batches(job: DeepSpeedJob, split: int, ranks: int | None) -> Iterator[tuple[str, int]]:
    """The batch, the microbatch and the number of microbatches: two of them give the third, with
    the ranks.

    What of the ranks is left then are stages of a pipeline, which are code.
    """
    batch, micro = job.count("train_batch_size"), job.count("train_micro_batch_size_per_gpu")
    steps, dp = job.count("gradient_accumulation_steps"), job.count("data_parallel_size")
    if dp is None and batch and micro and steps:
        if batch % (micro * steps):
            job.mistakes.add(
                f"train_batch_size = {batch} is not a multiple of train_micro_batch_size_per_gpu = "
                f"{micro} x gradient_accumulation_steps = {steps}",
                f"{batch} / ({micro} x {steps}) = {batch / (micro * steps):.4g} data-parallel "
                "ranks (must be whole)",
            )
            return
        dp = batch // (micro * steps)
    if dp is None and ranks is not None:
        dp = max(ranks // split, 1)
    if bool(batch) != bool(micro):
        if dp is None:
            missing = "train_micro_batch_size_per_gpu" if batch else "train_batch_size"
            job.mistakes.add(
                f"{missing} is not in the file, and needs the number of ranks", works=["--nproc N"]
            )
            return
        each = (steps or 1) * dp
        batch, micro = batch or (micro or 1) * each, micro or (batch or 1) // each
    if batch is not None and micro is not None:
        steps = steps or batch // max(micro * (dp or 1), 1)
        if dp is not None and batch != micro * steps * dp:
            job.mistakes.add(
                f"train_batch_size = {batch} is not train_micro_batch_size_per_gpu = {micro} x "
                f"gradient_accumulation_steps = {steps} x {dp} data-parallel ranks = "
                f"{micro * steps * dp}"
            )
        yield "global_batch_size", batch
        yield "micro_batch_size", micro
    if dp is None:
        return
    stages, rest = divmod(dp * split if ranks is None else ranks, dp * split)
    if rest or not stages or (stages > 1 and job.get("pipeline.stages") is not None):
        job.mistakes.add(
            f"{ranks} ranks are not {dp} data-parallel ranks x tp x cp x pp = {dp * split}"
        )
    elif stages > 1:
        yield "pipeline_model_parallel_size", stages
    yield "ranks", dp * split * max(stages, 1)


def _of_formats(job: DeepSpeedJob, lost: list[str]) -> Named:
    """The number of bits in which it computes, accumulates and sends."""
    wide = {name for name in ("bf16", "fp16") if job.flag(f"{name}.enabled")}
    if len(wide) > 1:
        job.mistakes.add("bf16 and fp16 are both enabled")
    precision = next(iter(sorted(wide)), "fp32")
    yield "precision", precision
    if precision == "fp16":
        yield from _of_loss_scale(job, lost)
    for name in ("bf16", "fp16"):
        if job.flag(f"{name}.{name}_master_weights_and_grads") and precision == name:
            lost.append(
                f"{name}_master_weights_and_grads: masters are fp32 here, but for bf16 by "
                "--use-precision-aware-optimizer --main-params-dtype bf16"
            )
    wire = job.word("communication_data_type") or precision
    quantised = job.get(f"{_ZERO}.stage") == 3 and job.flag(f"{_ZERO}.zero_quantized_gradients")
    yield "grad_reduce_in_bf16", precision != "fp32" and wire in _BF16 and not quantised
    if wire not in (*_BF16, *_FP32):
        lost.append(f"gradients are sent in {wire} there, and in fp32 here")
    if (kind := job.word("data_types.grad_accum_dtype")) not in _FP32:
        lost.append(f"data_types.grad_accum_dtype = {kind}: gradients are added up in fp32 here")


def _of_loss_scale(job: DeepSpeedJob, lost: list[str]) -> Named:
    if constant := job.number("fp16.loss_scale", 0.0):
        yield "loss_scale", constant
        return
    power = job.number("fp16.initial_scale_power", 16)
    if 0 <= power <= _MOST_POWER:
        yield "initial_loss_scale", 2.0**power
    else:
        job.mistakes.add(f"fp16.initial_scale_power cannot be {power}: 0 to {_MOST_POWER}")
    yield from job.setting("loss_scale_window", "fp16.loss_scale_window", 1000)
    yield from job.setting("hysteresis", "fp16.hysteresis", 2)
    yield from job.setting("min_loss_scale", "fp16.min_loss_scale", 1.0)
    if job.flag("fp16.consecutive_hysteresis"):
        lost.append("fp16.consecutive_hysteresis: hysteresis begins anew with the window here")


def _of_sharding(job: DeepSpeedJob, split: int, ranks: int | None, lost: list[str]) -> Named:
    stage = job.number(f"{_ZERO}.stage", 0)
    of_stage = {kind.zero_stage: name for name, kind in SHARDING.items()}
    if stage not in of_stage:
        job.mistakes.add(f"{_ZERO}.stage cannot be {stage}", works=map(str, sorted(of_stage)))
        return
    yield "data_parallel_sharding_strategy", of_stage[stage]
    overlaps = job.flag(f"{_ZERO}.overlap_comm", stage == 3)
    if stage:
        yield "overlap_grad_reduce", overlaps
    if stage == 3:
        yield "overlap_param_gather", job.number(f"{_ZERO}.stage3_prefetch_bucket_size", 1) > 0
        names = ("zero_quantized_weights", "zero_quantized_gradients")
        yield from ((name, job.flag(f"{_ZERO}.{name}")) for name in names)
        yield "zero_hpz_partition_size", job.number(f"{_ZERO}.zero_hpz_partition_size", 1) or 1
        part = job.count(f"{_ZERO}.mics_shard_size")
        if part and ranks and ranks % (split * part) == 0:
            yield "num_distributed_optimizer_instances", ranks // split // part
        elif part:
            lost.append(
                f"{_ZERO}.mics_shard_size = {part}: --num-distributed-optimizer-instances, with "
                f"groups of {part} ranks"
            )


def _of_offloading(job: DeepSpeedJob, lost: list[str]) -> Named:
    """States and weights in host memory or on a disk, if they can be moved here, too."""
    stage = job.number(f"{_ZERO}.stage", 0)
    of_state = {
        "DeepSpeed moves none without ZeRO": not stage,
        "Muon, which needs whole matrices, keeps its state on the device": (
            job.word("optimizer.type") == "muon"
        ),
    }
    moved = _offloaded(job, "optimizer", "cpu_offload", of_state, lost)
    yield from moved.items()
    if moved and stage == 3:
        ratio = job.number(f"{_ZERO}.offload_optimizer.ratio", 1.0)
        yield "optimizer_offload_fraction", ratio
    of_weights = {
        "DeepSpeed moves none without ZeRO-3": stage != 3,
        "weights follow the optimizer's state, with offload_optimizer": not moved,
        "zero_hpz_partition_size keeps a second copy of the weights on the device": (
            stage == 3 and job.number(f"{_ZERO}.zero_hpz_partition_size", 1) > 1
        ),
    }
    yield from _offloaded(job, "param", "cpu_offload_param", of_weights, lost).items()


def _offloaded(
    job: DeepSpeedJob, what: str, older: str, stays: Mapping[str, bool], lost: list[str]
) -> dict[str, Any]:
    """Settings that move an optimizer's state, or weights; none if a reason not to holds, which is
    reported."""
    path = f"{_ZERO}.offload_{what}"
    device = job.word(f"{path}.device") or ("cpu" if job.flag(f"{_ZERO}.{older}") else "none")
    if device not in ("none", "cpu", "nvme"):
        job.mistakes.add(f"{path}.device cannot be {shown(device)}", works=["none", "cpu", "nvme"])
    if device not in ("cpu", "nvme"):
        return {}
    if why := next((reason for reason, holds in stays.items() if holds), ""):
        lost.append(f"{path}.device = {device}: {why}")
        return {}
    moved: dict[str, Any] = {f"{what}_cpu_offload": True}
    if device == "nvme":
        moved[f"{what}_offload_path"] = job.get(f"{path}.nvme_path")
    return moved


def _of_the_rest(job: DeepSpeedJob, lost: list[str]) -> Named:
    """Settings that go with degrees; recomputation, clipping and reports."""
    if job.flag("tensor_parallel.tp_overlap_comm"):
        lost.append("tensor_parallel.tp_overlap_comm: --tp-comm-overlap, with --sequence-parallel")
    if job.number("sequence_parallel_size", 1) > 1:
        yield "cp_comm_type", ["a2a"]
    yield "expert_model_parallel_size", job.number("expert_parallel.autoep_size", 1)
    if layers := job.number("pipeline.activation_checkpoint_interval", 0):
        yield "recompute_granularity", "full"
        yield "recompute_num_layers", [layers]
    if (cut := job.word("pipeline.partition") or "best") not in ("best", "uniform"):
        lost.append(f"pipeline.partition = {cut}: --pipeline-model-parallel-layout cuts stages")
    yield from job.setting("clip_grad", "gradient_clipping", 0.0)
    if job.word("gradient_allreduce_op") not in ("", "mean"):
        lost.append("gradient_allreduce_op: the loss is a mean over all tokens here")
    yield "tensorboard", job.flag("tensorboard.enabled")
    if job.flag("wandb.enabled"):
        yield "wandb_project", job.get("wandb.project") or "deepspeed"


def _without_counterpart(unread: Sequence[Left]) -> Iterator[str]:
    """A sentence for each section of the file that has no counterpart."""
    for section, found in groupby(unread, key=lambda left: left.path.partition(".")[0]):
        said = [f"{left.path.removeprefix(f'{section}.')} = {shown(left.value)}" for left in found]
        what = ", ".join(said) if said[0].startswith(section) else f"{section} ({', '.join(said)})"
        yield f"{what}: {_HINTS.get(section, 'no counterpart here')}"
