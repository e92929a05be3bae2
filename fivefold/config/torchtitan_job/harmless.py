"""Settings of torchtitan that change neither what is computed nor what is sent here."""

# What is logged and traced, and where; what a job is called.
_LOGGING = """
    job.description job.print_ job.save_config_file job.config_file job.use_for_integration_test
    debug.print_config debug.save_config_file debug.enable_structured_logging
    profiling.save_ profiling.profile_freq profiling.profiler_ profiling.memory_snapshot_
    profiling.trace_post_processor metrics.disable_color_printing metrics.enable_color_printing
    metrics.save_ model.print_after_conversion comm.trace_buf_size comm.save_traces_
    training.gc_debug debug.detect_anomaly debug.spmd_typechecking memory_estimation.disable_
"""
# Kernels, and how they are launched and checked.
_KERNELS = """
    optimizer.implementation optimizer.fused optimizer.pattern parallelism.spmd_backend
    parallelism.enable_fsdp_symm_mem parallelism.enable_compiled_autograd
    training.disable_cuda_graphs activation_checkpoint.preserve_rng_state
    activation_checkpoint.determinism_check activation_checkpoint.early_stop
    activation_checkpoint.debug activation_checkpoint.visualize_memory_budget_pareto
    activation_checkpoint.per_op_sac_ activation_checkpoint.force_recompute_mm_
    model.norm_type debug.deterministic_warn_only quantize.linear.mx.mxfp8_dim1_cast_kernel_choice
    quantize.linear.mx.use_fp8_dim1_cast_triton_kernel
    quantize.linear.float8.force_recompute_fp8_weight_in_bwd
    quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp
"""
# How data are fetched, and files of checkpoints written.
_FILES = """
    training.dataloader. validation.dataloader. checkpoint.folder checkpoint.export_dtype
    checkpoint.enable_ft_dataloader_checkpoints checkpoint.last_save_ checkpoint.interval_type
    checkpoint.save_folder
"""
_PATHS = tuple(f"{_LOGGING} {_KERNELS} {_FILES}".split())


def is_harmless(path: str) -> bool:
    """Whether a setting, of any value, changes nothing here."""
    return path.startswith(_PATHS)
