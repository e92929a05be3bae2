"""Which settings mean something only where another one gives them something to act on."""

from fivefold.config.config import Config
from fivefold.config.rules.run_dependents import OF_RUNS, Dependents
from fivefold.config.training import OF_MUON, SCALE_BY_TRIAL


def _pipelined(config: Config) -> bool:
    return config.parallel.pipeline_model_parallel_size != 1


def _lays_stages(config: Config) -> bool:
    """Whether several stages on a rank can be useful, also with a schedule on a single rank."""
    return _pipelined(config) or config.parallel.pipeline_schedule != "auto"


def _shares_stages(config: Config) -> bool:
    """Whether several ranks hold the same pipeline stage."""
    parallel = config.parallel
    data = parallel.data_parallel_shard_size, parallel.num_distributed_optimizer_instances
    others = parallel.context_parallel_size, parallel.tensor_model_parallel_size
    return any(degree != 1 for degree in (*data, *others))


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
        ("pipeline_dx_first",),
        "pipeline_model_parallel_size",
        _pipelined,
        "is an order of what pipeline ranks send",
        ("--pipeline-model-parallel-size 2",),
        searched=True,
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
        ("overlap_param_gather_with_optimizer_step",),
        "overlap_param_gather",
        lambda c: c.parallel.overlap_param_gather,
        "gathers parameters before they are used",
        ("--overlap-param-gather",),
    ),
    Dependents(
        ("ddp_reduce_scatter_with_fp32_accumulation",),
        "grad_reduce_in_bf16",
        lambda c: c.sent_gradient_bytes == 2,
        "sums in fp32 what is sent in bf16",
        ("--grad-reduce-in-bf16",),
    ),
    Dependents(
        ("zero_qgz_partition_size",),
        "zero_quantized_gradients",
        lambda c: c.parallel.zero_quantized_gradients,
        "divides an all-to-all of gradients",
        ("--zero-quantized-gradients",),
    ),
    Dependents(
        ("recompute_method",),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity is not None,
        "chooses layers that are recomputed",
        ("--recompute-granularity full", "--recompute-granularity selective"),
    ),
    Dependents(
        ("recompute_num_layers",),
        "recompute_granularity",
        lambda c: c.memory.recompute_granularity == "full" or c.memory.recomputes_first_layers,
        "counts layers of full recomputation, or with recompute_method block of selective",
        (
            "--recompute-granularity full --recompute-method block",
            "--recompute-granularity selective --recompute-method block",
        ),
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
        ("min_offloaded_tensor_size", "activation_offload_fraction"),
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
        lambda c: c.memory.optimizer_off_device,
        "is for offloaded optimizer state",
        ("--optimizer-cpu-offload",),
    ),
    Dependents(
        ("param_offload_path",),
        "param_cpu_offload",
        lambda c: c.memory.param_cpu_offload,
        "is for offloaded weights",
        ("--param-cpu-offload",),
    ),
    Dependents(
        (
            "main_params_dtype",
            "store_param_remainders",
            "main_grads_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
        ),
        "use_precision_aware_optimizer",
        lambda c: c.optimizer.use_precision_aware_optimizer,
        "chooses a type",
        ("--use-precision-aware-optimizer",),
    ),
    Dependents(
        ("main_params_dtype", "store_param_remainders", "main_grads_dtype"),
        "precision",
        lambda c: c.training.precision == "bf16",
        "is for training in bf16",
        ("--bf16",),
    ),
    Dependents(
        OF_MUON,
        "optimizer",
        lambda c: c.optimizer.optimizer == "muon",
        "is for matrices that Muon updates",
        ("--optimizer muon",),
    ),
    Dependents(
        ("loss_scale", *SCALE_BY_TRIAL),
        "precision",
        lambda c: c.training.precision == "fp16",
        "is for gradients in fp16, which would vanish unscaled",
        ("--fp16",),
    ),
    Dependents(
        SCALE_BY_TRIAL,
        "loss_scale",
        lambda c: c.optimizer.loss_scale is None,
        "is for a scale that is found by trial",
        ("--loss-scale none",),
    ),
    Dependents(
        (
            *("fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
            "disable_parameter_transpose_cache",
        ),
        "fp8_format",
        lambda c: c.training.fp8_format is not None,
        "scales 8-bit tensors",
        ("--fp8-format hybrid",),
    ),
    Dependents(
        ("fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
        "fp8_recipe",
        lambda c: c.training.fp8_recipe == "delayed",
        "scales by the largest elements of earlier steps",
        ("--fp8-recipe delayed",),
    ),
    Dependents(
        ("fp8_param_gather",),
        "fp8_format",
        lambda c: c.training.fp8_format is not None,
        "gathers weights that are multiplied in 8 bits",
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
        ("eval_iters",),
        "full_validation",
        lambda c: not c.training.full_validation,
        "is the length of evaluations that read a part of each set",
        ("--no-full-validation",),
    ),
    Dependents(
        ("full_validation", "valid_data_path"),
        "eval_interval",
        lambda c: c.training.evaluates,
        "is for evaluations",
        ("--eval-interval 10",),
    ),
    *OF_RUNS,
)
