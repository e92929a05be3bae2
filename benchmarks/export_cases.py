"""Layouts to export: some that together use every setting, and a change of each single setting."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.layout import Layout

UNEVEN = "Et*4|(t*4|)*12t*3|t*3|t*3mL"
LAYOUTS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "dense": (
        "llama3-70b",
        64,
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "tp_comm_overlap": True,
            "pipeline_model_parallel_size": 4,
            "num_virtual_stages_per_pipeline_rank": 2,
            "microbatch_group_size_per_virtual_pipeline_stage": 4,
            "data_parallel_sharding_strategy": "optim",
            "grad_reduce_in_bf16": True,
        },
    ),
    "sharded": (
        "llama3-8b",
        64,
        {
            "context_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "data_parallel_shard_size": 16,
            "num_distributed_optimizer_instances": 2,
            "recompute_granularity": "full",
            "fp8_format": "hybrid",
        },
    ),
    "experts": (
        "deepseek-v3",
        256,
        {
            "pipeline_model_parallel_size": 8,
            "pipeline_model_parallel_layout": UNEVEN,
            "expert_model_parallel_size": 32,
            "moe_token_dispatcher_type": "flex",
            "overlap_moe_expert_parallel_comm": True,
            "delay_wgrad_compute": True,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "selective",
            "recompute_modules": ("mla_up_proj", "routed_experts"),
            "fp8_format": "hybrid",
            "fp8_recipe": "rowwise",
        },
    ),
    "window": (
        "gpt-oss-20b",
        16,
        {
            "expert_model_parallel_size": 8,
            "data_parallel_sharding_strategy": "optim",
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": (2,),
            "fp4_format": "e2m1",
        },
    ),
    "biased": (
        "gpt2",
        8,
        {
            "tensor_model_parallel_size": 2,
            "seq_length": 1024,
            "cross_entropy_loss_fusion": True,
            "data_parallel_sharding_strategy": "no_shard",
        },
    ),
    "squared": (
        "nemotron-8b",
        8,
        {"tensor_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
    ),
    "one mixer each": (
        "nemotron-3-nano-30b-a3b",
        16,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 8,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "in a V": (
        "qwen3-14b",
        8,
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_schedule": "dualpipe_v",
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    "uneven": (
        "llama3-8b",
        8,
        {
            "pipeline_model_parallel_size": 4,
            "decoder_first_pipeline_num_layers": 7,
            "decoder_last_pipeline_num_layers": 7,
            "data_parallel_sharding_strategy": "optim",
            "fine_grained_activation_offloading": True,
            "offload_modules": ("core_attn",),
        },
    ),
    "on the host": (
        "llama3-8b",
        16,
        {
            "context_parallel_size": 8,
            "seq_length": 16384,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (4, 2),
            "data_parallel_sharding_strategy": "optim_grads_params",
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": 0.5,
        },
    ),
    "counted": (
        "llama3-8b",
        8,
        {
            "pipeline_model_parallel_size": 2,
            "num_layers": 30,
            "num_layers_per_virtual_pipeline_stage": 8,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
}
"""Preset, ranks, settings: together they use every setting that can be exported."""


def layouts() -> Iterator[tuple[str, Layout]]:
    """The layouts, by name."""
    for name, (preset, world, settings) in LAYOUTS.items():
        values = {"global_batch_size": 8 * world, "seq_length": 4096, **settings}
        yield name, planned(preset, world, values)


def planned(preset: str, world: int, values: Mapping[str, Any]) -> Layout:
    """The layout of a preset with other settings."""
    return check(Config(PRESETS[preset]).with_values(**values), world, planned=True)


@dataclass(frozen=True)
class Change:
    """A value that is not the default of a setting.

    Attributes:
        value: the new one.
        needs: settings, and a preset, with which it means something.
        along: settings that change with it.
    """

    value: Any
    needs: Mapping[str, Any] = field(default_factory=dict)
    along: Mapping[str, Any] = field(default_factory=dict)


_MUON = {"optimizer": "muon"}
_PP = {"pipeline_model_parallel_size": 2}
_TP = {"tensor_model_parallel_size": 2}
_CP = {"context_parallel_size": 4}
_EP = {"preset": "mixtral-8x7b", "expert_model_parallel_size": 2}
_MIXED = {"preset": "mixtral-8x7b"}
_FLEX = {**_EP, "moe_token_dispatcher_type": "flex"}
_AUX = {**_MIXED, "moe_router_load_balancing_type": ("aux_loss",), "moe_aux_loss_coeff": (0.01,)}
_ROOM = {**_MIXED, "moe_expert_capacity_factor": 1.5}
_YARN = {"use_rope_scaling": False, "rope_type": "yarn"}
_LONGROPE = {
    "use_rope_scaling": False,
    "rope_type": "longrope",
    "longrope_short_factor": (1.0,) * 64,
    "longrope_long_factor": (4.0,) * 64,
}
_WINDOWS = {"window_size": 1024, "window_attn_skip_freq": "2"}
_LINEAR = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "4"}
_SPARSE = {"preset": "deepseek-v3.2", "dsa_indexer_loss_coeff": 0.01}
_HYBRID = {"preset": "nemotron-h-8b"}
_LATENT_YARN = {"preset": "deepseek-v2-lite", "rope_type": "yarn"}
_MLA = {"preset": "deepseek-v2-lite"}
_GROUPS = {"preset": "mixtral-8x7b", "moe_router_num_groups": 2, "moe_router_group_topk": 2}
_ZERO1 = {"data_parallel_sharding_strategy": "optim"}
_ZERO3 = {"data_parallel_sharding_strategy": "optim_grads_params"}
_FIM = {"fim_data": True}
_FIM_PARTS = {**_FIM, "fim_split_sample": "<part>", "fim_fragment_rate": 0.9}
_SAMPLES = {"train_samples": 9000}
_WARM_UP = {"lr_warmup_iters": 10}
_IN_8_BITS = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
_ENDS = {**_IN_8_BITS, "first_last_layers_bf16": True}
_WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 20}
_GROWS = {
    "weight_decay_incr_style": "linear",
    "start_weight_decay": 0.01,
    "end_weight_decay": 0.3,
}
_FUSED = {"cross_entropy_loss_fusion": True}
_MOVED = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
_HOST = {**_ZERO3, "optimizer_cpu_offload": True}
_AWARE = {"data_parallel_sharding_strategy": "optim", "use_precision_aware_optimizer": True}
_LOAD = {"load": "runs/other"}

CHANGES: Mapping[str, Change] = {
    # model
    "num_layers": Change(40),
    "hidden_size": Change(5120),
    "num_attention_heads": Change(64),
    "vocab_size": Change(100_000),
    "num_query_groups": Change(4),
    "kv_channels": Change(96),
    "ffn_hidden_size": Change(12_000),
    "max_position_embeddings": Change(8192),
    "normalization": Change("LayerNorm"),
    "norm_epsilon": Change(2e-6),
    "apply_layernorm_1p": Change(True),
    "norm_placement": Change("both"),
    "embedding_multiplier": Change(12.0),
    "residual_multiplier": Change(0.22),
    "logits_scaling": Change(8.0),
    "softmax_scale": Change(0.0078125),
    "attn_logit_softcapping": Change(50.0),
    "final_logit_softcapping": Change(30.0),
    "position_embedding_type": Change(
        "learned_absolute", {"use_rope_scaling": False, "rotary_base": 10_000.0}
    ),
    "position_embedding_offset": Change(
        2,
        {
            "position_embedding_type": "learned_absolute",
            "use_rope_scaling": False,
            "rotary_base": 10_000.0,
        },
    ),
    "rotary_base": Change(20_000.0),
    "rotary_base_local": Change(20_000.0, {"window_size": 1024}),
    "num_query_groups_local": Change(4, _WINDOWS),
    "kv_channels_local": Change(96, _WINDOWS),
    "softmax_type_local": Change("learnable", _WINDOWS),
    "keys_as_values": Change(True, {**_WINDOWS, "v_l2_norm": True}),
    "v_l2_norm": Change(True),
    "v_channels": Change(96),
    "value_multiplier": Change(0.75),
    "layer_scalar": Change(0.75),
    "rotary_seq_len_interpolation_factor": Change(8.0, {"use_rope_scaling": False}),
    "use_rope_scaling": Change(True, {"preset": "llama2-7b"}),
    "rope_scaling_factor": Change(16.0),
    "rope_low_freq_factor": Change(2.0),
    "rope_high_freq_factor": Change(8.0),
    "rope_original_max_position_embeddings": Change(4096),
    "rotary_percent": Change(0.5, {"use_rope_scaling": False}),
    "rotary_interleaved": Change(True),
    "rope_type": Change("yarn", {"use_rope_scaling": False}),
    "rotary_scaling_factor": Change(16.0, _YARN),
    "original_max_position_embeddings": Change(2048, _YARN),
    "beta_fast": Change(16.0, _YARN),
    "beta_slow": Change(2.0, _YARN),
    "mscale": Change(0.5, _YARN),
    "mscale_all_dim": Change(0.5, _LATENT_YARN),
    "yarn_correction_range_round_to_int": Change(False, _YARN),
    "longrope_short_factor": Change((1.5,) * 64, _LONGROPE),
    "longrope_long_factor": Change((8.0,) * 64, _LONGROPE),
    "longrope_attention_factor": Change(1.25, _LONGROPE),
    "parallel_residual": Change(True),
    "parallel_residual_one_norm": Change(True, {"parallel_residual": True}),
    "layernorm_bias": Change(False, {"normalization": "LayerNorm"}),
    "norm_elementwise_affine": Change(False),
    "embed_layernorm": Change(True),
    "attention_out_bias": Change(True),
    "mlp_bias": Change(True),
    "lm_head_bias": Change(True),
    "clip_qkv": Change(8.0),
    "glu_linear_offset": Change(1.0),
    "activation_func_clamp_value": Change(7.0),
    "activation_func": Change("gelu", {"gated_linear_unit": False, "activation_func": "gelu_tanh"}),
    "gated_linear_unit": Change(False),
    "add_bias_linear": Change(True),
    "add_qkv_bias": Change(True),
    "qk_layernorm": Change(True),
    "qk_layernorm_type": Change("all_heads", {"qk_layernorm": True}),
    "qk_layernorm_after_rope": Change(True, {"qk_layernorm": True}),
    "qk_l2_norm": Change(True),
    "softmax_type": Change("learnable"),
    "untie_embeddings_and_output_weights": Change(False),
    "hidden_dropout": Change(0.25),
    "embedding_dropout": Change(0.25),
    "attention_dropout": Change(0.25),
    "attention_output_gate": Change(True),
    "experimental_attention_variant": Change(
        "gated_delta_net", along={"linear_attention_freq": "4"}
    ),
    "dsa_indexer_n_heads": Change(32, _SPARSE),
    "dsa_indexer_head_dim": Change(64, _SPARSE),
    "dsa_indexer_topk": Change(1024, _SPARSE),
    "dsa_indexer_loss_coeff": Change(0.125, _SPARSE),
    "dsa_indexer_use_sparse_loss": Change(True, _SPARSE),
    "linear_attention_freq": Change("2", _LINEAR),
    "linear_conv_kernel_dim": Change(3, _LINEAR),
    "linear_key_head_dim": Change(64, _LINEAR),
    "linear_value_head_dim": Change(64, _LINEAR),
    "linear_num_key_heads": Change(8, _LINEAR),
    "linear_num_value_heads": Change(64, _LINEAR),
    "hybrid_override_pattern": Change("M-M*" * 13, _HYBRID),
    "mamba_state_dim": Change(64, _HYBRID),
    "mamba_head_dim": Change(32, _HYBRID),
    "mamba_num_groups": Change(16, _HYBRID),
    "mamba_num_heads": Change(64, _HYBRID),
    "no_rope_freq": Change("4"),
    "attention_chunk_size": Change(1024),
    "attn_temperature_tuning": Change(True, {"no_rope_freq": "4"}),
    "attn_temperature_rotated": Change(
        True, {"no_rope_freq": "4", "attn_temperature_tuning": True}
    ),
    "attn_scale": Change(0.25, {"no_rope_freq": "4", "attn_temperature_tuning": True}),
    "floor_scale": Change(4096, {"no_rope_freq": "4", "attn_temperature_tuning": True}),
    "window_size": Change(1024),
    "window_attn_skip_freq": Change("2", {"window_size": 1024}),
    "init_method_std": Change(0.0125),
    "embedding_init_method_std": Change(0.75),
    "make_vocab_size_divisible_by": Change(256),
    "num_experts": Change(16, {"preset": "mixtral-8x7b"}),
    "moe_router_topk": Change(4, {"preset": "mixtral-8x7b"}),
    "moe_router_num_groups": Change(4, _GROUPS),
    "moe_router_group_topk": Change(1, _GROUPS),
    "moe_router_group_scores": Change(1, _GROUPS),
    "moe_router_score_function": Change("sigmoid", _MIXED),
    "moe_router_pre_softmax": Change(True, _MIXED),
    "moe_router_topk_scaling_factor": Change(2.5, _MIXED),
    "moe_router_enable_expert_bias": Change(
        True, {**_MIXED, "moe_router_score_function": "sigmoid"}
    ),
    "moe_ffn_hidden_size": Change(7168, {"preset": "mixtral-8x7b"}),
    "moe_latent_size": Change(1024, {"preset": "mixtral-8x7b"}),
    "moe_shared_expert_intermediate_size": Change(1024, {"preset": "mixtral-8x7b"}),
    "moe_shared_expert_gate": Change(True, {**_MIXED, "moe_shared_expert_intermediate_size": 1024}),
    "moe_branch_norms": Change(True, {**_MIXED, "moe_shared_expert_intermediate_size": 1024}),
    "moe_apply_probs_on_input": Change(
        True, {**_MIXED, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"}
    ),
    "moe_router_norm_epsilon": Change(1e-6, {**_MIXED, "moe_router_score_function": "sigmoid"}),
    "moe_layer_freq": Change("2", {"preset": "mixtral-8x7b"}),
    "multi_latent_attention": Change(True, {"num_query_groups": None}),
    "q_lora_rank": Change(768, _MLA),
    "kv_lora_rank": Change(256, _MLA),
    "qk_head_dim": Change(96, _MLA),
    "qk_pos_emb_head_dim": Change(32, _MLA),
    "v_head_dim": Change(96, _MLA),
    "latent_norm_epsilon": Change(1e-6, _MLA),
    "mtp_num_layers": Change(1),
    "mtp_hybrid_override_pattern": Change("*-", _HYBRID, along={"mtp_num_layers": 1}),
    "mtp_use_repeated_layer": Change(True, {"mtp_num_layers": 2}),
    "first_last_layers_bf16": Change(True, _IN_8_BITS),
    "num_layers_at_start_in_bf16": Change(3, _ENDS),
    "num_layers_at_end_in_bf16": Change(2, _ENDS),
    "lora_rank": Change(8),
    "lora_alpha": Change(16.0, {"lora_rank": 8}),
    "lora_target_modules": Change(("q_proj", "v_proj"), {"lora_rank": 8}),
    "use_rslora": Change(True, {"lora_rank": 8}),
    "use_dora": Change(True, {"lora_rank": 8}),
    "lora_dropout": Change(0.1, {"lora_rank": 8}),
    "unmodelled": Change(("a bell",)),
    # parallel
    "tensor_model_parallel_size": Change(2),
    "sequence_parallel": Change(True, _TP),
    "pipeline_model_parallel_size": Change(2),
    "num_virtual_stages_per_pipeline_rank": Change(4, _PP),
    "num_layers_per_virtual_pipeline_stage": Change(4, _PP),
    "pipeline_model_parallel_layout": Change("loop: Et*15 | t*17 L", _PP),
    "decoder_first_pipeline_num_layers": Change(15, _PP),
    "decoder_last_pipeline_num_layers": Change(15, _PP),
    "account_for_embedding_in_pipeline_split": Change(
        True, {**_PP, "num_layers": 30}, {"num_layers": 31}
    ),
    "account_for_loss_in_pipeline_split": Change(
        True, {**_PP, "num_layers": 30}, {"num_layers": 31}
    ),
    "pipeline_schedule": Change("zb_h1", _PP),
    "pipeline_dx_first": Change(False, _PP),
    "pipeline_in_flight_limit": Change(1.5, {**_PP, "pipeline_schedule": "synthesised"}),
    "num_sequence_slices": Change(
        4, {**_PP, "pipeline_schedule": "sliced_1f1b", "num_sequence_slices": 2}
    ),
    "pipeline_max_unsharded_stages": Change(1, {**_PP, **_ZERO3}),
    "microbatch_group_size_per_virtual_pipeline_stage": Change(
        4, {**_PP, "num_virtual_stages_per_pipeline_rank": 2}
    ),
    "context_parallel_size": Change(2),
    "cp_comm_type": Change(("a2a",), _CP),
    "hierarchical_context_parallel_sizes": Change(
        (4, 2),
        {
            "context_parallel_size": 8,
            "cp_comm_type": ("a2a+p2p",),
            "hierarchical_context_parallel_sizes": (2, 4),
        },
    ),
    "expert_model_parallel_size": Change(4, _EP),
    "expert_tensor_parallel_size": Change(2, {**_EP, **_TP, "sequence_parallel": True}),
    "moe_token_dispatcher_type": Change("flex", _EP),
    "moe_enable_deepep": Change(True, _FLEX),
    "moe_deepep_num_sms": Change(24, {**_FLEX, "moe_enable_deepep": True}),
    "moe_shared_expert_overlap": Change(True, {**_EP, "moe_shared_expert_intermediate_size": 1024}),
    "overlap_moe_expert_parallel_comm": Change(True, _EP),
    "delay_wgrad_compute": Change(True, {**_EP, "overlap_moe_expert_parallel_comm": True}),
    "tp_comm_overlap": Change(True, {**_TP, "sequence_parallel": True}),
    "data_parallel_shard_size": Change(2, {**_ZERO3, "num_distributed_optimizer_instances": 4}),
    "num_distributed_optimizer_instances": Change(2, {**_ZERO3, "data_parallel_shard_size": -1}),
    "data_parallel_sharding_strategy": Change("optim_grads_params"),
    "overlap_grad_reduce": Change(False, _ZERO1),
    "overlap_param_gather": Change(False, _ZERO3),
    "grad_reduce_in_bf16": Change(True, _ZERO1),
    "overlap_param_gather_with_optimizer_step": Change(
        True, {**_ZERO1, **_PP, "num_virtual_stages_per_pipeline_rank": 2}
    ),
    "ddp_reduce_scatter_with_fp32_accumulation": Change(
        True, {**_ZERO1, "grad_reduce_in_bf16": True}
    ),
    "zero_quantized_weights": Change(True, _ZERO3),
    "zero_hpz_partition_size": Change(2, {**_ZERO3, "tensor_model_parallel_size": 1}),
    "zero_quantized_gradients": Change(True, _ZERO3),
    "zero_qgz_partition_size": Change(
        2, {**_ZERO3, "tensor_model_parallel_size": 1, "zero_quantized_gradients": True}
    ),
    "ddp_bucket_size": Change(50_000_000, {"precision": "fp32"}),
    # experts
    "moe_router_load_balancing_type": Change(("seq_aux_loss",), _AUX),
    "moe_aux_loss_coeff": Change((0.02,), _AUX),
    "moe_z_loss_coeff": Change(0.001, _MIXED),
    "moe_router_bias_update_rate": Change(
        0.002,
        {**_MIXED, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    ),
    "moe_router_dtype": Change("fp64", _MIXED),
    "moe_input_jitter_eps": Change(0.125, _MIXED),
    "moe_router_force_load_balancing": Change(True, _MIXED),
    "moe_expert_capacity_factor": Change(1.25, _MIXED),
    "moe_expert_rank_capacity_factor": Change(1.75, _MIXED),
    "moe_token_drop_policy": Change("position", _ROOM),
    "moe_pad_expert_input_to_capacity": Change(True, _ROOM),
    # memory
    "recompute_granularity": Change("full"),
    "recompute_method": Change("block", {"recompute_granularity": "full"}),
    "recompute_num_layers": Change((2,), {"recompute_granularity": "full"}),
    "recompute_modules": Change(("mlp",), {"recompute_granularity": "selective"}),
    "tiled_mlp_num_shards": Change(4, {"recompute_granularity": "full"}),
    "recompute_in_flight_limit": Change(1, _PP),
    "fine_grained_activation_offloading": Change(True, {}, {"offload_modules": ("core_attn",)}),
    "offload_modules": Change(("qkv_linear", "core_attn", "attn_proj"), _MOVED),
    "offload_tensors": Change(("dispatched_input",), {**_MIXED, **_MOVED}),
    "min_offloaded_tensor_size": Change(1 << 16, _MOVED),
    "cross_entropy_loss_fusion": Change(True),
    "cross_entropy_fusion_impl": Change("linear", _FUSED),
    "optimizer_cpu_offload": Change(True, _ZERO3),
    "offload_optimizer_states": Change(True, _ZERO3),
    "device_memory_limit": Change("70GiB"),
    "activation_offload_fraction": Change(0.375, _MOVED),
    "optimizer_offload_fraction": Change(0.375, _HOST),
    "optimizer_offload_path": Change("/scratch", _HOST),
    "param_cpu_offload": Change(True, _HOST),
    "param_offload_path": Change("/scratch", {**_HOST, "param_cpu_offload": True}),
    # training
    "micro_batch_size": Change(2),
    "global_batch_size": Change(128),
    "seq_length": Change(2048),
    "rampup_batch_size": Change((32, 16, 1000), _SAMPLES),
    "train_iters": Change(1000),
    "train_samples": Change(9000),
    "seed": Change(77),
    "precision": Change("fp32"),
    "loss_scale": Change(1024.0, {"precision": "fp16"}),
    "initial_loss_scale": Change(2.0**20, {"precision": "fp16"}),
    "min_loss_scale": Change(4.0, {"precision": "fp16"}),
    "loss_scale_window": Change(500, {"precision": "fp16"}),
    "hysteresis": Change(3, {"precision": "fp16"}),
    "fp8_format": Change("hybrid"),
    "fp8_recipe": Change("blockwise", {"fp8_format": "e4m3"}),
    "fp8_margin": Change(1, {"fp8_format": "hybrid"}),
    "fp8_amax_history_len": Change(1024, {"fp8_format": "hybrid"}),
    "fp8_amax_compute_algo": Change("max", {"fp8_format": "hybrid"}),
    "disable_parameter_transpose_cache": Change(True, {"fp8_format": "hybrid"}),
    "fp8_param_gather": Change(True, {"fp8_format": "hybrid"} | _ZERO3),
    "fp4_format": Change("e2m1"),
    "compile": Change(True),
    "compile_backend": Change("aot_eager", {"compile": True}),
    "cuda_graph_impl": Change("local", {"reset_attention_mask": False}),
    "cuda_graph_scope": Change("full_iteration"),  # the one that there is
    "bias_swiglu_fusion": Change(False),
    "bias_gelu_fusion": Change(False),
    "rope_fusion": Change(False),
    "bias_dropout_fusion": Change(False),
    "fused_residual_rmsnorm": Change(True),
    "gradient_accumulation_fusion": Change(False),
    "label_smoothing": Change(0.125),
    "z_loss_coeff": Change(0.0625),
    "mtp_loss_scaling_factor": Change(0.25, {"mtp_num_layers": 1}),
    "eval_interval": Change(30),
    "eval_iters": Change(7, {"eval_interval": 30}),
    "full_validation": Change(True, {"eval_interval": 30}),
    "check_for_nan_in_loss_and_grad": Change(False),
    "check_for_spiky_loss": Change(True),
    "spiky_loss_factor": Change(3.0, {"check_for_spiky_loss": True}),
    "bad_step_action": Change("skip"),
    "check_weight_hash_across_dp_replicas_interval": Change(50),
    "check_loss_across_dp_replicas_interval": Change(70),
    "distributed_timeout_minutes": Change(20.5),
    "watchdog_timeout_seconds": Change(30.0),
    "numa_binding": Change("node"),
    "manual_gc": Change(True),
    "exit_duration_in_mins": Change(230),
    "exit_interval": Change(400),
    "iterations_to_skip": Change((7, 9)),
    "manual_gc_interval": Change(200, {"manual_gc": True}),
    "deterministic_mode": Change(True),
    # data
    "data_path": Change(("corpus",)),
    "valid_data_path": Change(("code=sources", "prose=books"), {"eval_interval": 30}),
    "tokenizer_model": Change("tokenizer.json"),
    "tokenizer_vocab_size": Change(1000),
    "data_cache_path": Change("cache"),
    "split": Change("90,5,5"),
    "text_key": Change("content"),
    "sft": Change(True, {"tokenizer_model": "tokenizer.json"}),
    "fim_data": Change(True),
    "fim_rate": Change(0.7, _FIM),
    "fim_spm_rate": Change(0.3, _FIM),
    "fim_split_sample": Change("<file_sep>", _FIM_PARTS),
    "fim_fragment_rate": Change(0.8, _FIM_PARTS),
    "fim_no_prefix": Change("#!", _FIM),
    "fim_prefix_token": Change("<|fim_prefix|>", _FIM),
    "fim_middle_token": Change("<|fim_middle|>", _FIM),
    "fim_suffix_token": Change("<|fim_suffix|>", _FIM),
    "reset_position_ids": Change(False),
    "reset_attention_mask": Change(False),
    "eod_mask_loss": Change(False),
    "document_length": Change(300),
    # optimizer
    "lr": Change(1.23456789e-3),
    "min_lr": Change(1.25e-5),
    "lr_decay_style": Change("linear"),
    "lr_decay_iters": Change(130),
    "lr_decay_samples": Change(7000, _SAMPLES),
    "lr_warmup_iters": Change(10),
    "lr_warmup_samples": Change(300, _SAMPLES),
    "lr_warmup_init": Change(1.5e-5, _WARM_UP),
    "lr_wsd_decay_iters": Change(25, _WSD),
    "lr_wsd_decay_samples": Change(
        1500, _SAMPLES | {"lr_decay_style": "WSD", "lr_wsd_decay_samples": 900}
    ),
    "lr_wsd_decay_style": Change("minus_sqrt", _WSD),
    "weight_decay": Change(0.05),
    "weight_decay_incr_style": Change("cosine", _GROWS),
    "start_weight_decay": Change(0.02, _GROWS),
    "end_weight_decay": Change(0.4, _GROWS),
    "decoupled_lr": Change(5e-4),
    "decoupled_min_lr": Change(2e-5, {"decoupled_lr": 4e-4}),
    "adam_beta1": Change(0.875),
    "adam_beta2": Change(0.9375),
    "adam_eps": Change(2e-8),
    "optimizer": Change("muon"),
    "muon_momentum": Change(0.9375, _MUON),
    "muon_nesterov": Change(True, _MUON),
    "muon_num_ns_steps": Change(6, _MUON),
    "muon_scale_mode": Change("unit_rms_norm", _MUON),
    "muon_extra_scale_factor": Change(0.25, _MUON),
    "clip_grad": Change(0.5),
    "qk_clip": Change(True),
    "qk_clip_alpha": Change(0.25, {"qk_clip": True}),
    "qk_clip_threshold": Change(40.0, {"qk_clip": True}),
    "log_max_attention_logit": Change(True),
    "use_precision_aware_optimizer": Change(True),
    "main_params_dtype": Change("bf16", _AWARE),
    "store_param_remainders": Change(True, {"use_precision_aware_optimizer": True}),
    "main_grads_dtype": Change("bf16", _AWARE),
    "exp_avg_dtype": Change("bf16", _AWARE),
    "exp_avg_sq_dtype": Change("bf16", _AWARE),
    "non_persistent_save_interval": Change(20),
    "non_persistent_local_ckpt_dir": Change("/tmp", {"non_persistent_save_interval": 20}),
    "replication_jump": Change(4, {"non_persistent_save_interval": 20}),
    # checkpoint and logging
    "save": Change("runs/mine"),
    "load": Change("runs/other"),
    "load_adapter": Change("adapter", _LOAD),
    "ckpt_step": Change(10, _LOAD),
    "finetune": Change(True, _LOAD),
    "moe_use_upcycling": Change(True, {**_LOAD, "num_experts": 8}),
    "moe_upcycling_granularity": Change(2, {**_LOAD, "num_experts": 8, "moe_use_upcycling": True}),
    "save_interval": Change(10),
    "keep_latest_k": Change(7),
    "save_retain_interval": Change(60, {"save_interval": 20}),
    "async_save": Change(False),
    "log_interval": Change(10),
    "log_straggler": Change(True),
    "tensorboard": Change(True),
    "wandb_project": Change("project"),
    "profile": Change(True),
    "profile_step_start": Change(11, {"profile": True}),
    "profile_step_end": Change(13, {"profile": True}),
    "profile_ranks": Change((1,), {"profile": True}),
    "use_pytorch_profiler": Change(True, {"profile": True}),
    "record_memory_history": Change(True, {"profile": True}),
    "audit": Change(True),
}
"""By setting: of llama3-8b, if no other preset is named, on 8 ranks."""


def changed(name: str) -> tuple[Layout, Layout]:
    """A layout, and the same with one setting of `CHANGES` changed."""
    change = CHANGES[name]
    needs = {"global_batch_size": 64, "seq_length": 4096, **change.needs}
    preset = needs.pop("preset", "llama3-8b")
    after = {**needs, **change.along, name: change.value}
    return planned(preset, 8, needs), planned(preset, 8, after)
