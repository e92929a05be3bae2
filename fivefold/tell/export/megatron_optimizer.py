"""Flags of Megatron-LM's optimizers and learning rates (checked with release 0.16.1)."""

from collections.abc import Iterator

from fivefold.config.sharding import SHARDING, Sharding
from fivefold.layout import Layout
from fivefold.tell.export.settings import Settings, flag, flags, set_flag

_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")


def its_sharding(layout: Layout) -> Sharding:
    """The sharding strategy that Megatron-LM's flags name; with Muon none applies, since
    `dist_muon` replaces them."""
    none = layout.config.optimizer.optimizer == "muon"
    return SHARDING["no_shard"] if none else layout.config.parallel.sharding


def optimizer_flags(said: Settings, layout: Layout) -> Iterator[str]:
    """Flags of the optimizer and of the learning rate."""
    training = layout.config.training
    counted = training.counted_in
    if said["optimizer"] == "muon":
        shares = layout.config.parallel.sharding.splits_optimizer
        yield from flag("optimizer", "dist_muon" if shares else "muon")
        yield from flags(said, "muon_momentum", "muon_num_ns_steps", "muon_scale_mode")
        yield from flags(said, "muon_extra_scale_factor")
        yield from set_flag("muon_use_nesterov", said["muon_nesterov"])
        yield from flag("muon-tp-mode", "duplicated")
    yield from flags(said, "lr", "min_lr", "lr_decay_style", f"lr_decay_{counted}")
    warmup = said[f"lr_warmup_{counted}"]
    if said["lr_decay_style"] == "constant" and warmup >= said[f"train_{counted}"]:
        # It wants the warm-up to end before a decay, also where there is none.
        yield from flag(f"lr-decay-{counted}", warmup + 1)
    yield from flags(said, f"lr_warmup_{counted}", "lr_warmup_init")
    if said["lr_decay_style"] == "WSD":
        yield from flags(said, f"lr_wsd_decay_{counted}", "lr_wsd_decay_style")
    yield from flags(said, "decoupled_lr", "decoupled_min_lr")
    if said["weight_decay_incr_style"] != "constant":
        yield from flags(said, "weight_decay_incr_style", "start_weight_decay", "end_weight_decay")
    yield from flags(said, "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "clip_grad")
    yield from set_flag("qk_clip", said["qk_clip"])
    if said["qk_clip"]:
        yield from flags(said, "qk_clip_alpha", "qk_clip_threshold")
    yield from set_flag("log_max_attention_logit", said["log_max_attention_logit"])


def lost_of_clipped_logits(said: Settings, layout: Layout) -> Iterator[str]:
    """Sentences on differences and limits of Megatron-LM's QK-clip."""
    if not said["qk_clip"]:
        return
    model, strategy = layout.config.model, said["data_parallel_sharding_strategy"]
    if said["optimizer"] != "muon" and layout.config.parallel.sharding.splits_optimizer:
        what = "its qk_clip scales whole masters, and fails where its optimizer splits them"
        yield f"{what} (data_parallel_sharding_strategy = {strategy})"
    if model.attention_output_gate:
        yield "its qk_clip fails where projections of queries make gates (attention_output_gate)"
    if model.mtp_num_layers:
        yield f"its qk_clip leaves MTP modules alone, mtp_num_layers {model.mtp_num_layers}"


def lost_of_muon(said: Settings, layout: Layout) -> Iterator[str]:
    """Sentences on differences and limits of Megatron-LM's Muon."""
    if said["optimizer"] != "muon":
        return
    parallel, model = layout.config.parallel, layout.config.model
    if model.gated_linear_unit:
        yield "it orthogonalises gate and up projections of an MLP as one matrix (optimizer = muon)"
    if parallel.sharding.splits_gradients:
        yield (
            "its Muon shares the optimizer's state alone: data_parallel_sharding_strategy = "
            f"{said['data_parallel_sharding_strategy']} runs as optim"
        )
    refused = [
        name
        for name in (
            *_OVERLAPS,
            "overlap_param_gather_with_optimizer_step",
            "ddp_reduce_scatter_with_fp32_accumulation",
        )
        if said[name]
    ]
    if layout.grid.dp_replicate > 1:
        refused.append("num_distributed_optimizer_instances")
    if refused:
        yield f"its Muon refuses {', '.join(refused)}, left out"
    if said["precision"] == "fp16":
        yield "its Muon refuses precision = fp16"
