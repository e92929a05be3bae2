"""Flags for Megatron-LM: the command line of `pretrain_gpt.py` (checked with its core 0.16.1)."""

from collections.abc import Iterator
from typing import Any

from fivefold.check import Layout
from fivefold.config.config import Config
from fivefold.config.memory import MemoryConfig
from fivefold.plan.export.settings import Export, command_line, flag

_RECIPES = ("delayed", "tensorwise", "mxfp8", "blockwise")
_MODULES = {"routed_experts": "moe"}  # recomputed there with all that is around them


def megatron(layout: Layout) -> Export:
    """The flags of a layout; Fivefold reads those that it has, too."""
    lines = [
        *_model(layout.config),
        *_parallel(layout),
        *_memory(layout.config.memory),
        *_training(layout.config),
    ]
    return Export(command_line(lines), tuple(_missing(layout)))


def _flag(name: str, value: Any) -> Iterator[str]:
    """A flag of Megatron-LM's style: nothing for None and False."""
    values = value if isinstance(value, tuple) else () if value is True else (value,)
    if value is True or (values and value is not None and value is not False):
        yield from flag(name.replace("_", "-"), *values)


def _flags(section: object, *names: str) -> Iterator[str]:
    for name in names:
        yield from _flag(name, getattr(section, name))


def _model(config: Config) -> Iterator[str]:
    model = config.model
    yield from _flags(model, "num_layers", "hidden_size", "num_attention_heads")
    yield from _flag("ffn_hidden_size", model.ffn_size)
    if model.num_query_groups and not model.multi_latent_attention:
        yield "--group-query-attention"
        yield from _flags(model, "num_query_groups")
    yield from _flags(model, "kv_channels", "normalization", "norm_epsilon")
    yield from _flag("qk_layernorm", model.qk_layernorm or model.multi_latent_attention)
    yield from _flags(model, "position_embedding_type")
    positions = max(model.max_position_embeddings, config.training.seq_length)
    yield from _flag("max_position_embeddings", positions)
    if model.window_size is not None:
        yield from flag("window-size", f"{model.window_size},0")
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
        yield from _flags(model, "moe_router_num_groups", "moe_router_group_topk")
        yield from _flags(model, "moe_shared_expert_intermediate_size", "moe_layer_freq")
        yield "--moe-grouped-gemm"
    if model.multi_latent_attention:
        yield from _flags(model, "multi_latent_attention", "q_lora_rank", "kv_lora_rank")
        yield from _flags(model, "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        yield from flag("rope-type", "rope")  # its default is another
    yield from _flag("mtp_num_layers", model.mtp_num_layers or None)


def _parallel(layout: Layout) -> Iterator[str]:
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
        if parallel.moe_token_dispatcher_type == "flex":
            yield from flag("moe-flex-dispatcher-backend", "deepep")
    strategy = parallel.data_parallel_sharding_strategy
    if strategy == "optim":
        yield "--use-distributed-optimizer"
    elif strategy != "no_shard":
        yield "--use-megatron-fsdp"
        yield from flag("data-parallel-sharding-strategy", strategy)
        yield from flag("ckpt-format", "fsdp_dtensor")
    if parallel.num_distributed_optimizer_instances > 1:
        yield from _flags(parallel, "num_distributed_optimizer_instances")
    yield from _flags(parallel, "overlap_grad_reduce")
    gathers = parallel.overlap_param_gather and strategy != "no_shard"
    yield from _flag("overlap_param_gather", gathers and parallel.overlap_grad_reduce)
    yield from _flags(parallel, "tp_comm_overlap", "grad_reduce_in_bf16")


def _memory(memory: MemoryConfig) -> Iterator[str]:
    yield from _flags(memory, "recompute_granularity")
    if memory.recompute_granularity == "full":
        yield from _flags(memory, "recompute_method", "recompute_num_layers")
    elif memory.recompute_granularity == "selective":
        modules = (_MODULES.get(module, module) for module in memory.recompute_modules)
        yield from _flag("recompute_modules", tuple(dict.fromkeys(modules)))
    if memory.fine_grained_activation_offloading:
        yield from _flags(memory, "fine_grained_activation_offloading", "offload_modules")
    if memory.cross_entropy_loss_fusion:
        yield from _flags(memory, "cross_entropy_loss_fusion", "cross_entropy_fusion_impl")
    if memory.optimizer_cpu_offload:
        yield from _flags(memory, "optimizer_cpu_offload", "optimizer_offload_fraction")
        yield from flag("use-precision-aware-optimizer")


def _training(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    yield from _flags(training, "micro_batch_size", "global_batch_size", "seq_length")
    yield from _flags(training, "train_iters")
    yield from _flag("bf16", training.precision == "bf16")
    if training.fp8_format:
        yield from _flags(training, "fp8_format")
        recipe = training.fp8_recipe
        yield from _flag("fp8_recipe", recipe if recipe in _RECIPES else "tensorwise")
    yield from _flags(training, "fp4_format")
    yield from _flags(optimizer, "lr", "min_lr", "lr_decay_style", "lr_warmup_iters")
    yield from _flags(optimizer, "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    yield from _flags(optimizer, "clip_grad")


def _missing(layout: Layout) -> Iterator[str]:
    config, parallel, memory = layout.config, layout.config.parallel, layout.config.memory
    model, training, grid = config.model, config.training, layout.grid
    interleaved = layout.split.num_virtual > 1
    if layout.schedule not in ("1f1b", "interleaved_1f1b", "combined_1f1b"):
        yield (
            f"Megatron-LM has no {layout.schedule} schedule: it runs "
            f"{'interleaved 1F1B' if interleaved else '1F1B'} instead"
        )
    if parallel.overlap_moe_expert_parallel_comm and grid.pp > 1 and not interleaved:
        yield "it hides experts' messages in a pipeline of several stages a rank only"
    if (parallel.pipeline_model_parallel_layout or "").startswith("v:"):
        yield "Megatron-LM lays stages in a loop; the V-shaped layout was left out"
    if training.precision != "bf16":
        yield f"Megatron-LM's counterpart of {training.precision} is to give no --bf16"
    if training.fp8_format and training.fp8_recipe not in _RECIPES:
        yield f"it has no {training.fp8_recipe} recipe: tensorwise stands in its place"
    if memory.recompute_granularity == "selective" and "routed_experts" in memory.recompute_modules:
        yield "it recomputes experts with their dispatch (moe), not alone"
    if memory.cross_entropy_fusion_impl == "linear" and memory.cross_entropy_loss_fusion:
        yield "--cross-entropy-fusion-impl linear needs a release after 0.16"
    if model.activation_func != "silu" or not model.gated_linear_unit:
        yield f"the activation {model.activation_func} may need a flag of its own"
    if model.num_experts:
        yield "the router's scores, groups and balancing are yours to add"
    if grid.dp * grid.cp * grid.tp > 1:
        yield _connections(layout)
    yield "tokenizer, data and checkpoint flags are yours to add"


def _connections(layout: Layout) -> str:
    """What it asserts of the environment."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if layout.config.parallel.data_parallel_sharding_strategy in ("no_shard", "optim"):
        return f"before Blackwell, tensor and context parallelism need {name}=1 set"
    return f"its FSDP needs {name} not to be 1"
