"""A planned layout as settings that a trainer takes: Fivefold, Megatron-LM, torchtitan, DeepSpeed.

What a trainer has no setting for is said in `Export.missing`, never left out in silence.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fivefold.check import Layout, check
from fivefold.config.config import Config
from fivefold.config.sources import to_toml
from fivefold.errors import ConfigError


@dataclass(frozen=True)
class Export:
    """Settings for a trainer.

    Attributes:
        text: of the file, or the command line's flags.
        missing: what the layout asks for and these settings do not say, a sentence each.
    """

    text: str
    missing: tuple[str, ...]


def export(layout: Layout, target: str) -> Export:
    """The settings of `layout` for one of `TARGETS`."""
    return TARGETS[target](layout)


def _fivefold(layout: Layout) -> Export:
    text = to_toml(layout.config, changes_only=True)
    try:
        check(layout.config, layout.grid.world_size)
    except ConfigError as error:
        return Export(text, tuple(mistake.what for mistake in error.mistakes))
    return Export(text, ())


# ---------------------------------------------------------------- Megatron-LM


def _megatron(layout: Layout) -> Export:
    lines = [
        *_megatron_model(layout.config),
        *_megatron_parallel(layout),
        *_megatron_memory(layout.config),
        *_megatron_training(layout.config),
    ]
    return Export(" \\\n".join(lines) + "\n", tuple(_megatron_missing(layout)))


def _flag(name: str, value: Any) -> Iterator[str]:
    """A flag of Megatron-LM's style: nothing for None and False."""
    flag = "--" + name.replace("_", "-")
    if value is True:
        yield flag
    elif isinstance(value, tuple):
        if value:
            yield f"{flag} {' '.join(map(str, value))}"
    elif value is not None and value is not False:
        yield f"{flag} {_quoted(value)}"


def _quoted(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"'{text}'" if set(text) & set("|*() []") else text


def _flags(section: object, *names: str) -> Iterator[str]:
    for name in names:
        yield from _flag(name, getattr(section, name))


def _megatron_model(config: Config) -> Iterator[str]:
    model = config.model
    yield from _flags(model, "num_layers", "hidden_size", "num_attention_heads")
    yield from _flag("ffn_hidden_size", model.ffn_size)
    if model.num_query_groups and not model.multi_latent_attention:
        yield "--group-query-attention"
        yield from _flags(model, "num_query_groups")
    yield from _flags(model, "kv_channels", "normalization", "norm_epsilon", "qk_layernorm")
    yield from _flags(model, "position_embedding_type", "max_position_embeddings")
    if model.position_embedding_type == "rope":
        yield from _flag("rotary_base", int(model.rotary_base))
        if model.use_rope_scaling:
            yield from _flags(model, "use_rope_scaling", "rope_scaling_factor")
    if model.gated_linear_unit and model.activation_func == "silu":
        yield "--swiglu"
    if not model.add_bias_linear:
        yield "--disable-bias-linear"
    yield from _flags(model, "add_qkv_bias", "untie_embeddings_and_output_weights")
    yield from _flags(model, "vocab_size", "make_vocab_size_divisible_by")
    for name in ("hidden_dropout", "attention_dropout"):
        yield f"--{name.replace('_', '-')} {getattr(model, name):g}"
    if model.num_experts:
        yield from _flags(model, "num_experts", "moe_router_topk", "moe_ffn_hidden_size")
        yield from _flags(model, "moe_shared_expert_intermediate_size", "moe_layer_freq")
        yield "--moe-grouped-gemm"
    if model.multi_latent_attention:
        yield from _flags(model, "multi_latent_attention", "q_lora_rank", "kv_lora_rank")
        yield from _flags(model, "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    yield from _flag("mtp_num_layers", model.mtp_num_layers or None)


def _megatron_parallel(layout: Layout) -> Iterator[str]:
    parallel = layout.config.parallel
    yield from _flags(parallel, "tensor_model_parallel_size", "sequence_parallel")
    yield from _flags(parallel, "pipeline_model_parallel_size")
    text = parallel.pipeline_model_parallel_layout
    if text is None or not text.startswith("v:"):
        yield from _flag("pipeline_model_parallel_layout", text)
    yield from _flags(
        parallel,
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "microbatch_group_size_per_virtual_pipeline_stage",
    )
    if parallel.context_parallel_size > 1:
        yield from _flags(parallel, "context_parallel_size", "cp_comm_type")
        yield from _flags(parallel, "hierarchical_context_parallel_sizes")
    if layout.config.model.num_experts:
        yield from _flags(parallel, "expert_model_parallel_size", "expert_tensor_parallel_size")
        yield from _flags(parallel, "moe_token_dispatcher_type", "overlap_moe_expert_parallel_comm")
    strategy = parallel.data_parallel_sharding_strategy
    if strategy == "optim":
        yield "--use-distributed-optimizer"
    elif strategy != "no_shard":
        yield "--use-megatron-fsdp"
        yield f"--data-parallel-sharding-strategy {strategy}"
    if parallel.num_distributed_optimizer_instances > 1:
        yield from _flags(parallel, "num_distributed_optimizer_instances")
    yield from _flags(parallel, "overlap_grad_reduce")
    gathers = parallel.overlap_param_gather and strategy != "no_shard"
    yield from _flag("overlap_param_gather", gathers)
    yield from _flags(parallel, "tp_comm_overlap", "grad_reduce_in_bf16")


def _megatron_memory(config: Config) -> Iterator[str]:
    memory = config.memory
    yield from _flags(memory, "recompute_granularity")
    if memory.recompute_granularity == "full":
        yield from _flags(memory, "recompute_method", "recompute_num_layers")
    elif memory.recompute_granularity == "selective":
        yield from _flags(memory, "recompute_modules")
    if memory.fine_grained_activation_offloading:
        yield from _flags(memory, "fine_grained_activation_offloading", "offload_modules")
    if memory.cross_entropy_loss_fusion:
        yield from _flags(memory, "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
    if memory.optimizer_cpu_offload:
        yield from _flags(memory, "optimizer_cpu_offload", "optimizer_offload_fraction")


def _megatron_training(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    yield from _flags(training, "micro_batch_size", "global_batch_size", "seq_length")
    yield from _flags(training, "train_iters")
    yield from _flag("bf16", training.precision == "bf16")
    if training.fp8_format:
        yield from _flags(training, "fp8_format", "fp8_recipe")
    yield from _flags(optimizer, "lr", "min_lr", "lr_decay_style", "lr_warmup_iters")
    yield from _flags(optimizer, "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    yield from _flags(optimizer, "clip_grad")


def _megatron_missing(layout: Layout) -> Iterator[str]:
    config, parallel = layout.config, layout.config.parallel
    if layout.schedule not in ("1f1b", "interleaved_1f1b", "combined_1f1b"):
        yield (
            f"Megatron-LM has no {layout.schedule} schedule: it runs "
            f"{'interleaved 1F1B' if layout.split.num_virtual > 1 else '1F1B'} instead"
        )
    if (parallel.pipeline_model_parallel_layout or "").startswith("v:"):
        yield "Megatron-LM lays stages in a loop; the V-shaped layout was left out"
    if config.training.precision != "bf16":
        yield f"Megatron-LM's counterpart of {config.training.precision} is to give no --bf16"
    if config.memory.cross_entropy_fusion_impl == "linear" and (
        config.memory.cross_entropy_loss_fusion
    ):
        yield "--cross-entropy-fusion-impl linear needs a recent Megatron-LM"
    if config.model.activation_func != "silu" or not config.model.gated_linear_unit:
        yield f"the activation {config.model.activation_func} may need a flag of its own"
    yield "tokenizer, data and checkpoint flags are yours to add"


# ----------------------------------------------------------------- torchtitan

_TITAN_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "GPipe",
        "1f1b": "1F1B",
        "interleaved_1f1b": "Interleaved1F1B",
        "looped_bfs": "LoopedBFS",
        "interleaved_zb": "InterleavedZeroBubble",
        "zb_v": "ZBVZeroBubble",
        "dualpipe_v": "DualPipeV",
    }
)


def _torchtitan(layout: Layout) -> Export:
    config, grid = layout.config, layout.grid
    training, optimizer, parallel = config.training, config.optimizer, config.parallel
    pipelined = grid.pp > 1
    local = training.micro_batch_size * (layout.num_microbatches if pipelined else 1)
    sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    always = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    degrees: dict[str, Any] = {
        "data_parallel_replicate_degree": grid.dp_replicate if sharded else grid.dp,
        "data_parallel_shard_degree": grid.dp_shard if sharded else 1,
        "fsdp_reshard_after_forward": "always" if always else "never",
        "tensor_parallel_degree": grid.tp,
        "enable_async_tensor_parallel": parallel.tp_comm_overlap,
        "context_parallel_degree": grid.cp,
        "expert_parallel_degree": grid.ep,
        "pipeline_parallel_degree": grid.pp,
    }
    if pipelined:
        schedule = _TITAN_SCHEDULES.get(layout.schedule, "1F1B")
        degrees["pipeline_parallel_schedule"] = schedule
        degrees["pipeline_parallel_microbatch_size"] = training.micro_batch_size
        degrees["module_fqns_per_model_part"] = _modules(layout)
    tables: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": "custom"},
        "optimizer": {"name": "AdamW", "lr": optimizer.lr, "eps": optimizer.adam_eps},
        "training": {
            "local_batch_size": local,
            "global_batch_size": training.global_batch_size,
            "seq_len": training.seq_length,
            "steps": training.train_iters,
            "max_norm": optimizer.clip_grad,
            "mixed_precision_param": {"bf16": "bfloat16"}.get(training.precision, "float32"),
        },
        "parallelism": degrees,
        "activation_checkpoint": _titan_checkpointing(config),
    }
    return Export(_as_toml(tables), tuple(_titan_missing(layout)))


def _modules(layout: Layout) -> list[list[str]]:
    """Names of what each stage holds, as torchtitan calls them."""
    return [
        [
            *(["tok_embeddings"] if stage.embedding else []),
            *(f"layers.{layer}" for layer in stage.layers),
            *(["norm", "output"] if stage.head else []),
        ]
        for stage in layout.split.stages
    ]


def _titan_checkpointing(config: Config) -> dict[str, Any]:
    granularity = config.memory.recompute_granularity
    if granularity == "selective":
        return {"mode": "selective", "selective_ac_option": "op"}
    return {"mode": granularity or "none"}


def _titan_missing(layout: Layout) -> Iterator[str]:
    config, parallel, memory = layout.config, layout.config.parallel, layout.config.memory
    yield "model.name and model.flavor must name a model that torchtitan has, of these dimensions"
    if parallel.data_parallel_sharding_strategy in ("optim", "optim_grads"):
        yield (
            "torchtitan always shards parameters; reshard_after_forward = never keeps them "
            "gathered between forward and backward, which is nearest to ZeRO-2"
        )
    if layout.grid.pp > 1 and layout.schedule not in _TITAN_SCHEDULES:
        yield f"torchtitan has no {layout.schedule} schedule: 1F1B stands in its place"
    if memory.recompute_granularity == "selective":
        yield f"recompute of {' '.join(memory.recompute_modules)} became its per-op selection"
    if memory.recompute_granularity == "full" and memory.recompute_method == "block":
        yield f"recompute of {memory.recompute_num_layers} layers a stage became that of all"
    if layout.grid.tp > 1 and not parallel.sequence_parallel:
        yield "torchtitan's tensor parallelism always splits the sequence too"
    if memory.fine_grained_activation_offloading:
        yield "activation offloading has no setting there"
    if memory.cross_entropy_loss_fusion:
        yield "a fused loss has no setting there"
    if layout.grid.etp not in (1, layout.grid.tp):
        yield f"expert tensor parallelism {layout.grid.etp} has no setting there"
    if config.model.mtp_num_layers:
        yield "multi-token prediction has no setting there"
    if layout.grid.cp > 1:
        yield f"cp_comm_type {' '.join(parallel.cp_comm_type)} is chosen there by rotate method"


def _as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    lines = []
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


# ------------------------------------------------------------------ DeepSpeed

_ZERO = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def _deepspeed(layout: Layout) -> Export:
    config, training = layout.config, layout.config.training
    stage = _ZERO.index(config.parallel.data_parallel_sharding_strategy)
    optimizer = config.optimizer
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {
            "overlap_comm": config.parallel.overlap_grad_reduce,
            "contiguous_gradients": True,
            "reduce_scatter": True,
        }
    if config.memory.optimizer_cpu_offload:
        ratio = config.memory.optimizer_offload_fraction
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": ratio}
    if layout.grid.dp_replicate > 1:
        zero["mics_shard_size"] = layout.grid.dp_shard
    settings = {
        "train_batch_size": training.global_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": layout.num_microbatches,
        "gradient_clipping": optimizer.clip_grad,
        "bf16": {"enabled": training.precision == "bf16"},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.adam_beta1, optimizer.adam_beta2],
                "eps": optimizer.adam_eps,
                "weight_decay": optimizer.weight_decay,
            },
        },
        "zero_optimization": zero,
    }
    if layout.grid.tp > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.grid.tp}
    return Export(json.dumps(settings, indent=2) + "\n", tuple(_deepspeed_missing(layout)))


def _deepspeed_missing(layout: Layout) -> Iterator[str]:
    grid, memory = layout.grid, layout.config.memory
    strategy = layout.config.parallel.data_parallel_sharding_strategy
    yield f"the model, and its sequence length {layout.config.training.seq_length}, are code there"
    if grid.pp > 1:
        yield f"pipeline stages are code there: PipelineModule(num_stages={grid.pp})"
        if layout.schedule != "1f1b":
            yield f"DeepSpeed's pipeline runs 1F1B, not {layout.schedule}"
        if strategy in ("optim_grads", "optim_grads_params"):
            yield "its pipeline takes ZeRO stage 0 or 1 only"
    if grid.cp > 1:
        yield f"sequences are split in code there: Ulysses over {grid.cp} ranks"
    if grid.ep > 1:
        yield f"expert parallelism is code there: deepspeed.moe.layer.MoE(ep_size={grid.ep})"
    if grid.tp > 1 and layout.config.parallel.sequence_parallel:
        yield "its tensor parallelism does not split the sequence: activations need more memory"
    if grid.dp_replicate > 1:
        yield "mics_shard_size shards within groups for ZeRO-3 (MiCS) only"
    if memory.recompute_granularity:
        yield "recomputation is code there: deepspeed.checkpointing.checkpoint"
    if memory.fine_grained_activation_offloading:
        yield "activation offloading is code there"


TARGETS: Mapping[str, Callable[[Layout], Export]] = MappingProxyType(
    {
        "fivefold": _fivefold,
        "megatron": _megatron,
        "torchtitan": _torchtitan,
        "deepspeed": _deepspeed,
    }
)
"""Trainers that settings can be written for."""
