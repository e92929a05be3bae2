"""Checks the ranges of single settings."""

from collections.abc import Callable
from math import gcd
from types import MappingProxyType

from fivefold.config.config import Config
from fivefold.config.training import LARGEST_LOSS_SCALE, OptimizerConfig, TrainingConfig
from fivefold.errors import Mistakes

_Rule = tuple[Callable[[float], bool], str]

_AT_LEAST_ONE: _Rule = (lambda v: v >= 1, "at least 1")
_NOT_NEGATIVE: _Rule = (lambda v: v >= 0, "0 or more")
_POSITIVE: _Rule = (lambda v: v > 0, "positive")
_LOSS_SCALE: _Rule = (
    lambda v: 1 / LARGEST_LOSS_SCALE <= v <= LARGEST_LOSS_SCALE,
    "in 2^-64 .. 2^64",
)
_SHARE: _Rule = (lambda v: 0 <= v < 1, "in [0, 1)")

_RULES = MappingProxyType(
    {
        "num_experts": _AT_LEAST_ONE,
        "moe_router_topk": _AT_LEAST_ONE,
        "moe_router_num_groups": _AT_LEAST_ONE,
        "moe_router_group_topk": _AT_LEAST_ONE,
        "moe_router_group_scores": _AT_LEAST_ONE,
        "moe_router_topk_scaling_factor": _POSITIVE,
        "moe_z_loss_coeff": _NOT_NEGATIVE,
        "moe_router_bias_update_rate": _NOT_NEGATIVE,
        "moe_input_jitter_eps": (lambda v: 0 < v < 1, "between 0 and 1"),
        "moe_expert_capacity_factor": _POSITIVE,
        "moe_expert_rank_capacity_factor": _POSITIVE,
        "moe_ffn_hidden_size": _AT_LEAST_ONE,
        "moe_shared_expert_intermediate_size": _AT_LEAST_ONE,
        "q_lora_rank": _AT_LEAST_ONE,
        "kv_lora_rank": _AT_LEAST_ONE,
        "qk_head_dim": _AT_LEAST_ONE,
        "qk_pos_emb_head_dim": _AT_LEAST_ONE,
        "v_head_dim": _AT_LEAST_ONE,
        "mtp_num_layers": _NOT_NEGATIVE,
        "num_virtual_stages_per_pipeline_rank": _AT_LEAST_ONE,
        "num_layers_per_virtual_pipeline_stage": _AT_LEAST_ONE,
        "decoder_first_pipeline_num_layers": _NOT_NEGATIVE,
        "decoder_last_pipeline_num_layers": _NOT_NEGATIVE,
        "num_sequence_slices": _AT_LEAST_ONE,
        "pipeline_max_unsharded_stages": _AT_LEAST_ONE,
        "microbatch_group_size_per_virtual_pipeline_stage": _AT_LEAST_ONE,
        "moe_deepep_num_sms": _AT_LEAST_ONE,
        "ddp_bucket_size": _AT_LEAST_ONE,
        "zero_hpz_partition_size": _AT_LEAST_ONE,
        "zero_qgz_partition_size": _AT_LEAST_ONE,
        "expert_model_parallel_size": _AT_LEAST_ONE,
        "expert_tensor_parallel_size": _AT_LEAST_ONE,
        "tiled_mlp_num_shards": _AT_LEAST_ONE,
        "min_offloaded_tensor_size": _AT_LEAST_ONE,
        "activation_offload_fraction": (lambda v: 0 < v <= 1, "in (0, 1]"),
        "optimizer_offload_fraction": (lambda v: 0 < v <= 1, "in (0, 1]"),
        "micro_batch_size": _AT_LEAST_ONE,
        "global_batch_size": _AT_LEAST_ONE,
        "seq_length": _AT_LEAST_ONE,
        "train_iters": _AT_LEAST_ONE,
        "train_samples": _AT_LEAST_ONE,
        "fp8_amax_history_len": _AT_LEAST_ONE,
        "label_smoothing": _SHARE,
        "z_loss_coeff": _NOT_NEGATIVE,
        "mtp_loss_scaling_factor": _NOT_NEGATIVE,
        "eval_interval": _NOT_NEGATIVE,
        "eval_iters": _NOT_NEGATIVE,
        "seed": (lambda v: 0 <= v < 1 << 63, "in 0 .. 2^63 - 1"),
        "spiky_loss_factor": (lambda v: v > 1, "above 1"),
        "check_weight_hash_across_dp_replicas_interval": _NOT_NEGATIVE,
        "check_loss_across_dp_replicas_interval": _NOT_NEGATIVE,
        "distributed_timeout_minutes": _POSITIVE,
        "watchdog_timeout_seconds": _NOT_NEGATIVE,
        "exit_duration_in_mins": _POSITIVE,
        "manual_gc_interval": _NOT_NEGATIVE,
        "document_length": _AT_LEAST_ONE,
        "tokenizer_vocab_size": _AT_LEAST_ONE,
        "lr": _POSITIVE,
        "min_lr": _NOT_NEGATIVE,
        "lr_decay_iters": _AT_LEAST_ONE,
        "lr_decay_samples": _AT_LEAST_ONE,
        "lr_warmup_iters": _NOT_NEGATIVE,
        "lr_warmup_samples": _NOT_NEGATIVE,
        "lr_warmup_init": _NOT_NEGATIVE,
        "lr_wsd_decay_iters": _AT_LEAST_ONE,
        "lr_wsd_decay_samples": _AT_LEAST_ONE,
        "weight_decay": _NOT_NEGATIVE,
        "adam_beta1": _SHARE,
        "adam_beta2": _SHARE,
        "adam_eps": _POSITIVE,
        "muon_momentum": _SHARE,
        "muon_num_ns_steps": _AT_LEAST_ONE,
        "muon_extra_scale_factor": _POSITIVE,
        "clip_grad": _NOT_NEGATIVE,
        "loss_scale": _LOSS_SCALE,
        "initial_loss_scale": _LOSS_SCALE,
        "min_loss_scale": _LOSS_SCALE,
        "loss_scale_window": _AT_LEAST_ONE,
        "hysteresis": _AT_LEAST_ONE,
        "ckpt_step": _NOT_NEGATIVE,
        "save_interval": _NOT_NEGATIVE,
        "non_persistent_save_interval": _NOT_NEGATIVE,
        "replication_jump": _NOT_NEGATIVE,
        "keep_latest_k": _AT_LEAST_ONE,
        "log_interval": _AT_LEAST_ONE,
    }
)
_OF_THE_RATE = frozenset(
    (
        "train_iters",
        "train_samples",
        "lr",
        "min_lr",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_init",
    )
)


def check_values(config: Config, mistakes: Mistakes) -> None:
    """Collect settings that are out of their range, and pairs that contradict each other."""
    out_of_range = set()
    for name, (holds, range_) in _RULES.items():
        value = config.value(name)
        if value is not None and not holds(value):
            mistakes.add(f"{name} must be {range_}, not {value}")
            out_of_range.add(name)
    if not out_of_range & _OF_THE_RATE:
        _check_rate(config, mistakes)
    if not out_of_range & {"initial_loss_scale", "min_loss_scale"}:
        _check_loss_scale(config.optimizer, mistakes)
    if "global_batch_size" not in out_of_range:
        _check_ramp(config.training, mistakes)
    if config.checkpoint.load is None:
        if config.checkpoint.load_adapter is not None:
            mistakes.add(
                "load_adapter has adapters alone, and there is no --load of the weights beside",
                works=["--load FOLDER", "--load-adapter none"],
            )
        if config.checkpoint.ckpt_step is not None:
            mistakes.add(
                "ckpt_step chooses a checkpoint of --load, and there is no --load",
                works=["--ckpt-step none"],
            )
        if config.checkpoint.finetune:
            mistakes.add(
                "finetune takes the weights of --load, and there is no --load",
                works=["--no-finetune"],
            )


def _check_ramp(training: TrainingConfig, mistakes: Mistakes) -> None:
    """Collect what is wrong with a batch that grows, by itself."""
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
