"""Flags of Megatron-LM (August 2026) that have another name in Fivefold, or no counterpart."""

ONE_WAY = "there is one way, which needs no choice"
_MESSAGES = "messages between stages are always asynchronous, each direction by itself"
_OPTIMIZERS = "AdamW and Muon are the optimizers"
_BATCH = "a batch is whole microbatches on every rank, or refused"
_SIGNALS = "SIGTERM, SIGUSR1 and Ctrl-C end a run, which saves its step before"
_RATES = "all weights but biases and norms have one weight decay"
_RECORDER = "NCCL's last 2,000 calls are written to the run folder when one times out"
STEPS = "Fivefold counts optimizer steps"
_WHOLE = "checkpoints hold weights, moments and the place in the data; each rank writes its part"
_LOGGED = "what is measured of a step is in metrics.jsonl, and on request in TensorBoard and W&B"

MEGATRON_NAMES: tuple[tuple[str, str, str], ...] = (
    # Degrees and stages
    ("--num-layers", "encoder_num_layers decoder_num_layers", ""),
    ("--seq-length", "decoder_seq_length", ""),
    ("--decoder-first-pipeline-num-layers", "num_layers_in_first_pipeline_stage", ""),
    ("--decoder-last-pipeline-num-layers", "num_layers_in_last_pipeline_stage", ""),
    ("--tp", "model_parallel_size", ""),
    ("", "use_tp_pp_dp_mapping", "ranks are in the order tp, cp, dp, pp, as there by default"),
    ("", "no_overlap_p2p_communication overlap_p2p_comm batch_p2p_comm", _MESSAGES),
    ("", "overlap_p2p_communication_warmup_flush pipeline_model_parallel_comm_backend", _MESSAGES),
    ("", "deallocate_pipeline_outputs variable_seq_lengths use_ring_exchange_p2p", _MESSAGES),
    (
        "--pipeline-schedule zb_h1",
        "defer_embedding_wgrad_compute wgrad_deferral_limit",
        "it computes weight gradients of all layers where a rank would wait",
    ),
    # Data parallelism
    (
        "--data-parallel-sharding-strategy optim_grads",
        "torch_fsdp2_no_reshard_after_forward",
        "ZeRO-2 keeps weights gathered from forward to backward",
    ),
    (
        "--num-distributed-optimizer-instances",
        "outer_dp_sharding_strategy enable_full_sharding_in_hsdp create_all_gather_group",
        "replicas of a sharding group; sums of gradients cross them once a step",
    ),
    (
        "",
        "ddp_average_in_collective ddp_pad_buckets_for_high_nccl_busbw no_align_param_gather "
        "align_grad_reduce no_align_grad_reduce align_param_gather no_gradient_reduce_div_fusion "
        "fsdp_double_buffer suggested_communication_unit_size fsdp_manual_registration "
        "megatron_fsdp_version use_nccl_ub disable_symmetric_registration use_sharp "
        "sharp_enabled_group nccl_communicator_config_path use_gloo_process_groups lazy_mpu_init",
        ONE_WAY,
    ),
    (
        "",
        "high_priority_stream_groups",
        "groups of tensor, context, pipeline and expert parallelism have it",
    ),
    (
        "",
        "flight_recorder_dump_path flight_recorder_trace_buffer_size "
        "flight_recorder_dump_on_timeout flight_recorder_include_stack_trace",
        _RECORDER,
    ),
    # Experts
    ("--moe-enable-deepep", "moe_flex_dispatcher_backend", "of --moe-token-dispatcher-type flex"),
    ("--moe-deepep-num-sms", "moe_flex_dispatcher_num_sms", ""),
    ("--num-experts", "num_moe_experts", ""),
    ("--recompute-modules moe", "moe_layer_recompute", "with --recompute-granularity selective"),
    ("", "use_grouped_gemm_for_shared_expert use_grouped_gemm_for_dense_mlp", ONE_WAY),
    # Batch and duration
    ("--rampup-batch-size", "step_batch_size_schedule", "it grows by equal parts"),
    ("--global-batch-size", "decrease_batch_size_if_needed", _BATCH),
    ("", "eval_global_batch_size eval_micro_batch_size", "evaluations have the training's batches"),
    ("", "exit_signal_handler exit_signal", _SIGNALS),
    ("", "skip_train", "fivefold eval RUN evaluates a checkpoint"),
    ("", "start_eval_at_iter", "evaluations begin after --eval-interval steps"),
    ("--check-for-spiky-loss", "check_for_large_grads", ""),
    (
        "--check-loss-across-dp-replicas-interval",
        "rerun_mode",
        "replicas that compare what they computed find silent errors",
    ),
    ("--check-for-nan-in-loss-and-grad", "check_for_nan_in_loss", ""),
    ("--manual-gc-interval", "manual_gc_eval no_manual_gc_eval", "evaluations collect nothing"),
    ("", "empty_unused_memory_level", ONE_WAY),
    # Optimizer
    ("--weight-decay", "apply_wd_to_qk_layernorm no_weight_decay_cond_type", _RATES),
    ("--lr-wsd-decay-iters", "wsd_decay_steps", STEPS),
    (
        "",
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
        "the schedule is that of the settings, also where a run goes on",
    ),
    (
        "",
        "sgd_momentum lion_beta1 lion_beta2",
        _OPTIMIZERS,
    ),
    ("", "muon_scalar_optimizer", "AdamW updates what is no matrix of a layer"),
    (
        "",
        "muon_tp_mode",
        "matrices are orthogonalised whole, each on one of the ranks that hold its parts",
    ),
    ("", "muon_no_split_qkv", "Q, K and V are orthogonalised each by itself"),
    (
        "",
        "muon_fp32_matmul_prec muon_use_syrk",
        "it multiplies in bf16 where the model computes in 16 bits, else as the model",
    ),
    ("", "muon_coefficient_type", "its coefficients are those called quintic"),
    ("", "fp16_lm_cross_entropy", "losses are summed in fp32 at least"),
    ("", "init_method_xavier_uniform", "weights are normal, of --init-method-std"),
    ("", "data_parallel_random_init", "initial weights are the same in every layout"),
    # Model
    ("--activation-func gelu_tanh", "openai_gelu", ""),
    ("--activation-func quick_gelu", "quick_geglu", "gated unless --no-gated-linear-unit"),
    (
        "",
        "fp32_residual_connection",
        "the embedding's output alone is in fp32 there: the first sum, and all after it, have the "
        "type of the layers, as here",
    ),
    # Memory
    (
        "--fine-grained-activation-offloading",
        "cpu_offloading cpu_offloading_num_layers cpu_offloading_activations",
        "--offload-modules says which inputs wait in host memory",
    ),
    ("--param-cpu-offload", "cpu_offloading_weights", "with --optimizer-cpu-offload and ZeRO-3"),
    ("--sequence-parallel", "distribute_saved_activations", "it splits what is kept, too"),
    # Checkpoints
    (
        "",
        "no_save_optim no_save_rng ckpt_fully_parallel_save no_ckpt_fully_parallel_save "
        "ckpt_fully_parallel_load ckpt_assume_constant_structure dist_ckpt_format "
        "dist_ckpt_optim_fully_reshardable dist_ckpt_workers",
        _WHOLE,
    ),
    ("--async-save", "async_strategy use_persistent_ckpt_worker async_ckpt_use_cpu_shm", ""),
    (
        "",
        "use_checkpoint_args use_mp_args_from_checkpoint_args "
        "use_tokenizer_model_from_checkpoint_args",
        "config.toml of a run folder is a recipe: fivefold train RUN/config.toml",
    ),
    ("--load", "pretrained_checkpoint", "with --finetune, weights alone"),
    ("", "exit_on_missing_checkpoint", "a --load without a checkpoint is an error"),
    ("--keep-latest-k", "most_recent_k", ""),
    ("--non-persistent-save-interval", "non_persistent_ckpt_type", "its states are local"),
    ("--replication-jump", "replication replication_factor", ""),
    # Data
    (
        "",
        "tokenizer_hf_no_use_fast trust_remote_code tiktoken_pattern",
        "--tokenizer-model is a tokenizer.json, which needs no code",
    ),
    ("--vocab-size", "pad_vocab_size vocab_extra_ids", "--make-vocab-size-divisible-by pads it"),
    ("--data-path", "data_args_path", "it takes the words themselves"),
    ("", "test_data_path", "--split takes the test samples from the corpus"),
    ("", "sft_tokenizer_prompt_format chat_template", "--sft reads that of --tokenizer-model"),
    (
        "",
        "no_mmap_bin_files num_dataset_builder_threads no_create_attention_mask_in_dataloader "
        "dataloader_fast_cache_load dataloader_defer_npy_index_mmap mid_level_dataset_surplus",
        "tokens are read through memory maps, sample by sample; masks are made of documents",
    ),
    # Logs
    (
        "",
        "log_params_norm log_num_zeros_in_grad log_progress log_memory_to_tensorboard "
        "log_timers_to_tensorboard no_log_loss_scale_to_tensorboard "
        "log_validation_ppl_to_tensorboard log_world_size_to_tensorboard "
        "tensorboard_log_interval tensorboard_queue_size log_memory_interval "
        "log_device_memory_used log_energy timing_log_level timing_log_option "
        "barrier_with_L1_time wandb_save_dir wandb_entity logging_level",
        _LOGGED,
    ),
    (
        "--use-pytorch-profiler",
        "use_nsys_profiler nvtx_ranges",
        "with --profile: traces name pipeline actions and messages",
    ),
    (
        "--record-memory-history",
        "memory_snapshot_path",
        "with --profile; the snapshot is in the run folder",
    ),
    ("--log-straggler", "disable_straggler_on_startup straggler_minmax_count", ""),
    ("", "straggler_ctrlr_port no_one_logger one_logger_project one_logger_run_name", ONE_WAY),
    (
        "--max-restarts",
        "inprocess_restart enable_ft_package inprocess_max_iterations",
        "with --non-persistent-save-interval 20 ranks that live stay, and meet new ones",
    ),
)
"""Flags that are equivalent, names, and what differs; as `foreign.FOREIGN` has them."""
