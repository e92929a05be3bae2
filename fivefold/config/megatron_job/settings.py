"""Translates the arguments of a Megatron-LM job into settings.

Arguments that are not given have Megatron-LM's defaults, so that model, data and learning rate are
those of the job. What has no counterpart in Fivefold is named, never dropped silently.
"""

from fivefold.config.flags import IDLE_SWITCHES
from fivefold.config.foreign import foreign
from fivefold.config.megatron_job.arguments import MegatronJob, lost_argument
from fivefold.config.megatron_job.model import of_experts, of_model, of_vocabulary
from fivefold.config.megatron_job.relatives import of_relative
from fivefold.config.megatron_job.release import known
from fivefold.config.megatron_job.training import (
    of_data,
    of_formats,
    of_memory,
    of_optimizer,
    of_parallel,
    of_training,
)
from fivefold.config.settings import name_of_flag
from fivefold.config.translation import Translation, fitting
from fivefold.errors import Mistakes

TRAINER = "Megatron-LM"
_DERIVED = """
    rank world_size data_parallel_size params_dtype transformer_pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size consumed_train_samples skipped_train_samples
    consumed_valid_samples consumed_train_bins iteration use_custom_fsdp
"""  # from other arguments, by its checks, and then logged with them


def translate(job: MegatronJob, vocabulary: int | None = None) -> Translation:
    """The settings of a job.

    Args:
        job: its arguments.
        vocabulary: tokens of its tokenizer, if its arguments do not say; None: they do.

    Raises:
        ConfigError: sizes are missing, or the model is none that Fivefold has.
    """
    mistakes, lost = Mistakes(), list[str]()
    named = (
        *of_model(job, mistakes, lost),
        *of_vocabulary(job, vocabulary, mistakes),
        *of_experts(job),
        *of_parallel(job, lost),
        *of_memory(job, lost),
        *of_formats(job),
        *of_training(job, mistakes, lost),
        *of_optimizer(job, lost),
        *of_data(job, lost),
        *job.settings.items(),
    )
    values = fitting(named, mistakes)
    job.mention(*_DERIVED.split())
    unread = {name: value for name, value in job.unread().items() if not _waits(job, name)}
    harmless = tuple(sorted(filter(_idles, unread)))
    lost += [lost_argument(name, value) for name, value in unread.items() if name not in harmless]
    idle = {flag: name_of_flag(flag) for flag in job.unknown}
    idle = {f: name for f, name in idle.items() if _idles(name) or _waits(job, name)}
    harmless += tuple(idle.values())
    others = [flag for flag in job.unknown if flag not in idle]
    lost += [of_relative(flag, known().release) for flag in others]
    lost += job.notes
    if mistakes.found and job.notes:
        mistakes.add("what is missing may be in what was not read of the job", *job.notes)
    mistakes.raise_if_any()
    return Translation(TRAINER, values, tuple(lost), harmless, job.ranks)


_SWITCHES: tuple[tuple[str, str], ...] = (
    ("moe_", "num_experts"),
    ("moe_deepep_", "moe_enable_deepep"),
    ("expert_", "num_experts"),
    ("mtp_", "mtp_num_layers"),
    ("qk_clip_", "qk_clip"),
    ("fp8_", "fp8"),
    ("offload_", "fine_grained_activation_offloading"),
    ("min_offloaded_", "fine_grained_activation_offloading"),
    ("optimizer_offload_", "optimizer_cpu_offload"),
    ("profile_", "profile"),
    ("fim_", "fim_data"),
    *((name, "fp16") for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window")),
    *((name, "fp16") for name in ("loss_scale", "hysteresis")),
)
"""Beginnings of names of arguments that mean something with another one only."""


def _idles(name: str) -> bool:
    """Whether an argument changes nothing here."""
    return name in IDLE_SWITCHES or foreign(name).idle


def _waits(job: MegatronJob, name: str) -> bool:
    """Whether an argument has no effect in this job."""
    narrow = bool(job["fp8"] or job["fp4"])
    of = {
        "dsa_": job["experimental_attention_variant"] == "dsa",
        "muon_": job["optimizer"] in ("muon", "dist_muon"),
        "lr_wsd_": job["lr_decay_style"] == "WSD",
        "first_last_layers_bf16": narrow,
        "num_layers_at_": narrow and job["first_last_layers_bf16"],
    }
    owners = {start: bool(job[switch]) for start, switch in _SWITCHES} | of
    return any(name.startswith(start) and not on for start, on in owners.items())
