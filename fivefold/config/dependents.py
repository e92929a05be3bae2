"""Which settings mean something only where another one gives them something to act on."""

from collections.abc import Callable
from dataclasses import dataclass

from fivefold.config.config import Config


@dataclass(frozen=True)
class Dependents:
    """Settings that have an effect only with certain values of another setting.

    Attributes:
        names: names of the dependent settings.
        on: name of the setting that they depend on.
        alive: function that tells whether they have an effect.
        why: their purpose, as the rest of a sentence that begins with "it".
        add: flags with which they have an effect.
        searched: whether `fivefold plan` searches values of `on`.
        refused: whether they are refused here if they have no effect. Others are refused elsewhere,
            or do no harm; they are only left out if a flag removes the setting that a recipe chose
            them for.
    """

    names: tuple[str, ...]
    on: str
    alive: Callable[[Config], bool]
    why: str
    add: tuple[str, ...] = ()
    searched: bool = False
    refused: bool = True


def _pipelined(config: Config) -> bool:
    return config.parallel.pipeline_model_parallel_size != 1


def _lays_stages(config: Config) -> bool:
    """Whether several stages on a rank can be useful, also with a schedule on a single rank."""
    return _pipelined(config) or config.parallel.pipeline_schedule != "auto"


def _shares_stages(config: Config) -> bool:
    """Whether several ranks hold the same pipeline stage."""
    parallel = config.parallel
    degrees = (
        parallel.data_parallel_shard_size,
        parallel.num_distributed_optimizer_instances,
        parallel.context_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    return any(degree != 1 for degree in degrees)


def sums_in_buckets(config: Config, strategy: str | None = None) -> bool:
    """Whether gradients are summed in buckets of any size, not in blocks of FSDP2.

    Args:
        config: the configuration.
        strategy: sharding strategy; None: that of the configuration.
    """
    strategy = strategy or config.parallel.data_parallel_sharding_strategy
    return strategy == "no_shard" and config.training.precision != "bf16"


def _has_experts(config: Config) -> bool:
    return config.model.num_experts is not None


DEPENDENTS = (
    Dependents(
        ("sequence_parallel", "tp_comm_overlap"),
        "tensor_model_parallel_size",
        lambda c: c.parallel.tensor_model_parallel_size != 1,
        "is for tensor-parallel ranks",
        refused=False,
    ),
    Dependents(
        ("tp_comm_overlap",),
        "sequence_parallel",
        lambda c: c.parallel.sequence_parallel,
        "hides the gathers and scatters of split tokens",
        ("--sequence-parallel",),
        refused=False,
    ),
    Dependents(
        (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_schedule",
            "pipeline_in_flight_limit",
            "num_sequence_slices",
            "microbatch_group_size_per_virtual_pipeline_stage",
        ),
        "pipeline_model_parallel_size",
        _pipelined,
        "was chosen for pipeline ranks",
        refused=False,
    ),
    Dependents(
        (
            "num_layers_per_virtual_pipeline_stage",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        "pipeline_model_parallel_size",
        _lays_stages,
        "lays stages over pipeline ranks",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("recompute_in_flight_limit",),
        "pipeline_model_parallel_size",
        _lays_stages,
        "limits the microbatches that wait on pipeline ranks for their backward",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("num_virtual_stages_per_pipeline_rank",),
        "pipeline_model_parallel_size",
        lambda c: _lays_stages(c) or c.parallel.num_virtual_stages_per_pipeline_rank == 1,
        "lays stages over pipeline ranks",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("cp_comm_type", "hierarchical_context_parallel_sizes"),
        "context_parallel_size",
        lambda c: c.parallel.context_parallel_size != 1,
        "is for context-parallel ranks",
        ("--context-parallel-size 2",),
        searched=True,
    ),
    Dependents(
        ("expert_model_parallel_size", "expert_tensor_parallel_size"),
        "data_parallel_shard_size",
        _shares_stages,
        "splits experts over ranks that share a pipeline stage",
        refused=False,
    ),
    Dependents(
        ("moe_enable_deepep", "moe_shared_expert_overlap", "overlap_moe_expert_parallel_comm"),
        "expert_model_parallel_size",
        lambda c: c.parallel.expert_model_parallel_size != 1,
        "hides messages between expert-parallel ranks",
        refused=False,
    ),
    Dependents(
        ("delay_wgrad_compute",),
        "overlap_moe_expert_parallel_comm",
        lambda c: c.parallel.overlap_moe_expert_parallel_comm,
        "fills the time of messages that pairs hide",
        ("--overlap-moe-expert-parallel-comm",),
        refused=False,
    ),
    Dependents(
        ("moe_deepep_num_sms",),
        "moe_enable_deepep",
        lambda c: c.parallel.moe_enable_deepep,
        "is what DeepEP's kernels take",
        ("--moe-enable-deepep",),
    ),
    Dependents(
        (
            "moe_router_load_balancing_type",
            "moe_z_loss_coeff",
            "moe_router_dtype",
            "moe_input_jitter_eps",
            "moe_router_force_load_balancing",
            "moe_expert_capacity_factor",
            "moe_expert_rank_capacity_factor",
            "moe_pad_expert_input_to_capacity",
        ),
        "num_experts",
        _has_experts,
        "is for routers of experts",
        ("--num-experts 8",),
    ),
    Dependents(
        ("moe_aux_loss_coeff",),
        "moe_router_load_balancing_type",
        lambda c: "aux" in str(c.experts.moe_router_load_balancing_type),
        "is the factor of a balancing loss",
        ("--moe-router-load-balancing-type aux_loss",),
    ),
    Dependents(
        ("moe_router_bias_update_rate",),
        "moe_router_enable_expert_bias",
        lambda c: c.model.moe_router_enable_expert_bias,
        "moves biases of experts",
        ("--moe-router-enable-expert-bias",),
    ),
    Dependents(
        ("moe_token_drop_policy",),
        "moe_expert_capacity_factor",
        lambda c: c.experts.limits_rows,
        "chooses rows to drop",
        ("--moe-expert-capacity-factor 1.0",),
    ),
    Dependents(
        ("pipeline_max_unsharded_stages",),
        "data_parallel_sharding_strategy",
        lambda c: c.parallel.data_parallel_sharding_strategy == "optim_grads_params",
        "keeps sharded parameters gathered",
        refused=False,
    ),
    Dependents(
        ("ddp_bucket_size",),
        "data_parallel_sharding_strategy",
        lambda c: c.parallel.data_parallel_sharding_strategy == "no_shard",
        "is for gradients that are not reduced layer by layer",
        ("--data-parallel-sharding-strategy no_shard",),
        searched=True,
    ),
    Dependents(
        ("ddp_bucket_size",),
        "precision",
        lambda c: c.training.precision != "bf16",
        "is for gradients that are not reduced layer by layer",
        ("--fp32",),
    ),
    Dependents(
        ("overlap_param_gather_with_optimizer_step",),
        "overlap_param_gather",
        lambda c: c.parallel.overlap_param_gather,
        "gathers parameters before they are used",
        ("--overlap-param-gather",),
    ),
    Dependents(
        ("ddp_reduce_scatter_with_fp32_accumulation",),
        "grad_reduce_in_bf16",
        lambda c: c.parallel.grad_reduce_in_bf16,
        "sums in fp32 what is sent in bf16",
        ("--grad-reduce-in-bf16",),
    ),
    Dependents(
        ("recompute_method", "recompute_num_layers"),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity == "full",
        "chooses layers of full recomputation",
        ("--recompute-granularity full",),
    ),
    Dependents(
        ("recompute_modules",),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity == "selective",
        "chooses modules of selective recomputation",
        ("--recompute-granularity selective",),
    ),
    Dependents(
        ("tiled_mlp_num_shards",),
        "recompute_granularity",
        lambda c: c.memory.remakes_mlp,
        "is for dense MLPs that are recomputed",
        ("--recompute-granularity selective --recompute-modules core_attn mlp",),
    ),
    Dependents(
        ("offload_modules", "offload_tensors"),
        "fine_grained_activation_offloading",
        lambda c: c.memory.fine_grained_activation_offloading,
        "chooses activations to move",
        refused=False,
    ),
    Dependents(
        ("min_offloaded_tensor_size",),
        "fine_grained_activation_offloading",
        lambda c: c.memory.fine_grained_activation_offloading,
        "chooses activations to move",
        ("--fine-grained-activation-offloading",),
    ),
    Dependents(
        ("cross_entropy_fusion_impl",),
        "cross_entropy_loss_fusion",
        lambda c: c.memory.cross_entropy_loss_fusion,
        "is how a loss is fused",
        ("--cross-entropy-loss-fusion",),
    ),
    Dependents(
        ("optimizer_offload_fraction", "optimizer_offload_path"),
        "optimizer_cpu_offload",
        lambda c: c.memory.optimizer_cpu_offload,
        "is for offloaded optimizer state",
        ("--optimizer-cpu-offload",),
    ),
    Dependents(
        ("fp8_recipe",),
        "fp8_format",
        lambda c: c.training.fp8_format is not None,
        "scales 8-bit tensors",
        ("--fp8-format hybrid",),
    ),
    Dependents(
        ("compile_backend",),
        "compile",
        lambda c: c.training.compile,
        "is for compiled layers",
        ("--compile",),
    ),
    Dependents(
        ("eval_iters",),
        "eval_interval",
        lambda c: c.training.evaluates or c.training.eval_iters == 0,
        "is the length of evaluations",
        ("--eval-interval 10",),
    ),
    Dependents(
        ("rotary_base", "rotary_percent"),
        "position_embedding_type",
        lambda c: c.model.position_embedding_type == "rope",
        "is for rotary positions",
        ("--position-embedding-type rope",),
    ),
    Dependents(
        (
            "rope_scaling_factor",
            "rope_low_freq_factor",
            "rope_high_freq_factor",
            "rope_original_max_position_embeddings",
        ),
        "use_rope_scaling",
        lambda c: c.model.use_rope_scaling,
        "is for scaled rotary positions",
        ("--use-rope-scaling",),
    ),
    Dependents(
        (
            "rotary_scaling_factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "yarn_correction_range_round_to_int",
        ),
        "rope_type",
        lambda c: c.model.rope_type == "yarn",
        "is for positions that YaRN stretches",
        ("--rope-type yarn",),
    ),
    Dependents(
        ("window_attn_skip_freq",),
        "window_size",
        lambda c: c.model.window_size is not None,
        "chooses the layers that have a window",
        ("--window-size 128",),
    ),
    Dependents(
        ("mtp_loss_scaling_factor",),
        "mtp_num_layers",
        lambda c: c.model.mtp_num_layers > 0,
        "weighs the loss of further predictions",
        ("--mtp-num-layers 1",),
    ),
    Dependents(
        ("tokenizer_vocab_size",),
        "tokenizer_model",
        lambda c: c.data.tokenizer_model is None,
        "is of a tokenizer to train",
        ("--tokenizer-model none",),
    ),
    Dependents(
        ("min_lr", "lr_decay_iters"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style != "constant",
        "is for a learning rate that decays",
        ("--lr-decay-style cosine",),
    ),
    Dependents(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        "lr_decay_style",
        lambda c: c.optimizer.lr_decay_style == "WSD",
        "is for the final decay of WSD",
        ("--lr-decay-style WSD",),
    ),
    Dependents(
        ("lr_warmup_init",),
        "lr_warmup_iters",
        lambda c: c.optimizer.lr_warmup_iters > 0,
        "starts a warm-up",
        ("--lr-warmup-iters 1",),
    ),
    Dependents(
        ("profile_step_start", "profile_step_end", "profile_ranks"),
        "profile",
        lambda c: c.logging.profile,
        "chooses what is profiled",
        ("--profile",),
    ),
    Dependents(
        ("manual_gc_interval",),
        "manual_gc",
        lambda c: c.training.manual_gc,
        "counts the steps between collections",
        ("--manual-gc",),
    ),
)
