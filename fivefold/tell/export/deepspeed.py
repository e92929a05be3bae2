"""Settings for DeepSpeed: the JSON file that `deepspeed.initialize` takes (checked with 0.19.8)."""

import json
import math
from collections.abc import Iterator
from typing import Any

from fivefold.config.deepspeed_job.rates import LEAST_WARM_UP
from fivefold.config.parallel import ParallelConfig
from fivefold.config.sharding import SHARDING
from fivefold.data_parallel.zeropp_rules import techniques
from fivefold.layout import Layout
from fivefold.tell.export.settings import (
    Export,
    Settings,
    described,
    formats,
    in_steps,
    lost_types,
)
from fivefold.tell.export.stand_in import changes, one_stage_a_rank

ITS_SCHEDULES = ("1f1b",)


def deepspeed(layout: Layout) -> Export:
    """The settings file; what DeepSpeed takes only as code is listed as missing."""
    layout, uncounted = in_steps(layout)
    said, grid = Settings(layout.config), layout.grid
    narrow = layout.config.training.in_16_bits and said["grad_reduce_in_bf16"]
    settings: dict[str, Any] = {
        "train_batch_size": said["global_batch_size"],
        "train_micro_batch_size_per_gpu": said["micro_batch_size"],
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": said["clip_grad"],
        "bf16": {"enabled": said["precision"] == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16" if narrow else "fp32",
        "optimizer": _optimizer(said),
        "zero_optimization": _sharding(said, layout.config.parallel),
    }
    if said["precision"] == "fp16":
        settings["fp16"] = _loss_scale(said)
    if (rates := _rates(said)) is not None:
        settings["scheduler"], settings["optimizer"]["params"]["lr"] = rates
    if said["tensor_model_parallel_size"] > 1:
        settings["tensor_parallel"] = {"autotp_size": grid.tp}
    if said["context_parallel_size"] > 1:
        settings |= {"sequence_parallel_size": grid.cp, "data_parallel_size": grid.dp}
    missing = [
        *uncounted,
        *_lost_of_the_code(said, layout),
        *_lost_of_the_rates(said),
        *_lost_of_muon(said),
        *_lost_of_the_sharding(said, layout),
        *_lost_of_the_memory(said),
        *said.unread("no setting, but code there"),
    ]
    return Export(json.dumps(settings, indent=2) + "\n", tuple(missing))


def _optimizer(said: Settings) -> dict[str, Any]:
    params = {
        "lr": said["lr"],
        "betas": [said["adam_beta1"], said["adam_beta2"]],
        "eps": said["adam_eps"],
        "weight_decay": said["weight_decay"],
    }
    if said["optimizer"] != "muon":
        return {"type": "AdamW", "params": params}
    momentum = said["muon_momentum"]
    return {"type": "Muon", "params": params | {"momentum": momentum, "ns_method": "standard"}}


def _lost_of_muon(said: Settings) -> Iterator[str]:
    if said["optimizer"] != "muon":
        return
    yield (
        "its Muon has the five iterations, the coefficients and the factor sqrt(max(1, out/in)) of "
        "Jordan's, with Nesterov's momentum: "
        + said.values_of(
            *("muon_num_ns_steps", "muon_scale_mode", "muon_extra_scale_factor", "muon_nesterov")
        )
    )


def its_pipeline(layout: Layout) -> Layout:
    """The layout that DeepSpeed's pipeline runs: 1F1B, one stage a rank."""
    return layout if layout.schedule in ITS_SCHEDULES else one_stage_a_rank(layout)


_UNKNOWN_DECAYS = ("WSD", "inverse-square-root")


def _rates(said: Settings) -> tuple[dict[str, Any], float] | None:
    """The scheduler and the learning rate of the optimizer; None if there is none but the latter.

    DeepSpeed's schedulers set no rate before the second step, so the optimizer gets the rate of the
    first step. They need a warm-up of at least two steps, so their count of steps is shifted if
    ours is shorter.
    """
    style, peak, warm_up = said["lr_decay_style"], said["lr"], said["lr_warmup_iters"]
    start = said["lr_warmup_init"]
    end = said["lr_decay_iters"] or said["train_iters"]
    if style in _UNKNOWN_DECAYS or (style == "constant" and not warm_up):
        return None
    shift = max(0, LEAST_WARM_UP - warm_up)
    params: dict[str, Any] = {"warmup_num_steps": warm_up + shift, "warmup_type": "linear"}
    if style == "cosine":
        params["warmup_min_ratio"] = start / peak
        params["cos_min_ratio"] = said["min_lr"] / peak
        if warm_up:
            params["total_num_steps"] = end
        else:  # its cosine is a step ahead of its count
            params |= {"total_num_steps": end + shift, "last_batch_iteration": shift - 1}
        return {"type": "WarmupCosineLR", "params": params}, peak
    params |= {"warmup_max_lr": peak, "last_batch_iteration": shift}
    first = start if warm_up else peak
    if style == "constant":
        return {"type": "WarmupLR", "params": params | {"warmup_min_lr": start}}, first
    params |= {"warmup_min_lr": said["min_lr"], "total_num_steps": end + shift}
    return {"type": "WarmupDecayLR", "params": params}, first


def _lost_of_the_rates(said: Settings) -> Iterator[str]:
    style, warm_up, start = said["lr_decay_style"], said["lr_warmup_iters"], said["lr_warmup_init"]
    if style in _UNKNOWN_DECAYS:
        names = ("lr_warmup_iters", "lr_warmup_init", "lr_decay_iters", "min_lr")
        last = ("lr_wsd_decay_iters", "lr_wsd_decay_style") if style == "WSD" else ()
        yield (
            f"it has no scheduler for {style} (lr_decay_style): without one of yours the rate "
            f"stays at lr ({said.values_of(*names, *last)})"
        )
    elif warm_up and style == "cosine":
        least = max(warm_up, LEAST_WARM_UP)
        cosine = "is ours" if least == warm_up else f"begins later than after {warm_up}"
        yield (
            f"WarmupCosineLR's warm-up of {least} steps (lr_warmup_iters) is a step late, its "
            f"first step at a rate of 0; its cosine {cosine}"
        )
    elif warm_up and style == "linear" and start != said["min_lr"]:
        yield (
            f"WarmupDecayLR warms up from min_lr = {said['min_lr']}, where it ends, not from "
            f"lr_warmup_init = {start}"
        )


def _sharding(said: Settings, parallel: ParallelConfig) -> dict[str, Any]:
    stage = SHARDING[said["data_parallel_sharding_strategy"]].zero_stage
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": said["overlap_grad_reduce"],
            "contiguous_gradients": True,
            "reduce_scatter": True,
        }
    if stage == 3 and not said["overlap_param_gather"]:
        zero["stage3_prefetch_bucket_size"] = 0
    if stage == 3:
        zero |= {name: said[name] for name in techniques(parallel)}
    if stage and (said["optimizer_cpu_offload"] or said["offload_optimizer_states"]):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_optimizer"]["ratio"] = said["optimizer_offload_fraction"]
    if said["param_cpu_offload"]:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    return zero


def _lost_of_the_code(said: Settings, layout: Layout) -> Iterator[str]:
    grid, parallel = layout.grid, layout.config.parallel
    said.mention(*vars(layout.config.model))
    yield f"the model is code there: {described(layout.config)}"
    loop = said.values_of("seq_length", "train_iters", "seed", "data_path", "tokenizer_model")
    yield f"the training loop, corpus and tokenizer are code there: {loop}"
    if said["weight_decay"]:
        yield "that biases and norms have no weight_decay is code there: groups of parameters"
    if grid.pp > 1:
        runs = its_pipeline(layout)
        said.mention("pipeline_model_parallel_size")
        held = " ".join(str(len(stage.layers)) for stage in runs.split.stages)
        yield (
            "pipeline stages are code there (pipeline_model_parallel_size): "
            f"PipelineModule(num_stages={grid.pp}), layers {held}"
        )
        if runs is not layout:
            yield (
                f"DeepSpeed's pipeline runs 1F1B, one stage a rank, not {layout.schedule}; "
                f"{changes(layout, runs)}"
            )
        if SHARDING[said["data_parallel_sharding_strategy"]].splits_gradients:
            yield "its pipeline takes ZeRO stage 0 or 1 only"
    if grid.cp > 1:
        ways = " ".join(said["cp_comm_type"])
        yield (
            f"attention over {grid.cp} ranks is code there: Ulysses, by UlyssesSPAttentionHF "
            f"(cp_comm_type = {ways})"
        )
    if said["expert_model_parallel_size"] > 1:
        yield (
            "expert parallelism is code there (expert_model_parallel_size): "
            f"deepspeed.moe.layer.MoE(ep_size={grid.ep})"
        )
    if grid.tp > 1 and said["sequence_parallel"]:
        yield (
            "its tensor parallelism does not split the sequence (sequence_parallel): activations "
            "need more memory"
        )
    if parallel.tp_comm_overlap:
        said.mention("tp_comm_overlap")
        yield "tp_comm_overlap has no counterpart there: tensor-parallel messages are waited for"
    if said["fp8_format"] or said["fp4_format"]:
        yield f"multiplications in 8 or 4 bits are code there: {formats(said)}"
    if said["precision"] == "fp64":
        yield "precision fp64 is code there: a model in double precision"
    if said["precision"] == "fp16" and said["loss_scale"] is None:
        theirs, first = _loss_scale(said), said["initial_loss_scale"]
        if (near := 2.0 ** theirs["initial_scale_power"]) != first:
            yield f"a loss scale begins as a power of two there: {near:g}, not {first:g}"
        if (least := said["min_loss_scale"]) != theirs["min_loss_scale"]:
            yield f"its least loss scale is a whole number: not min_loss_scale = {least:g}"


def _loss_scale(said: Settings) -> dict[str, Any]:
    constant = said["loss_scale"]
    if constant is not None:
        return {"enabled": True, "loss_scale": constant}
    return {
        "enabled": True,
        "loss_scale": 0,  # dynamic
        "initial_scale_power": round(math.log2(said["initial_loss_scale"])),
        "loss_scale_window": said["loss_scale_window"],
        "hysteresis": said["hysteresis"],
        "min_loss_scale": max(round(said["min_loss_scale"]), 1),
    }


def _lost_of_the_sharding(said: Settings, layout: Layout) -> Iterator[str]:
    sharding, grid = SHARDING[said["data_parallel_sharding_strategy"]], layout.grid
    said.mention("data_parallel_shard_size")
    if said["num_distributed_optimizer_instances"] > 1 and sharding.splits_optimizer:
        yield (
            f"it shards over all {grid.dp} data-parallel ranks: MiCS, for groups "
            f"(num_distributed_optimizer_instances = {grid.dp_replicate}), was removed"
        )
    if said["ddp_reduce_scatter_with_fp32_accumulation"]:
        yield (
            "it sums in the type in which it sends gradients: bf16, in spite of "
            "ddp_reduce_scatter_with_fp32_accumulation"
        )
    rounded, part = techniques(layout.config.parallel), said["zero_qgz_partition_size"]
    if rounded and not sharding.splits_parameters:
        yield f"ZeRO++ is of ZeRO stage 3 there: {said.values_of(*rounded)} left out"
    elif said["zero_quantized_gradients"]:
        yield (
            "gradients as INT4 are summed within whole nodes first, not within "
            f"zero_qgz_partition_size = {part} ranks"
        )
    if said["ddp_bucket_size"] != ParallelConfig.ddp_bucket_size:
        size = said["ddp_bucket_size"]
        yield f"at ZeRO stage 0 its buckets have 500,000,000 elements, not ddp_bucket_size = {size}"
    if not sharding.splits_optimizer and grid.dp > 1 and said["overlap_grad_reduce"]:
        yield "at ZeRO stage 0 gradients are reduced after the backward (overlap_grad_reduce)"
    gathers_once = sharding.splits_optimizer and not sharding.splits_parameters
    if gathers_once and grid.dp > 1 and said["overlap_param_gather"]:
        yield "below ZeRO stage 3 parameters are gathered after the step (overlap_param_gather)"


def _lost_of_the_memory(said: Settings) -> Iterator[str]:
    sharding = SHARDING[said["data_parallel_sharding_strategy"]]
    granularity = said["recompute_granularity"]
    if granularity:
        kind = f"recompute_granularity = {granularity}"
        if granularity == "full":
            kind += f", recompute_method = {said['recompute_method']}"
            kind += f", recompute_num_layers = {' '.join(map(str, said['recompute_num_layers']))}"
        else:
            kind += f", recompute_modules = {' '.join(said['recompute_modules'])}"
            if said["recompute_method"] == "block":
                layers = " ".join(map(str, said["recompute_num_layers"]))
                kind += f", recompute_method = block, recompute_num_layers = {layers}"
        yield f"recomputation is code there: deepspeed.checkpointing.checkpoint ({kind})"
    if said["fine_grained_activation_offloading"]:
        modules = " ".join(said["offload_modules"])
        if tensors := " ".join(said["offload_tensors"]):
            modules += f", offload_tensors = {tensors}"
        yield (
            "fine_grained_activation_offloading is code there: offload_modules = "
            f"{modules}, min_offloaded_tensor_size = {said['min_offloaded_tensor_size']}"
        )
    if said["cross_entropy_loss_fusion"]:
        impl = said["cross_entropy_fusion_impl"]
        yield f"cross_entropy_loss_fusion is code there (cross_entropy_fusion_impl = {impl})"
    yield from lost_types(said)
    share, path = said["optimizer_offload_fraction"], said["optimizer_offload_path"]
    if path is not None:
        yield (
            f"optimizer_offload_path = {path} was left out, and the optimizer goes to host memory: "
            "nvme_path there works with ZeRO stage 3 and where its async_io extension can be built"
        )
    if (path := said["param_offload_path"]) is not None:
        yield f"param_offload_path = {path} was left out likewise: weights go to host memory"
    if said["param_cpu_offload"] and share < 1:
        yield f"all weights go to the host, not those alone of optimizer_offload_fraction = {share}"
    if said["offload_optimizer_states"]:
        yield "state in host memory is updated there, not on the device (offload_optimizer_states)"
    away = said["optimizer_cpu_offload"] or said["offload_optimizer_states"]
    if away and not sharding.splits_optimizer:
        yield "an optimizer on the host (optimizer_cpu_offload) needs ZeRO stage 1 or more"
    elif away and share < 1 and not sharding.splits_parameters:
        yield (
            "below ZeRO stage 3 all of the optimizer goes to the host, not a part "
            f"(optimizer_offload_fraction = {share})"
        )
