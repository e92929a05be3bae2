"""Translates the settings of Accelerate's launcher.

They say how many ranks there are, how weights are split over them, and in which precision. Model,
data, batch and rates are code there; those of DeepSpeed's stand in a file of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Any

from fivefold.config.deepspeed_job.file import AUTO, DeepSpeedJob
from fivefold.config.deepspeed_job.file import read_file as read_deepspeed
from fivefold.config.deepspeed_job.settings import translate as translate_deepspeed
from fivefold.config.job_settings import JobSettings
from fivefold.config.translation import Named, Translation, fitting
from fivefold.errors import did_you_mean, shown

TRAINER = "Accelerate"
_REPLICAS = "MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU"
_TYPES = ("FSDP", "DEEPSPEED", "NO", *_REPLICAS.split())
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "MEGATRON_LM": "translate the arguments of Megatron-LM instead, which its script passes on",
        "XLA": "a job of TPUs",
        "MULTI_NEURON": "a job of Trainium",
    }
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP's first version names them so, or by number from 1."""
_SHARDED: Mapping[str, str] = MappingProxyType(
    {
        "NO_SHARD": "no_shard",
        "SHARD_GRAD_OP": "optim_grads",
        "HYBRID_SHARD_ZERO2": "optim_grads",
    }
)
"""FSDP strategy -> what it shards here; strategies not listed shard everything."""
_PRECISIONS = ("no", "fp16", "bf16", "fp8")
_FORMATS: Mapping[str, str] = MappingProxyType({"HYBRID": "hybrid", "E4M3": "e4m3"})
_UNREAD: Mapping[str, str] = MappingProxyType(
    {"amax_history_length": "amax_history_len", "amax_compute_algorithm": "amax_compute_algo"}
)
"""What `accelerate config` writes, and its launcher has under another name."""
_BACKENDS = ("", "no", "inductor", "aot_eager")
_CODE = (
    "the loop that trains is code there: global_batch_size, micro_batch_size, seq_length, "
    "train_iters, lr, seed, data_path and tokenizer_model are the recipe's to set",
    "how the loss is averaged is code there: here every token of the global batch weighs the same",
)
_HARMLESS = """
    compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank
    main_process_ip main_process_port main_training_function rdzv_backend same_network mpirun_config
    tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone command_file commands
    fsdp_config.auto_wrap_policy fsdp_config.backward_prefetch fsdp_config.backward_prefetch_policy
    fsdp_config.cpu_ram_efficient_loading fsdp_config.forward_prefetch fsdp_config.min_num_params
    fsdp_config.state_dict_type fsdp_config.sync_module_states fsdp_config.use_orig_params
    fsdp_config.transformer_layer_cls_to_wrap parallelism_config.cp_backend
    parallelism_config.sp_backend parallelism_config.sp_attn_implementation
    parallelism_config.sp_seq_length_is_variable fp8_config.interval fp8_config.pad_inner_dim
    deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
    deepspeed_config.deepspeed_exclusion_filter deepspeed_config.deepspeed_inclusion_filter
    deepspeed_config.deepspeed_moe_layer_cls_names dynamo_config.mode dynamo_config.use_dynamic
    dynamo_config.use_fullgraph dynamo_config.use_regional_compilation
"""
HARMLESS = tuple(_HARMLESS.split())
"""Where it runs and how its ranks meet; how layers are grouped for FSDP, which are one by one here;
how files are written; how parts are compiled."""


def translate(
    job: JobSettings, ranks: int | None = None, read: Callable[[str], str] | None = None
) -> Translation:
    """The settings of a job, without its model.

    Args:
        job: its file.
        ranks: number of its ranks; None: what the file says.
        read: returns the text of a file that it names, of settings for DeepSpeed.

    Raises:
        ConfigError: settings are of the wrong kind, contradict each other, or are of no job that
            Fivefold has.
    """
    lost, kind = [*_CODE], job.word("distributed_type").upper() or "NO"
    if job.word("compute_environment") not in ("", "local_machine"):
        job.mistakes.add(
            f"compute_environment = {job.get('compute_environment')}: only jobs of own machines "
            "are translated",
            works=["LOCAL_MACHINE"],
        )
    if kind not in _TYPES:
        why = _ELSEWHERE.get(kind, f"there is none{did_you_mean(kind, _TYPES)}")
        job.mistakes.add(f"distributed_type = {kind}: {why}")
    if job.flag("use_cpu"):
        lost.append("use_cpu: ranks compute on GPUs if there are any (--device cpu)")
    given = job.number("num_processes", -1)
    if ranks is not None and given > 0 and given != ranks:
        lost.append(f"num_processes = {given}: of {ranks} ranks, as --nproc says")
    ranks = ranks or (given if given > 0 else 1 if kind == "NO" else None)
    job.mistakes.raise_if_any()
    if kind == "DEEPSPEED":
        return _of_deepspeed(job, ranks, read, lost)
    named = (*_of_sharding(job, kind, ranks, lost), *_of_precision(job, kind, lost))
    values = fitting((*named, *_of_compiler(job, lost)), job.mistakes)
    return _finished(job, kind, Translation(TRAINER, values, tuple(lost), (), ranks))


def _finished(job: JobSettings, kind: str, found: Translation) -> Translation:
    """The translation, with what else the file says."""
    needed = {
        "fsdp_config": kind == "FSDP",
        "deepspeed_config": kind == "DEEPSPEED",
        "megatron_lm_config": False,
        "mpirun_config": False,
        "fp8_config": _precision(job) == "fp8",
        "parallelism_config": (job.count("parallelism_config.sp_size") or 1) > 1,
    }
    harmless, lost = [*found.harmless], [*found.lost]
    for path, value, _ in job.unread():
        idles = not needed.get(path.partition(".")[0], True)
        if idles or path in HARMLESS or value is None:
            harmless.append(path)
        else:
            lost.append(f"{path} = {shown(value)}: no counterpart here")
    job.mistakes.raise_if_any()
    return replace(found, lost=tuple(lost), harmless=tuple(harmless))


def _of_sharding(job: JobSettings, kind: str, ranks: int | None, lost: list[str]) -> Named:
    """What ranks split: everything, some of it, or nothing."""
    machines = job.count("num_machines") or 1
    strategy = _strategy(job, lost) if kind == "FSDP" else "NO_SHARD"
    degrees = {
        name: job.count(f"parallelism_config.{name}_size") or 1
        for name in ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    }
    split = prod(degrees.values())
    if split > 1 and kind != "FSDP":
        job.mistakes.add(
            f"parallelism_config splits jobs of FSDP, and distributed_type is {kind}",
            works=["distributed_type: FSDP"],
        )
    elif split > 1:
        if ranks is not None and ranks != split:
            parts = " x ".join(f"{name} {size}" for name, size in degrees.items())
            job.mistakes.add(f"{ranks} ranks are not {parts} = {split}", works=[f"--nproc {split}"])
        yield "num_distributed_optimizer_instances", degrees["dp_replicate"]
        yield "data_parallel_shard_size", degrees["dp_shard"]
        yield from _of_degrees(job, degrees, lost)
    elif strategy.startswith("HYBRID"):
        yield "num_distributed_optimizer_instances", machines
        if ranks is not None and ranks % machines:
            job.mistakes.add(f"{ranks} ranks are not on num_machines = {machines} equally")
    sharded = _SHARDED.get(strategy, "optim_grads_params")
    yield "data_parallel_sharding_strategy", sharded
    if sharded == "optim_grads":
        lost.append(
            "its weights are sharded and gathered for each forward: here, as in ZeRO-2, they are "
            "gathered once a step"
        )
    if kind == "FSDP":
        yield from _of_memory(job, sharded, lost)


def _strategy(job: JobSettings, lost: list[str]) -> str:
    """What FSDP splits, in the words of its first version."""
    version = job.number("fsdp_config.version", 1)
    if version not in (1, 2):
        job.mistakes.add(f"fsdp_config.version cannot be {version}", works=["1", "2"])
    again = job.get("fsdp_config.reshard_after_forward")
    if version == 2:
        if job.get("fsdp_config.sharding_strategy") is not None:
            lost.append("fsdp_config.sharding_strategy: of FSDP's first version, not of this one")
        if isinstance(again, str) and again.lower() in ("true", "false"):
            again = again.lower() == "true"
        if not isinstance(again, bool | None):
            job.mistakes.add(
                f"fsdp_config.reshard_after_forward cannot be {shown(again)} with version 2",
                works=["true", "false"],
            )
        return "SHARD_GRAD_OP" if again is False else "FULL_SHARD"
    given = job.get("fsdp_config.sharding_strategy")
    given = str(again if given is None and again is not None else given or "FULL_SHARD").upper()
    if given.isdecimal() and 0 < int(given) <= len(_STRATEGIES):
        return _STRATEGIES[int(given) - 1]
    if given not in _STRATEGIES:
        job.mistakes.add(f"fsdp_config.sharding_strategy cannot be {given}", works=_STRATEGIES)
    return given


def _of_degrees(job: JobSettings, degrees: Mapping[str, int], lost: list[str]) -> Named:
    """Tensor and context parallelism."""
    yield "tensor_model_parallel_size", degrees["tp"]
    cp, sp, path = degrees["cp"], degrees["sp"], "parallelism_config"
    if cp > 1 and sp > 1:
        job.mistakes.add(f"{path}: cp_size = {cp} and sp_size = {sp} both split sequences")
    yield "context_parallel_size", max(cp, sp)
    sends = job.word(f"{path}.cp_comm_strategy") or "allgather"
    if sends not in ("allgather", "alltoall"):
        job.mistakes.add(
            f"{path}.cp_comm_strategy cannot be {sends}", works=["allgather", "alltoall"]
        )
    if sp > 1:
        yield "cp_comm_type", ["a2a"]
        yield "seq_length", job.count(f"{path}.sp_seq_length")
    elif cp > 1:
        yield "cp_comm_type", ["all_gather" if sends == "allgather" else "p2p"]


def _of_memory(job: JobSettings, sharded: str, lost: list[str]) -> Named:
    """Recomputation, and what is moved to the host."""
    path = "fsdp_config"
    moves = job.flag(f"{path}.offload_params")
    if moves and sharded == "no_shard":
        lost.append(f"{path}.offload_params: NO_SHARD keeps whole weights, on the device")
    elif moves:
        yield "optimizer_cpu_offload", True
        yield "param_cpu_offload", sharded == "optim_grads_params"
        if sharded != "optim_grads_params":
            lost.append(f"{path}.offload_params: weights that stay gathered stay on the device")
    again = job.flag(f"{path}.activation_checkpointing")
    if again:
        yield "recompute_granularity", "full"
    if job.flag(f"{path}.activation_checkpointing_offload"):
        if not again:
            job.mistakes.add(
                f"{path}.activation_checkpointing_offload needs {path}.activation_checkpointing",
                works=["activation_checkpointing: true"],
            )
        yield "fine_grained_activation_offloading", True
        yield "offload_tensors", ["layer_input"]


def _precision(job: JobSettings) -> str:
    """The precision, in Accelerate's words; older files have a switch for fp16."""
    given, older = job.get("mixed_precision"), job.flag("fp16")
    if given is None:
        return "fp16" if older else "no"
    word = "no" if given is False else str(given).lower()  # YAML's unquoted no is a switch
    if word not in _PRECISIONS:
        job.mistakes.add(f"mixed_precision cannot be {shown(given)}", works=_PRECISIONS)
    return word


def _of_precision(job: JobSettings, kind: str, lost: list[str]) -> Named:
    """The precision of products, and of gradients that are sent."""
    given = _precision(job)
    if given == "no":
        yield "precision", "fp32"
        lost.append("mixed_precision = no: it computes in the type in which code makes its model")
        return
    wide = "fp16" if given == "fp16" else "bf16"
    yield "precision", wide
    yield "grad_reduce_in_bf16", wide == "bf16" and kind == "FSDP"
    if wide == "fp16" and kind == "FSDP":
        lost.append("gradients are sent in fp16 there, and in fp32 here")
    if given == "fp8":
        yield from _of_eight_bits(job, kind, lost)


def _of_eight_bits(job: JobSettings, kind: str, lost: list[str]) -> Named:
    path = "fp8_config"
    backend = job.word(f"{path}.backend").upper() or "AUTO"
    form = job.word(f"{path}.format").upper() or "HYBRID"
    if form not in _FORMATS:
        job.mistakes.add(f"{path}.fp8_format cannot be {form}", works=_FORMATS)
    yield "fp8_format", _FORMATS.get(form, "hybrid")
    if backend == "AO":
        yield "fp8_recipe", "tensorwise"
        gathers = job.flag(f"{path}.enable_fsdp_float8_all_gather")
        yield "fp8_param_gather", gathers and kind == "FSDP"
        return
    if backend not in ("TE", "AUTO"):
        lost.append(f"{path}.backend = {backend}: scales are those of Transformer Engine here")
    yield "fp8_recipe", "delayed"
    yield "fp8_margin", job.number(f"{path}.margin", 0)
    yield "fp8_amax_history_len", job.count(f"{path}.amax_history_len") or 1024
    yield "fp8_amax_compute_algo", job.word(f"{path}.amax_compute_algo") or "most_recent"
    for written, read in _UNREAD.items():
        if (value := job.get(f"{path}.{written}")) is not None:
            lost.append(f"{path}.{written} = {shown(value)}: Accelerate's launcher reads {read}")
    wide = job.get(f"{path}.override_linear_precision")
    if wide not in (None, False) and any(wide if isinstance(wide, list | tuple) else [wide]):
        lost.append(f"{path}.override_linear_precision = {shown(wide)}: all products have 8 bits")
    if not job.flag(f"{path}.use_autocast_during_eval"):
        lost.append("it evaluates without 8 bits, and here with them")


def _of_compiler(job: JobSettings, lost: list[str]) -> Named:
    """What torch.compile does; older files name its backend outside of a section."""
    said = job.word("dynamo_config.backend"), job.word("dynamo_backend")
    backend = next(filter(None, said), "")
    if backend not in _BACKENDS:
        lost.append(f"dynamo_config.backend = {backend}: inductor compiles here, or aot_eager")
    elif backend not in ("", "no"):
        yield "compile", True
        yield "compile_backend", backend


def _of_deepspeed(
    job: JobSettings, ranks: int | None, read: Callable[[str], str] | None, lost: list[str]
) -> Translation:
    """The translation of what the file says of DeepSpeed, or of the file that it names."""
    path, precision = "deepspeed_config", _precision(job)
    name = job.get(f"{path}.deepspeed_config_file")
    if name is not None and read is not None:
        theirs = read_deepspeed(read(str(name)))
    else:
        theirs = DeepSpeedJob(_in_words_of_deepspeed(job, path))
    given: dict[str, Any] = dict(theirs.given)
    for kind, fits in (("bf16", precision in ("bf16", "fp8")), ("fp16", precision == "fp16")):
        section = given.get(kind, {})
        if isinstance(section, Mapping) and section.get("enabled", AUTO) == AUTO:
            given[kind] = {**section, "enabled": fits}
    if precision == "fp8":
        lost.append("mixed_precision = fp8: --fp8-format hybrid")
        job.mention(*(each.path for each in job.unread() if each.path.startswith("fp8_config")))
    if (sp := job.count("parallelism_config.sp_size") or 1) > 1:
        given.setdefault("sequence_parallel_size", sp)
    for each in ("dp_replicate", "dp_shard", "tp", "cp"):
        if job.get(size := f"parallelism_config.{each}_size") not in (None, 1):
            lost.append(f"{size} = {shown(job.get(size))}: of FSDP, not of DeepSpeed")
    job.count("num_machines")
    job.mistakes.raise_if_any()
    found = translate_deepspeed(DeepSpeedJob(given), ranks)
    compiled = fitting(_of_compiler(job, lost), job.mistakes)
    said = (*lost[len(_CODE) :], *found.lost)
    whole = replace(found, trainer=TRAINER, values={**found.values, **compiled}, lost=said)
    return _finished(job, "DEEPSPEED", whole)


def _in_words_of_deepspeed(job: JobSettings, path: str) -> dict[str, Any]:
    """The file that Accelerate makes for DeepSpeed of its own settings."""
    zero: dict[str, Any] = {"stage": job.number(f"{path}.zero_stage", 2)}
    for what in ("optimizer", "param"):
        device = job.word(f"{path}.offload_{what}_device")
        if device and device != "none":
            moved = {"device": device, "nvme_path": job.get(f"{path}.offload_{what}_nvme_path")}
            zero[f"offload_{what}"] = {n: value for n, value in moved.items() if value is not None}
    made: dict[str, Any] = {
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        "gradient_accumulation_steps": job.number(f"{path}.gradient_accumulation_steps", 1),
        "zero_optimization": zero,
    }
    if (clip := job.get(f"{path}.gradient_clipping")) is not None and clip != "none":
        made["gradient_clipping"] = job.number(f"{path}.gradient_clipping", 0.0)
    return made
