"""Flags for Megatron-LM: the command line of `pretrain_gpt.py` (checked with release 0.16.1)."""

from collections.abc import Iterator
from math import ceil

from fivefold.config.data import FIM_TOKENS, MOCK
from fivefold.config.parallel import ParallelConfig
from fivefold.config.training import DYNAMIC_LOSS_SCALE, TrainingConfig
from fivefold.layout import Layout
from fivefold.tell.export.megatron_experts import (
    auxiliary,
    dispatcher_flags,
    lost_of_experts,
)
from fivefold.tell.export.megatron_memory import lost_of_memory, memory_flags
from fivefold.tell.export.megatron_model import fusion_flags, lost_of_the_model, model_flags
from fivefold.tell.export.megatron_optimizer import (
    its_sharding,
    lost_of_clipped_logits,
    lost_of_muon,
    optimizer_flags,
)
from fivefold.tell.export.megatron_pipeline import (
    its_pipeline,
    lost_in_the_pipeline,
    pipeline_flags,
)
from fivefold.tell.export.settings import (
    DELAYED,
    Export,
    Settings,
    command_line,
    flag,
    flags,
    in_bf16,
    set_flag,
    state_types,
)

_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")


def megatron(layout: Layout) -> Export:
    """The flags of a layout; Fivefold can read those that it has in common."""
    said, runs = Settings(layout.config), its_pipeline(layout)
    lines = [
        *model_flags(said, layout),
        *pipeline_flags(said, layout, runs),
        *_parallel(said, layout, runs),
        *memory_flags(said, runs),
        *optimizer_flags(said, layout),
        *_training(said, layout.config.training),
        *_formats(said, layout),
        *fusion_flags(said, layout.config.model),
    ]
    missing = [
        *lost_of_the_model(said, layout),
        *lost_in_the_pipeline(said, layout, runs),
        *(lost_of_experts(said, layout, runs) if layout.config.model.num_experts else ()),
        *lost_of_muon(said, layout),
        *lost_of_clipped_logits(said, layout),
        *_lost(said, layout, runs),
        *_lost_of_the_loss(said, layout),
        *said.unread("no flag there"),
    ]
    return Export(command_line(lines), tuple(missing))


def _parallel(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    parallel, grid = layout.config.parallel, layout.grid
    yield from flags(said, "tensor_model_parallel_size", "sequence_parallel", "tp_comm_overlap")
    if grid.cp > 1:
        yield from flags(said, "context_parallel_size", "cp_comm_type")
        yield from flags(said, "hierarchical_context_parallel_sizes")
    if layout.config.model.num_experts:
        yield from dispatcher_flags(said, layout, runs)
    strategy, sharding = said["data_parallel_sharding_strategy"], its_sharding(layout)
    if sharding.zero_stage == 1:
        yield "--use-distributed-optimizer"
    elif sharding.zero_stage > 1:
        yield "--use-megatron-fsdp"
        yield from flag("data-parallel-sharding-strategy", strategy)
        yield from flag("ckpt-format", "fsdp_dtensor")
    said.mention("data_parallel_shard_size")  # implied by ranks and replicas
    muon = said["optimizer"] == "muon"
    if said["num_distributed_optimizer_instances"] > 1 and not muon:
        yield from flags(said, "num_distributed_optimizer_instances")
    yield from set_flag("overlap_grad_reduce", said["overlap_grad_reduce"] and not muon)
    gathers = said["overlap_param_gather"] and sharding.splits_optimizer
    yield from set_flag("overlap_param_gather", gathers and parallel.overlap_grad_reduce)
    early = said["overlap_param_gather_with_optimizer_step"] and _gathers_early(layout, runs)
    yield from set_flag("overlap_param_gather_with_optimizer_step", early)
    if early:  # incompatible with distributed checkpoints
        yield from flag("ckpt-format", "torch")
    yield from flags(said, "grad_reduce_in_bf16")
    wide = said["ddp_reduce_scatter_with_fp32_accumulation"] and grid.dp_replicate == 1
    wide = wide and not muon
    yield from set_flag("ddp_reduce_scatter_with_fp32_accumulation", wide)
    if said["ddp_bucket_size"] != ParallelConfig.ddp_bucket_size:
        yield from flags(said, "ddp_bucket_size")
    if not sharding.splits_optimizer:
        weights = "check_weight_hash_across_dp_replicas_interval"
        yield from set_flag(weights, said[weights] or None)


def _gathers_early(layout: Layout, runs: Layout) -> bool:
    """Whether Megatron-LM can gather stages while it updates the others."""
    parallel = layout.config.parallel
    reduces = parallel.overlap_grad_reduce and its_sharding(layout).zero_stage == 1
    return reduces and layout.grid.pp > 1 and runs.split.num_virtual > 1


def _training(said: Settings, training: TrainingConfig) -> Iterator[str]:
    counted = training.counted_in
    yield from flags(said, "micro_batch_size", "global_batch_size", "rampup_batch_size")
    yield from flags(said, "seq_length", f"train_{counted}", "seed", "full_validation")
    yield from set_flag("mock_data", MOCK in said["data_path"])
    yield from set_flag("bf16", said["precision"] == "bf16")
    if said["precision"] == "fp16":
        yield from set_flag("fp16", True)
        yield from set_flag("accumulate_allreduce_grads_in_fp32", True)
        yield from flags(said, "loss_scale", *([] if said["loss_scale"] else DYNAMIC_LOSS_SCALE))
    # Without an interval it counts its evaluations in vain; without iterations there are none.
    yield from flag("eval-interval", said["eval_interval"] or training.num_steps)
    yield from flag("eval-iters", said["eval_iters"] if said["eval_interval"] else 0)
    graphs = said["cuda_graph_impl"] is not None
    if graphs:
        yield from flags(said, "cuda_graph_impl", "cuda_graph_scope")
        yield "--te-rng-tracker"
    unchecked = graphs or not said["check_for_nan_in_loss_and_grad"]
    yield from set_flag("no_check_for_nan_in_loss_and_grad", unchecked)
    yield from set_flag("calculate_per_token_loss", not graphs)
    yield from flag("distributed-timeout-minutes", ceil(said["distributed_timeout_minutes"]))
    yield from flags(said, "manual_gc", "manual_gc_interval", "deterministic_mode", "log_straggler")
    if (minutes := said["exit_duration_in_mins"]) is not None:
        yield from flag("exit-duration-in-mins", max(int(minutes), 1))
    yield from flags(said, "exit_interval", "iterations_to_skip")
    yield from flags(said, "split", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    if said["fim_data"]:
        yield from flags(said, "fim_data", "fim_rate", "fim_spm_rate", "fim_split_sample")
        yield from flags(said, "fim_fragment_rate", "fim_no_prefix", *FIM_TOKENS)


def _formats(said: Settings, layout: Layout) -> Iterator[str]:
    """Flags for the number of bits in which linear layers multiply, and for layers that stay in
    bf16."""
    if said["fp8_format"] and not said["fp4_format"]:
        yield from flags(said, "fp8_format")
        recipe = _recipe(said)
        yield from set_flag("fp8_recipe", recipe)
        if recipe == "delayed":
            yield from flags(said, *DELAYED)
        yield from set_flag("fp8_param_gather", said["fp8_param_gather"])
    yield from flags(said, "fp4_format")
    first, *numbers = in_bf16(said) or (None,)
    if first is not None:
        yield from flags(said, first)
        for name in numbers:
            yield from set_flag(name, min(said[name], _most_in_bf16(layout)))


def _recipe(said: Settings) -> str:
    """Megatron-LM's recipe for 8-bit scales; not delayed if some layers stay in bf16."""
    late = said["fp8_recipe"] == "delayed" and said["first_last_layers_bf16"]
    recipe: str = said["fp8_recipe"]
    return recipe if recipe in _RECIPES and not late else "tensorwise"


def _most_in_bf16(layout: Layout) -> int:
    """Most layers that may stay in bf16 at each end in Megatron-LM."""
    return layout.config.model.num_layers // layout.grid.pp


def _lost(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    memory, training = layout.config.memory, layout.config.training
    yield from _lost_of_parallelism(said, layout, runs)
    if training.precision == "fp64":
        yield "Megatron-LM computes in fp32 at most; precision = fp64"
    if training.precision == "fp16":
        if said["grad_reduce_in_bf16"]:
            yield "gradients of fp16 are sent in fp32 there: grad_reduce_in_bf16 was left out"
        if said["loss_scale"] is None and said["check_for_nan_in_loss_and_grad"]:
            yield (
                "it takes a loss that is not finite for gradients that overflow, while it searches "
                "a loss scale (check_for_nan_in_loss_and_grad)"
            )
    yield from _lost_of_formats(said, layout)
    yield from lost_of_memory(memory, runs)
    if layout.config.optimizer.needs_rounding:
        kinds = state_types(said)
        if layout.config.parallel.sharding.splits_optimizer:
            yield f"it keeps masters in fp32, and rounds moments to the nearest: {kinds}"
        else:
            yield f"use_precision_aware_optimizer was left out: it needs ZeRO-1 or more ({kinds})"
    if said["cuda_graph_impl"] and said["check_for_nan_in_loss_and_grad"]:
        yield (
            "its graphs of whole iterations (cuda_graph_impl) leave no room for the host to look: "
            "check_for_nan_in_loss_and_grad was left out"
        )
    if said["deterministic_mode"]:
        yield "deterministic_mode wants NCCL_ALGO in the environment, such as NCCL_ALGO=^NVLS"
        if memory.cross_entropy_loss_fusion:
            yield "its fused loss is not deterministic: cross_entropy_loss_fusion was left out"
    if said["distributed_timeout_minutes"] % 1:
        yield "distributed_timeout_minutes are whole there, and were rounded up"
    if said["reset_attention_mask"]:
        yield (
            "the causal kernels of Transformer Engine look at no mask: with them tokens attend "
            "beyond their documents, whatever --reset-attention-mask says"
        )
    yield from _attention_over_ranks(layout)
    yield from _connections(layout)
    corpora = " ".join(said["data_path"])
    made_up = MOCK in said["data_path"]
    tokenizer = said["tokenizer_model"] or ("NullTokenizer" if made_up else "trained on it")
    yield (
        f"corpus, tokenizer and checkpoints are yours to give: data_path = {corpora}, "
        f"tokenizer_model = {tokenizer}"
    )
    if sets := " ".join(said["valid_data_path"]):
        yield f"valid_data_path = {sets}: --multiple-validation-sets there, and --train-data-path"


def _lost_of_formats(said: Settings, layout: Layout) -> Iterator[str]:
    """Sentences about linear layers in 8 or 4 bits, and those that keep bf16."""
    training = layout.config.training
    if training.fp8_format and training.fp4_format:
        recipe = f"fp8_format = {training.fp8_format}, fp8_recipe = {said['fp8_recipe']}"
        yield f"it multiplies in 8 or in 4 bits, not in both: {recipe} was left out"
    elif training.fp8_format and training.fp8_recipe not in _RECIPES:
        yield f"it has no {training.fp8_recipe} recipe (fp8_recipe): tensorwise stands in its place"
    elif training.fp8_format and training.fp8_recipe != _recipe(said):
        yield (
            "it delays no scales where some layers keep bf16 (first_last_layers_bf16): "
            "fp8_recipe = tensorwise stands in place of delayed"
        )
    most = _most_in_bf16(layout)
    for name in in_bf16(said)[1:]:
        if said[name] > most:
            yield f"a stage keeps {most} of its layers in bf16 at most: not {name} = {said[name]}"


def _lost_of_parallelism(said: Settings, layout: Layout, runs: Layout) -> Iterator[str]:
    parallel = layout.config.parallel
    gathers = parallel.sharding.splits_optimizer and parallel.overlap_param_gather
    if gathers and not parallel.overlap_grad_reduce:
        yield "overlap_param_gather was left out: it needs --overlap-grad-reduce"
    if parallel.ddp_reduce_scatter_with_fp32_accumulation and layout.grid.dp_replicate > 1:
        yield (
            "ddp_reduce_scatter_with_fp32_accumulation was left out: it does not go with "
            f"num_distributed_optimizer_instances = {layout.grid.dp_replicate}"
        )
    if parallel.overlap_param_gather_with_optimizer_step and not _gathers_early(layout, runs):
        yield (
            "overlap_param_gather_with_optimizer_step was left out: it needs ZeRO-1, "
            "--overlap-grad-reduce and several pipeline stages a rank"
        )


def _lost_of_the_loss(said: Settings, layout: Layout) -> Iterator[str]:
    if said["cuda_graph_impl"]:
        yield (
            "its graphs of whole iterations (cuda_graph_impl) cannot divide the loss by the tokens "
            "of the global batch (--calculate-per-token-loss): each microbatch is averaged first"
        )
    elif (ranks := layout.grid.tp * layout.grid.cp) > 1 and (names := auxiliary(said, layout)):
        yield (
            "with --calculate-per-token-loss it divides losses of experts by the number of ranks "
            f"that share a microbatch (tp x cp), too: of {' and '.join(names)}, 1/{ranks} has an "
            "effect"
        )
    model = layout.config.model
    if model.mtp_num_layers and model.hybrid_override_pattern is None:
        yield (
            "it divides the losses of multi-token prediction by the number of tokens that have a "
            "next one, not by that of their depth (mtp_loss_scaling_factor)"
        )


def _attention_over_ranks(layout: Layout) -> Iterator[str]:
    """Settings of context parallelism that Megatron-LM's attention kernels refuse at their first
    run."""
    model, ways = layout.config.model, layout.config.parallel.cp_comm_type
    if layout.grid.cp == 1:
        return
    for what, has, lacks in (
        ("windows (window_size)", model.window_size is not None, ("p2p", "a2a+p2p")),
        (
            "multi_latent_attention",
            model.query_dim != model.value_dim,
            ("a2a", "all_gather"),
        ),
    ):
        if has and (lost := [way for way in dict.fromkeys(ways) if way in lacks]):
            yield f"Transformer Engine refuses {what} with cp_comm_type {' '.join(lost)}"


def _connections(layout: Layout) -> Iterator[str]:
    """Requirements on environment variables that Megatron-LM checks."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if layout.config.parallel.sharding.splits_gradients:
        yield f"its FSDP needs {name} not to be 1"
    elif layout.grid.tp > 1 or layout.grid.cp > 1:
        yield f"before Blackwell, tensor and context parallelism need {name}=1 set"
