"""Settings for torchtitan: the command line of `torchtitan.train` (checked with 0.3.0)."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from fivefold.check import Layout
from fivefold.config.model import ModelConfig
from fivefold.plan.export.settings import Export, command_line, flag

_MODELS: Mapping[tuple[int, int, int], tuple[str, str]] = MappingProxyType(
    {
        (32, 4096, 128256): ("llama3", "llama3_8b"),
        (80, 8192, 128256): ("llama3", "llama3_70b"),
        (126, 16384, 128256): ("llama3", "llama3_405b"),
        (40, 5120, 151936): ("qwen3", "qwen3_14b"),
        (64, 5120, 151936): ("qwen3", "qwen3_32b"),
        (48, 2048, 151936): ("qwen3", "qwen3_30b_a3b"),
        (27, 2048, 102400): ("deepseek_v3", "deepseek_v3_16b"),
        (61, 7168, 129280): ("deepseek_v3", "deepseek_v3_671b"),
        (24, 2880, 201088): ("gpt_oss", "gpt_oss_20b"),
        (36, 2880, 201088): ("gpt_oss", "gpt_oss_120b"),
    }
)
"""Layers, hidden size and vocabulary -> a module of torchtitan and its configuration."""

_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved_1f1b": "Interleaved1F1B",
        "combined_1f1b": "Interleaved1F1B",
        "looped_bfs": "LoopedBFS",
        "interleaved_zb": "InterleavedZeroBubble",
        "zb_v": "ZBVZeroBubble",
        "dualpipe_v": "DualPipeV",
    }
)

_DECAYS = ("linear", "cosine")


def torchtitan(layout: Layout) -> Export:
    """The flags; the kind of recomputation comes last, as a subcommand."""
    lines = [
        *_model(layout.config.model),
        *_training(layout),
        *_parallelism(layout),
        *_optimizer(layout),
        _recomputation(layout),
    ]
    return Export(command_line(lines), tuple(_missing(layout)))


def _known(model: ModelConfig) -> tuple[str, str] | None:
    return _MODELS.get((model.num_layers, model.hidden_size, model.vocab_size))


def _model(model: ModelConfig) -> Iterator[str]:
    if known := _known(model):
        yield from flag("module", known[0])
        yield from flag("config", known[1])


def _training(layout: Layout) -> Iterator[str]:
    training, grid = layout.config.training, layout.grid
    together = layout.num_microbatches if grid.pp > 1 else 1
    yield from flag("training.local_batch_size", training.micro_batch_size * together)
    yield from flag("training.global_batch_size", training.global_batch_size)
    yield from flag("training.seq_len", training.seq_length)
    yield from flag("training.steps", training.train_iters)
    yield from flag("training.max_norm", layout.config.optimizer.clip_grad)
    kind = "bfloat16" if training.precision == "bf16" else "float32"
    yield from flag("training.mixed_precision_param", kind)
    if grid.pp > 1 or grid.ep > 1:
        yield from flag("training.disable_cuda_graphs")


def _parallelism(layout: Layout) -> Iterator[str]:
    parallel, grid = layout.config.parallel, layout.grid
    strategy = parallel.data_parallel_sharding_strategy
    sharded = strategy != "no_shard"

    def degree(name: str, size: int) -> Iterator[str]:
        yield from flag(f"parallelism.{name}_degree", size)

    yield from degree("data_parallel_replicate", grid.dp_replicate if sharded else grid.dp)
    yield from degree("data_parallel_shard", grid.dp_shard if sharded else 1)
    gathers = "always" if strategy == "optim_grads_params" else "never"
    yield from flag("parallelism.fsdp_reshard_after_forward", gathers)
    yield from degree("tensor_parallel", grid.tp)
    if grid.tp > 1 and not parallel.sequence_parallel:
        yield from flag("parallelism.no_enable_sequence_parallel")
    if parallel.tp_comm_overlap:
        yield from flag("compile.enable")
        yield from flag("compile.enable_async_tensor_parallel")
    yield from degree("context_parallel", grid.cp)
    yield from degree("expert_parallel", grid.ep)
    yield from degree("pipeline_parallel", grid.pp)
    if grid.pp > 1:
        schedule = _SCHEDULES.get(layout.schedule, "1F1B")
        if layout.split.num_virtual == 1 and schedule == "Interleaved1F1B":
            schedule = "1F1B"
        yield from flag("parallelism.pipeline_parallel_schedule", schedule)
        size = layout.config.training.micro_batch_size
        yield from flag("parallelism.pipeline_parallel_microbatch_size", size)
        yield from flag("parallelism.module_fqns_per_model_part", *_stages(layout))


def _stages(layout: Layout) -> Iterator[str]:
    """Names of what each stage holds, as torchtitan calls them."""
    for stage in layout.split.stages:
        first = ["tok_embeddings"] if stage.embedding else []
        last = ["norm", "lm_head"] if stage.head else []
        yield ",".join([*first, *(f"layers.{layer}" for layer in stage.layers), *last])


def _optimizer(layout: Layout) -> Iterator[str]:
    optimizer = layout.config.optimizer
    group = "optimizer.param_groups.0.optimizer_kwargs"
    yield from flag(f"{group}.lr", optimizer.lr)
    yield from flag(f"{group}.betas", optimizer.adam_beta1, optimizer.adam_beta2)
    yield from flag(f"{group}.eps", optimizer.adam_eps)
    yield from flag(f"{group}.weight_decay", optimizer.weight_decay)
    yield from flag("lr_scheduler.warmup_steps", optimizer.lr_warmup_iters)
    if optimizer.lr_decay_style in _DECAYS:
        yield from flag("lr_scheduler.decay_type", optimizer.lr_decay_style)
        yield from flag("lr_scheduler.min_lr_factor", optimizer.min_lr / optimizer.lr)


def _recomputation(layout: Layout) -> str:
    return f"activation-checkpoint:{layout.config.memory.recompute_granularity or 'none'}"


def _missing(layout: Layout) -> Iterator[str]:
    config, parallel, grid = layout.config, layout.config.parallel, layout.grid
    memory, training = config.memory, config.training
    if _known(config.model) is None:
        yield "--module and --config must name a model that torchtitan has, of these dimensions"
    if parallel.data_parallel_sharding_strategy in ("optim", "optim_grads"):
        yield (
            "torchtitan always shards parameters; fsdp_reshard_after_forward never keeps them "
            "gathered between forward and backward, which is nearest to ZeRO-2"
        )
    if grid.pp > 1 and layout.schedule not in _SCHEDULES:
        yield (
            f"torchtitan has no {layout.schedule} schedule: 1F1B stands in its place; fivefold "
            "schedule --torch-csv writes others for parallelism.pipeline_parallel_schedule_csv"
        )
    if memory.recompute_granularity == "selective":
        yield f"recompute of {' '.join(memory.recompute_modules)} became its per-op selection"
    if memory.recompute_granularity == "full" and memory.recompute_method == "block":
        yield f"recompute of {memory.recompute_num_layers} layers a stage became that of all"
    if memory.fine_grained_activation_offloading:
        yield "activation offloading has no setting there"
    if memory.cross_entropy_loss_fusion:
        yield "a fused loss belongs to the model's configuration there: loss"
    if memory.optimizer_cpu_offload:
        yield "training.enable_cpu_offload there moves parameters and gradients, too"
    if grid.etp > 1:
        yield f"expert tensor parallelism {grid.etp} has no setting there"
    if grid.ep > 1 and parallel.moe_token_dispatcher_type != "alltoall":
        yield "how tokens reach their experts belongs to the model's configuration there"
    if parallel.overlap_moe_expert_parallel_comm:
        yield "hiding experts' messages in pairs has no setting there"
    if training.fp8_format or training.fp4_format:
        yield "multiplications in 8 or 4 bits are converters of the model's configuration there"
    if config.optimizer.lr_decay_style not in _DECAYS:
        yield f"a {config.optimizer.lr_decay_style} learning rate is lr_scheduler.decay_ratio there"
    if config.model.mtp_num_layers:
        yield "multi-token prediction belongs to the model's configuration there"
    if grid.cp > 1 and parallel.cp_comm_type != ("all_gather",):
        yield f"context parallelism by {' '.join(parallel.cp_comm_type)} has no setting there"
    yield "data, tokenizer and checkpoints are those of the model's configuration"
