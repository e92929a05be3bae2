"""Arguments of Megatron-LM that change neither what is computed nor what is sent here."""

# Beginnings of names of what belongs to another program, or to a switch of its own.
_OF_OTHERS = """
    bert_ biencoder_ dino_ ft_ grpo_ ict_ img_ inference_ inprocess_ kitchen_attention_ langrl_
    mamba_ mask_ moe_hybridep_ num_layers_at_ refit_ relative_attention_ retriever_ rl_
    max_tokens_to_oom swin_ vision_backbone_ indexer_ app_tag_
"""
# Beginnings of names of what is logged, how files are laid out, and how data are fetched.
_TOLD = """
    log_ tensorboard_ wandb_ one_logger_ timing_ straggler_ ckpt_ dist_ckpt_ dataloader_ adlr_
    error_injection_ flight_recorder_
"""
# Kernels, of which each system has its own
_KERNELS = """
    attention_backend transformer_impl use_flash_attn masked_softmax_fusion no_persist_layer_norm
    persist_layer_norm moe_grouped_gemm moe_use_legacy_grouped_gemm moe_permute_fusion
    moe_router_fusion attention_softmax_in_fp32 disable_jit_fuser apply_query_key_layer_scaling
    use_te_activation_func use_fused_weighted_squared_relu clone_scatter_output_in_embedding
    deprecated_use_mcore_models use_mcore_models onnx_safe flash_decode te_rng_tracker
    inference_rng_tracker enable_experimental use_mamba_mem_eff_path moe_router_padding_for_fp8
    moe_router_padding_for_quantization fp4_recipe
"""
# Messages, streams and buffers
_MESSAGES = """
    async_tensor_model_parallel_allreduce tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    tp_comm_bootstrap_backend tp_comm_overlap_cfg overlap_p2p_comm overlap_p2p_comm_warmup_flush
    batch_p2p_comm pipeline_model_parallel_comm_backend use_ring_exchange_p2p
    defer_embedding_wgrad_compute wgrad_deferral_limit variable_seq_lengths
    scatter_gather_tensors_in_pipeline align_grad_reduce align_param_gather ddp_num_buckets
    ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective gradient_reduce_div_fusion
    distributed_backend local_rank lazy_mpu_init distributed_timeout_seconds_after_init
    enable_gloo_process_groups high_priority_stream_groups nccl_ub disable_symmetric_registration
    use_sharp sharp_enabled_group create_all_gather_group fsdp_manual_registration
    fsdp_double_buffer suggested_communication_unit_size nccl_communicator_config_path
    keep_fp8_transpose_cache reuse_grad_buf_for_mxfp8_param_ag symmetric_ar_type
    distribute_saved_activations cuda_graph_warmup_steps moe_flex_dispatcher_backend
    moe_deepep_num_sms pin_cpu_grads pin_cpu_params overlap_cpu_optimizer_d2h_h2d
    use_torch_optimizer_for_cpu_offload ep_overlap_early_attn_memory_release
"""
# How it starts, ends and is watched
_RUN = """
    perform_initialization use_cpu_initialization init_model_with_meta_device exit_signal
    exit_signal_handler exit_signal_handler_for_dataloader manual_gc_eval logging_level
    empty_unused_memory_level train_sync_interval barrier_with_L1_time rerun_mode
    check_for_large_grads result_rejected_tracker_filename disable_straggler_on_startup
    run_workload_inspector_server enable_msc enable_one_logger calc_ft_timeouts memory_snapshot_path
    config_logger_dir dump_param_to_param_group_map moe_per_layer_logging test_mode
"""
# Checkpoints
_CHECKPOINTS = """
    auto_detect_ckpt_format use_dist_ckpt_deprecated use_persistent_ckpt_worker
    exit_on_missing_checkpoint no_save_optim no_save_rng no_load_optim no_load_rng
    use_checkpoint_args use_mp_args_from_checkpoint_args use_tokenizer_model_from_checkpoint_args
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler strict_fsdp_dtensor_load
    ckpt_step non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo
    non_persistent_save_interval non_persistent_local_ckpt_dir replication replication_jump
    replication_factor distrib_optim_fully_reshardable_mem_efficient
"""
# How data are read, and tokens made
_DATA = """
    num_workers mmap_bin_files create_attention_mask_in_dataloader num_dataset_builder_threads
    mid_level_dataset_surplus object_storage_cache_path vocab_extra_ids tokenizer_metadata
    tokenizer_special_tokens legacy_tokenizer tiktoken_pattern tiktoken_num_special_tokens
    tiktoken_special_tokens tokenizer_sentencepiece_legacy tokenizer_hf_use_fast
    tokenizer_hf_include_special_tokens trust_remote_code sample_rate short_seq_prob
    multiple_validation_sets allow_ambiguous_pad_tokens data_sharding
"""
# Of relatives
_OF_RELATIVES = """
    DDP_impl data_impl deepspeed deepspeed_activation_checkpointing kill_switch_path
    no_pipeline_parallel abort_on_unmet_fused_kernel_constraints valid_num_workers
    sync_tp_duplicated_parameters no_query_key_layer_scaling use_flash_attn_v2
    use_flash_attn_builder use_flash_attn_triton no_contiguous_buffers_in_local_ddp mmap_warmup
    sanity_check_dataloader_interval transformer_timers structured_logs structured_logs_dir
    cpu_torch_adam ds_fused_adam contigious_checkpointing zero_contigious_gradients
    zero_reduce_bucket_size zero_allgather_bucket_size zero_reduce_scatter codecarbon_dir
    no_load_lr_state use_te universal_checkpoint reset_iteration repeated_dataloader
    create_moe_param_group
"""
# Of LoongForge
_OF_LOONGFORGE = """
    enable_fa_within_mla no_detail_log detail_log_interval allow_missing_adapter_checkpoint
    use_fast_tokenizer padding_side sft_num_preprocess_workers sft_data_streaming
    streaming_buffer_size packing_buffer_size sft_dataset_config save_hf save_hf_path
    reduce_variable_seq_shape_p2p_comm should_get_embedding_weights_for_mtp use_dsa_fused
    use_dsa_sp_first absorb_backend enable_log_tensor save_tensor save_tensor_dir
    tp_comm_overlap_bootstrap_backend disable_rotate_activation dsa_indexer_rotate_activation
    disable_turn_off_bucketing
"""
# Of MindSpeed-LLM
_OF_MINDSPEED = """
    use_fused_swiglu use_fused_rmsnorm use_fused_rotary_pos_emb no_shared_storage
    enable_hf2mg_convert enable_mg2hf_convert model_type_hf hf_cfg_dir handler_name
    moe_permutation_async_comm gemm_gradient_accumulation_fusion tokenizer_not_use_fast
    tokenizer_padding_side mla_fa_without_pad mla_mm_split disable_gloo_group
    use_cp_send_recv_overlap use_fused_ring_attention_update ai_framework lora_fusion
    use_ascend_coc coc_fused_kernel moe_alltoall_overlap_comm moe_fb_overlap enable_mla_absorb
    use_sparse_flash_attn use_fused_lightning_indexer use_fused_lightning_indexer_loss
    use_fused_moe_token_permute_and_unpermute mtp_mem_efficient_logits shape_order hccl_op_mode
    workers use_triton_gdn init_norm_weight_in_fp32 topk_softmax_in_fp32
"""
_DERIVED = """
    rank world_size data_parallel_size params_dtype transformer_pipeline_model_parallel_size
    virtual_pipeline_model_parallel_size consumed_train_samples skipped_train_samples
    consumed_valid_samples consumed_train_bins iteration use_custom_fsdp
"""
DERIVED = tuple(_DERIVED.split())
"""What its checks derive from other arguments, and log with them."""
_NAMES = frozenset(
    f"{_KERNELS} {_MESSAGES} {_RUN} {_CHECKPOINTS} {_DATA} {_OF_RELATIVES} {_OF_LOONGFORGE} "
    f"{_OF_MINDSPEED}".split()
)
_BEGINNINGS = tuple(f"{_OF_OTHERS} {_TOLD}".split())


def is_harmless(name: str) -> bool:
    """Whether an argument, of any value, changes nothing here."""
    return name in _NAMES or name.startswith(_BEGINNINGS)
