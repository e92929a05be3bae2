"""Settings of DeepSpeed that change neither results nor communication here."""

# What is logged, and where.
_LOGGING = """
    steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level comms_logger
    flops_profiler timers tensorboard wandb.group wandb.team
"""
# How it runs and is checked; what is kept of it; "warmup_type" without a warm-up.
_RUN = """
    disable_python_gc zero_allow_untested_optimizer zero_force_ds_cpu_optimizer aio checkpoint
    nebula autotuning dataloader_drop_last check_overflow managed_gradient_accumulation
    _comment fp16.auto_cast vocabulary_size optimizer.legacy_fusion optimizer.params.torch_adam
    optimizer.params.fused optimizer.params.ns_method scheduler.params.warmup_type
    bf16.immediate_grad_update bf16.check_grad_overflow
"""
# How what is sent is cut and scaled: sums are plain sums here, and weights are cut by heads.
_MESSAGES = """
    prescale_gradients gradient_predivide_factor sparse_gradients disable_allgather
    use_data_before_expert_parallelism seq_parallel_communication_data_type pipeline.seed_layers
    pipeline.pipe_partitioned pipeline.grad_partitioned tensor_parallel.vocab_parallel_
    tensor_parallel.preset_model tensor_parallel.partition_config
    tensor_parallel.keep_module_on_host
"""
# Of "zero_optimization": buffers, and the order in which they are filled.
_ZERO = """
    contiguous_gradients reduce_scatter reduce_bucket_size allgather_ stage3_
    use_multi_rank_bucket_allreduce compute_grad_norm load_from_fp32_weights elastic_checkpoint
    sub_group_size ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment
    memory_efficient_linear leaf_module pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    prefetch_bucket_size cpu_offload_use_pin_memory mics_hierarchical_params_gather
    param_persistence_ model_persistence_ max_live_parameters max_reuse_distance gather_16bit_
    module_granularity_ use_all_reduce_for_fetch_params
"""
# Of "offload_optimizer" and "offload_param" there; "nvme_path" with another device.
_OFFLOAD = "buffer_ max_in_cpu pin_memory pipeline fast_init cpuadam_ nvme_path"
_PATHS = (
    *f"{_LOGGING} {_RUN} {_MESSAGES}".split(),
    *(f"zero_optimization.{name}" for name in _ZERO.split()),
    *(f"zero_optimization.offload_optimizer.{name}" for name in _OFFLOAD.split()),
    *(f"zero_optimization.offload_param.{name}" for name in _OFFLOAD.split()),
)


def is_harmless(path: str) -> bool:
    """Whether a setting changes nothing here, whatever its value."""
    return path.startswith(_PATHS)
