"""Settings drawn at random until `check` agrees: what nobody thought of together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from fivefold.config.config import SECTIONS, SETTINGS
from fivefold.config.settings import Setting, settings_of
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from tests.verify.cases import CHUNKED, EXPERTS, LATENT, LLAMA, LONG, MIXTURE, MODELS, ONE_NORM

ALL = MODELS | {
    "mixture": MIXTURE,
    "chunked": CHUNKED,
    "latent experts": replace(LATENT, **EXPERTS),
    "long": replace(LLAMA, **LONG),
    "one norm": replace(MODELS["neox"], **ONE_NORM),
}

LEFT_OUT = {
    *("compile", "compile_backend", "cuda_graph_impl", "cuda_graph_scope"),  # slow, or of GPUs
    *("numa_binding", "moe_enable_deepep", "unmodelled", "multi_latent_attention"),
    *("sft", "fim_data"),  # of text
    *("check_for_spiky_loss", "bad_step_action", "full_validation"),  # of the training loop
}
# Of settings that are numbers, or texts: some that small models can have.
SOME: dict[str, tuple[Any, ...]] = {
    "tensor_model_parallel_size": (2, 4),
    "pipeline_model_parallel_size": (2, 4),
    "context_parallel_size": (2, 4),
    "expert_model_parallel_size": (2, 4),
    "expert_tensor_parallel_size": (2,),
    "num_distributed_optimizer_instances": (2,),
    "hierarchical_context_parallel_sizes": ((2, 1), (2, 2)),
    "pipeline_model_parallel_layout": ("Et|ttL", "Et|t||tL", "Et|t||tL", "Et|ttmL"),
    "decoder_first_pipeline_num_layers": (1, 2),
    "num_virtual_stages_per_pipeline_rank": (2,),
    "num_layers_per_virtual_pipeline_stage": (1,),
    "pipeline_in_flight_limit": (1, 2, 3),
    "num_sequence_slices": (2, 4),
    "pipeline_max_unsharded_stages": (1, 2),
    "microbatch_group_size_per_virtual_pipeline_stage": (2, 3, 4),
    "ddp_bucket_size": (1, 500),
    "zero_hpz_partition_size": (2,),
    "zero_qgz_partition_size": (2,),
    "moe_aux_loss_coeff": ((0.1,),),
    "moe_z_loss_coeff": (0.1,),
    "moe_input_jitter_eps": (0.1,),
    "moe_expert_capacity_factor": (0.7, 1.2),
    "moe_expert_rank_capacity_factor": (0.8,),
    "recompute_num_layers": ((2,), (0, 1)),
    "recompute_in_flight_limit": (1, 2),
    "tiled_mlp_num_shards": (2, 3),
    "min_offloaded_tensor_size": (1,),
    "activation_offload_fraction": (0.5,),
    "optimizer_offload_fraction": (0.5,),
    "micro_batch_size": (2, 4),
    "global_batch_size": (2, 4, 6, 12),
    "seq_length": (8, 17, 32),
    "fp8_amax_history_len": (4,),
    "label_smoothing": (0.0,),
    "z_loss_coeff": (0.0,),
    "embedding_init_method_std": (0.5,),
    "clip_grad": (0.0, 0.01),
    "weight_decay": (0.0,),
    "qk_clip_alpha": (0.3,),
    "qk_clip_threshold": (0.4,),
    "decoupled_lr": (0.03,),
    "start_weight_decay": (0.0,),
    "end_weight_decay": (0.3,),
    "mtp_num_layers": (1, 2),
    "mtp_hybrid_override_pattern": ("*", "M-", "-*M"),
    "num_layers_at_start_in_bf16": (0, 2),
    "num_layers_at_end_in_bf16": (0, 2),
    "lora_rank": (2,),
    "lora_dropout": (0.3,),
    "hidden_dropout": (0.1,),
    "embedding_dropout": (0.1,),
    "attention_dropout": (0.1,),
    "window_size": (3,),
    "window_attn_skip_freq": ("2",),
    "no_rope_freq": ("2", "3"),
    "attention_chunk_size": (3, 8),
    "attn_scale": (0.4,),
    "floor_scale": (3,),
    "rotary_base_local": (100.0,),
    "num_query_groups_local": (1, 4),
    "kv_channels_local": (4, 10),
    "v_channels": (5,),
    "value_multiplier": (0.7,),
    "layer_scalar": (0.6,),
    "clip_qkv": (0.3,),
    "position_embedding_offset": (2,),
    "embedding_multiplier": (3.0,),
    "residual_multiplier": (0.3,),
    "logits_scaling": (0.7,),
    "softmax_scale": (0.6,),
    "latent_norm_epsilon": (0.1,),
    "moe_router_norm_epsilon": (0.1,),
    "attn_logit_softcapping": (0.7,),
    "final_logit_softcapping": (0.9,),
    "rotary_seq_len_interpolation_factor": (2.5,),
    "num_query_groups": (1, 2),
    "moe_router_topk": (1, 5),
    "moe_latent_size": (6, 20),
    "moe_router_num_groups": (4,),
    "moe_router_group_topk": (2,),
    "moe_router_topk_scaling_factor": (2.5,),
    "moe_layer_freq": ("1", "2"),
    "hybrid_override_pattern": ("M-*", "*M-"),
    "mamba_state_dim": (5, 16),
    "mamba_head_dim": (4, 12),
    "mamba_num_groups": (2, 4),
    "mamba_num_heads": (8,),
    "dsa_indexer_n_heads": (1,),
    "dsa_indexer_head_dim": (4, 9),
    "dsa_indexer_topk": (2, 3, 40),  # one alone has no gradients but rounding errors
    "dsa_indexer_loss_coeff": (0.1,),
    "linear_attention_freq": ("2", "[1,1,0]"),
    "linear_conv_kernel_dim": (1, 2),
    "linear_key_head_dim": (24,),
    "linear_value_head_dim": (9,),
    "linear_num_key_heads": (2, 8),
    "linear_num_value_heads": (16,),
}
SECTIONS_OF_A_STEP = ("model", "parallel", "experts", "memory", "training", "data", "optimizer")


def _values(setting: Setting) -> tuple[Any, ...]:
    """Values other than the default, as far as they can be listed."""
    if setting.name in SOME:
        return SOME[setting.name]
    if setting.kind is bool:
        return (not setting.default,)
    each = ((choice,) if setting.many else choice for choice in setting.choices)
    return tuple(value for value in each if value != setting.default)


def _choices() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for section in SECTIONS_OF_A_STEP:
        for setting in settings_of(SECTIONS[section]):
            values = () if setting.name in LEFT_OUT else _values(setting)
            if values:
                yield setting.name, values


CHOICES = dict(_choices())
assert set(SOME) | LEFT_OUT <= set(SETTINGS)


def draw(
    random: Random,
    layout_of: Callable[[dict[str, Any]], Layout],
    among: Sequence[str] = sorted(CHOICES),
) -> dict[str, Any]:
    """Some 4 to 14 settings that go together: each draw is of one to three of them, and stays if
    `layout_of` raises no ConfigError."""
    drawn: dict[str, Any] = {}
    wanted = random.randint(4, 14)
    for _ in range(20 * wanted):
        names = random.sample(among, random.choice((1, 1, 2, 3)))
        more = drawn | {name: random.choice(CHOICES[name]) for name in names}
        try:
            layout_of(more)
        except ConfigError:
            continue
        drawn = more
        if len(drawn) >= wanted:
            break
    return drawn
