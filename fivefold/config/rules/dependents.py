"""Settings that have an effect only together with another setting."""

from fivefold.config.config import SECTION_SETTINGS
from fivefold.config.rules.model_dependents import OF_MODELS
from fivefold.config.rules.orphan import Dependents, where
from fivefold.config.training import DYNAMIC_LOSS_SCALE, OF_MUON

_LAYS_STAGES = "pipeline_model_parallel_size != 1 or pipeline_schedule != auto"
"""Several stages on one rank can be useful, even with a schedule on a single rank."""
_SHARES_STAGES = (
    "data_parallel_shard_size != 1 or num_distributed_optimizer_instances != 1 or "
    "context_parallel_size != 1 or tensor_model_parallel_size != 1"
)
"""Several ranks hold the same pipeline stage."""

_OF_EXPERTS = " ".join(
    setting.name
    for section in ("model", "experts")
    for setting in SECTION_SETTINGS[section]
    if setting.name.startswith("moe_")
)
"""Settings of experts and of their router."""

DEPENDENTS = (
    where(_OF_EXPERTS, "num_experts != none", "is for experts", "--num-experts 8"),
    where(
        "expert_model_parallel_size expert_tensor_parallel_size moe_token_dispatcher_type "
        "moe_enable_deepep moe_shared_expert_overlap overlap_moe_expert_parallel_comm "
        "delay_wgrad_compute",
        "num_experts != none",
        "is for experts on several ranks",
    ),
    where(
        "sequence_parallel",
        "tensor_model_parallel_size != 1",
        "splits tokens over tensor-parallel ranks",
        "--tensor-model-parallel-size 2",
    ),
    where(
        "tp_comm_overlap",
        "tensor_model_parallel_size != 1",
        "is for tensor-parallel ranks",
        refused=False,
    ),
    where(
        "tp_comm_overlap",
        "sequence_parallel = true",
        "hides the gathers and scatters of split tokens",
        refused=False,
    ),
    where(
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_schedule "
        "pipeline_in_flight_limit num_sequence_slices "
        "microbatch_group_size_per_virtual_pipeline_stage",
        "pipeline_model_parallel_size != 1",
        "was chosen for pipeline ranks",
        refused=False,
    ),
    where(
        "pipeline_dx_first",
        "pipeline_model_parallel_size != 1",
        "is an order of what pipeline ranks send",
        "--pipeline-model-parallel-size 2",
    ),
    where(
        "num_layers_per_virtual_pipeline_stage pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        _LAYS_STAGES,
        "lays stages over pipeline ranks",
        "--pipeline-model-parallel-size 2",
    ),
    where(
        "recompute_in_flight_limit",
        _LAYS_STAGES,
        "limits the microbatches that wait on pipeline ranks for their backward",
        "--pipeline-model-parallel-size 2",
    ),
    where(
        "num_virtual_stages_per_pipeline_rank",
        f"{_LAYS_STAGES} or num_virtual_stages_per_pipeline_rank = 1",
        "lays stages over pipeline ranks",
        "--pipeline-model-parallel-size 2",
    ),
    where(
        "cp_comm_type hierarchical_context_parallel_sizes",
        "context_parallel_size != 1",
        "is for context-parallel ranks",
        "--context-parallel-size 2",
    ),
    where(
        "expert_model_parallel_size expert_tensor_parallel_size",
        _SHARES_STAGES,
        "splits experts over ranks that share a pipeline stage",
        refused=False,
    ),
    where(
        "moe_enable_deepep moe_shared_expert_overlap overlap_moe_expert_parallel_comm",
        "expert_model_parallel_size != 1",
        "hides messages between expert-parallel ranks",
        refused=False,
    ),
    where(
        "delay_wgrad_compute",
        "overlap_moe_expert_parallel_comm = true",
        "fills the time of messages that a pair of a forward and a backward hides",
    ),
    where("moe_deepep_num_sms", "moe_enable_deepep = true", "is what DeepEP's kernels take"),
    Dependents(
        ("moe_aux_loss_coeff",),
        "moe_router_load_balancing_type",
        lambda c: "aux" in str(c.experts.moe_router_load_balancing_type),
        "is the factor of a balancing loss",
        ("--moe-router-load-balancing-type aux_loss",),
    ),
    where(
        "moe_router_bias_update_rate",
        "moe_router_enable_expert_bias = true",
        "moves biases of experts",
    ),
    Dependents(
        ("moe_token_drop_policy",),
        "moe_expert_capacity_factor",
        lambda c: c.experts.limits_rows,
        "chooses rows to drop",
        ("--moe-expert-capacity-factor 1.0",),
    ),
    where(
        "pipeline_max_unsharded_stages",
        "data_parallel_sharding_strategy = optim_grads_params",
        "keeps sharded parameters gathered",
        refused=False,
    ),
    where(
        "ddp_bucket_size",
        "data_parallel_sharding_strategy = no_shard",
        "is for gradients that are not reduced layer by layer",
    ),
    where(
        "overlap_param_gather_with_optimizer_step",
        "overlap_param_gather = true",
        "gathers parameters before they are used",
    ),
    Dependents(
        ("ddp_reduce_scatter_with_fp32_accumulation",),
        "grad_reduce_in_bf16",
        lambda c: c.sent_gradient_bytes == 2,
        "sums in fp32 what is sent in bf16",
        ("--grad-reduce-in-bf16",),
    ),
    where(
        "zero_qgz_partition_size",
        "zero_quantized_gradients = true",
        "divides an all-to-all of gradients",
    ),
    where(
        "recompute_method",
        "recompute_granularity != none",
        "chooses layers that are recomputed",
        "--recompute-granularity full",
        "--recompute-granularity selective",
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
    where(
        "recompute_modules",
        "recompute_granularity = selective",
        "chooses modules of selective recomputation",
    ),
    Dependents(
        ("tiled_mlp_num_shards",),
        "recompute_granularity",
        lambda c: c.memory.recomputes_mlp,
        "is for dense MLPs that are recomputed",
        ("--recompute-granularity selective --recompute-modules core_attn mlp",),
    ),
    where(
        "offload_modules offload_tensors min_offloaded_tensor_size activation_offload_fraction",
        "fine_grained_activation_offloading = true",
        "chooses activations to move",
    ),
    where(
        "cross_entropy_fusion_impl", "cross_entropy_loss_fusion = true", "is how a loss is fused"
    ),
    Dependents(
        ("optimizer_offload_fraction", "optimizer_offload_path"),
        "optimizer_cpu_offload",
        lambda c: c.memory.optimizer_off_device,
        "is for offloaded optimizer state",
        ("--optimizer-cpu-offload",),
    ),
    where("param_offload_path", "param_cpu_offload = true", "is for offloaded weights"),
    where(
        "main_params_dtype store_param_remainders main_grads_dtype exp_avg_dtype exp_avg_sq_dtype",
        "use_precision_aware_optimizer = true",
        "chooses a type",
    ),
    where(
        "main_params_dtype store_param_remainders main_grads_dtype",
        "precision = bf16",
        "is for training in bf16",
        "--bf16",
    ),
    where(" ".join(OF_MUON), "optimizer = muon", "is for matrices that Muon updates"),
    where("qk_clip_alpha qk_clip_threshold", "qk_clip = true", "says how logits are clipped"),
    where(
        " ".join(("loss_scale", *DYNAMIC_LOSS_SCALE)),
        "precision = fp16",
        "is for gradients in fp16, which would vanish unscaled",
        "--fp16",
    ),
    where(" ".join(DYNAMIC_LOSS_SCALE), "loss_scale = none", "is for a dynamic loss scale"),
    where(
        "fp8_recipe fp8_margin fp8_amax_history_len fp8_amax_compute_algo "
        "disable_parameter_transpose_cache",
        "fp8_format != none",
        "scales 8-bit tensors",
        "--fp8-format hybrid",
    ),
    where(
        "fp8_margin fp8_amax_history_len fp8_amax_compute_algo",
        "fp8_recipe = delayed",
        "scales by the largest elements of earlier steps",
    ),
    where(
        "fp8_param_gather",
        "fp8_format != none",
        "gathers weights that are multiplied in 8 bits",
        "--fp8-format hybrid",
    ),
    where("compile_backend", "compile = true", "is for compiled layers"),
    Dependents(
        ("eval_iters",),
        "eval_interval",
        lambda c: c.training.evaluates or c.training.eval_iters == 0,
        "is the length of evaluations",
        ("--eval-interval 10",),
    ),
    where(
        "eval_iters",
        "full_validation = false",
        "is the length of evaluations that read a part of each set",
    ),
    Dependents(
        ("full_validation", "valid_data_path"),
        "eval_interval",
        lambda c: c.training.evaluates,
        "is for evaluations",
        ("--eval-interval 10",),
    ),
    where(
        "document_length",
        "reset_attention_mask = true",
        "is for tokens that attend to their document alone",
    ),
    *OF_MODELS,
    where(
        "full_validation", "data_path != mock", "reads each sample once, and mock data never ends"
    ),
    where("valid_data_path sft", "data_path != mock", "is for text", refused=False),
    where("tokenizer_vocab_size", "tokenizer_model = none", "is for training a tokenizer"),
    where("fim_data", "data_path != mock", "rearranges text", refused=False),
    where("fim_data", "sft = false", "rearranges documents, not conversations"),
    where(
        "fim_rate fim_spm_rate fim_split_sample fim_no_prefix "
        "fim_prefix_token fim_middle_token fim_suffix_token",
        "fim_data = true",
        "is for rearranged documents (infilling)",
    ),
    where(
        "fim_fragment_rate",
        "fim_split_sample != none",
        "is for documents that have parts",
    ),
    where(
        "load_adapter ckpt_step finetune moe_use_upcycling",
        "load != none",
        "says what is taken of the weights to start from",
        "--load FOLDER",
    ),
    where("moe_use_upcycling", "num_experts != none", "is for experts", "--num-experts 8"),
    where(
        "moe_upcycling_granularity",
        "moe_use_upcycling = true",
        "says how experts are made from the MLP of a dense model",
    ),
    where(
        "train_iters lr_decay_iters lr_warmup_iters lr_wsd_decay_iters",
        "train_samples = none",
        "counts the steps of a run that does not count samples",
    ),
    where(
        "rampup_batch_size lr_decay_samples lr_warmup_samples lr_wsd_decay_samples",
        "train_samples != none",
        "is for a run that counts samples",
        "--train-samples 1000000",
    ),
    where(
        "min_lr decoupled_min_lr lr_decay_iters lr_decay_samples",
        "lr_decay_style != constant",
        "is for a learning rate that decays",
        "--lr-decay-style cosine",
    ),
    where(
        "decoupled_lr",
        "lora_rank = none",
        "is for the embedding and the output layer, which adapters leave as they are",
    ),
    where(
        "decoupled_min_lr",
        "decoupled_lr != none",
        "is the lowest learning rate of embedding and output layer, if they have their own",
        "--decoupled-lr 1e-3",
    ),
    where(
        "start_weight_decay end_weight_decay",
        "weight_decay_incr_style != constant",
        "is for a weight decay that grows",
        "--weight-decay-incr-style linear",
    ),
    where(
        "weight_decay",
        "weight_decay_incr_style = constant",
        "is that of every step",
    ),
    where(
        "lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style",
        "lr_decay_style = WSD",
        "is for the final decay of WSD",
    ),
    where(
        "lr_warmup_init",
        "lr_warmup_iters != 0 or train_samples != none",
        "starts a warm-up",
        "--lr-warmup-iters 1",
    ),
    where(
        "lr_warmup_init",
        "lr_warmup_samples != 0 or train_samples = none",
        "starts a warm-up",
        "--lr-warmup-samples 1",
    ),
    where(
        "profile_step_start profile_step_end profile_ranks use_pytorch_profiler "
        "record_memory_history",
        "profile = true",
        "chooses what is profiled",
    ),
    where(
        "non_persistent_local_ckpt_dir replication_jump",
        "non_persistent_save_interval != 0",
        "says where states in memory are kept",
        "--non-persistent-save-interval 20",
    ),
    where(
        "save_retain_interval",
        "keep_latest_k != none",
        "keeps some of the checkpoints that later ones replace",
        "--keep-latest-k 1",
    ),
    where("spiky_loss_factor", "check_for_spiky_loss = true", "says what a spike is"),
    Dependents(
        ("bad_step_action",),
        "check_for_nan_in_loss_and_grad",
        lambda c: c.training.must_be_finite or c.training.check_for_spiky_loss,
        "says what follows a step that is found to be bad",
        ("--check-for-nan-in-loss-and-grad", "--check-for-spiky-loss"),
    ),
    where("manual_gc_interval", "manual_gc = true", "counts the steps between collections"),
)
