"""Random small layouts that the engine runs, and microbatches for them."""

from collections.abc import Iterator
from random import Random
from tempfile import gettempdir
from typing import Any

import numpy as np

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.sharding import SHARDING
from fivefold.data.packing import Microbatch
from fivefold.errors import ConfigError
from fivefold.layout import Layout

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {
        "attn_logit_softcapping": 0.8,
        "norm_placement": "both",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    },
    "sinks": {
        "norm_placement": "after",
        "qk_layernorm": True,
        "qk_layernorm_type": "all_heads",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.3,
        "logits_scaling": 0.7,
        "softmax_scale": 0.6,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 0.9,
        "rotary_base_local": 100.0,
        "softmax_type": "learnable",
        "window_size": 5,
        "window_attn_skip_freq": "2",
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": 1.0,
    },
    "chunked": {
        "qk_l2_norm": True,
        "attention_chunk_size": 5,
        "no_rope_freq": "2",
        "attn_temperature_tuning": True,
        "floor_scale": 3,
    },
    "neox": {
        "normalization": "LayerNorm",
        "rotary_percent": 0.5,
        "no_rope_freq": "2",
        "parallel_residual": True,
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": "quick_gelu",
    },
    "latent": {
        "num_query_groups": None,
        "kv_channels": None,
        "multi_latent_attention": True,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    },
    "gpt": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "add_bias_linear": True,
        "gated_linear_unit": False,
        "activation_func": "gelu",
        "untie_embeddings_and_output_weights": False,
    },
}
STRATEGIES = tuple(SHARDING)
CONTEXT = ("p2p", "all_gather", "a2a")
SCHEDULES = (
    ("auto",),
    ("auto", "gpipe", "eager_1f1b", "zb_h1", "dualpipe"),
    ("auto", "looped_bfs", "combined_1f1b", "interleaved_zb"),
)
MEMORY: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_method": "block"},
    {"recompute_granularity": "full", "tiled_mlp_num_shards": 3},
    {"recompute_granularity": "selective"},
    {"recompute_in_flight_limit": 1},
    {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    {"cross_entropy_loss_fusion": True},
    {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
    {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
    {
        "fine_grained_activation_offloading": True,
        "offload_modules": ("attn_norm", "qkv_linear", "core_attn", "mlp_norm"),
        "min_offloaded_tensor_size": 1,
        "activation_offload_fraction": 0.25,
    },
    {
        "recompute_granularity": "selective",
        "recompute_modules": ("layernorm",),
        "fine_grained_activation_offloading": True,
        "offload_modules": ("attn_norm", "mlp_norm"),
        "min_offloaded_tensor_size": 1,
    },
)
EIGHT = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
BF16 = {"precision": "bf16"}
ON_HOST: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer_cpu_offload": True},
    {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "optimizer_offload_path": gettempdir(),
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
    },
    {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"},
    EIGHT,
    {"use_precision_aware_optimizer": True, "store_param_remainders": True} | BF16,
    EIGHT | {"main_params_dtype": "bf16", "main_grads_dtype": "bf16"} | BF16,
    EIGHT
    | {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "optimizer_offload_path": gettempdir(),
    },
    EIGHT | {"offload_optimizer_states": True},
    {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"} | BF16,
    {
        "optimizer_cpu_offload": True,
        "use_precision_aware_optimizer": True,
        "main_grads_dtype": "bf16",
        **BF16,
    },
    {"optimizer_cpu_offload": True, "param_cpu_offload": True},
    {"offload_optimizer_states": True, "optimizer_offload_fraction": 0.5},
    {
        "offload_optimizer_states": True,
        "param_cpu_offload": True,
        "optimizer_offload_path": gettempdir(),
    },
    {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "param_cpu_offload": True,
        "param_offload_path": gettempdir(),
    },
)


def random_layouts(seed: int) -> Iterator[Layout]:
    """One after the other, for ever: of one to four ranks, each legal and different."""
    random = Random(seed)
    while True:
        world = random.choice((1, 2, 2, 4, 4, 4))
        try:
            yield check(Config(_model(random)).with_values(**_settings(random, world)), world)
        except ConfigError:
            continue


def _model(random: Random) -> ModelConfig:
    heads = random.choice((4, 8))
    values: dict[str, Any] = {
        "num_layers": random.choice((2, 4)),
        "hidden_size": 4 * random.randint(6, 16),
        "num_attention_heads": heads,
        "kv_channels": 2 * random.randint(3, 8),
        "num_query_groups": random.choice((1, 2, heads)),
        "ffn_hidden_size": 4 * random.randint(8, 32),
        "vocab_size": random.randint(200, 300),
        "make_vocab_size_divisible_by": random.choice((4, 16)),
        "max_position_embeddings": 64,
        "hidden_dropout": random.choice((0.0, 0.0, 0.1)),
        "attention_dropout": random.choice((0.0, 0.0, 0.1)),
    }
    return ModelConfig(**values | FAMILIES[random.choice(list(FAMILIES))])


def _settings(random: Random, world: int) -> dict[str, Any]:
    degrees = dict.fromkeys(("tp", "pp", "cp", "dp"), 1)
    for _ in range(world.bit_length() - 1):
        degrees[random.choice(list(degrees))] *= 2
    sharding = random.choice(STRATEGIES)
    hybrid = degrees["dp"] > 1 and sharding != "no_shard" and random.random() < 0.3
    microbatch = random.choice((1, 2))
    virtual = random.choice((1, 2)) if degrees["pp"] > 1 else 1
    splits = degrees["tp"] > 1 and random.random() < 0.6
    return {
        "tensor_model_parallel_size": degrees["tp"],
        "sequence_parallel": splits,
        "tp_comm_overlap": splits and microbatch == 2,
        "pipeline_model_parallel_size": degrees["pp"],
        "num_virtual_stages_per_pipeline_rank": virtual,
        "pipeline_schedule": random.choice(SCHEDULES[virtual if degrees["pp"] > 1 else 0]),
        "pipeline_dx_first": degrees["pp"] == 1 or random.random() < 0.5,
        "context_parallel_size": degrees["cp"],
        "cp_comm_type": (random.choice(CONTEXT),),
        "data_parallel_sharding_strategy": sharding,
        "num_distributed_optimizer_instances": 2 if hybrid else 1,
        "precision": random.choice(("fp32", "fp32", "bf16", "fp64")),
        "grad_reduce_in_bf16": random.random() < 0.2,
        "overlap_grad_reduce": random.random() < 0.7,
        "label_smoothing": random.choice((0.0, 0.1)),
        "z_loss_coeff": random.choice((0.0, 1e-3)),
        "seq_length": random.choice((16, 32)),
        "micro_batch_size": microbatch,
        "global_batch_size": microbatch * degrees["dp"] * random.choice((2, 4)),
        **random.choice(MEMORY),
        **random.choice(ON_HOST),
    }


def microbatches_of(layout: Layout, rank: int, documents: int = 1) -> list[Microbatch]:
    """What a rank trains on: rows of so many documents of equal length."""
    training, model = layout.config.training, layout.config.model
    shape = training.micro_batch_size, training.seq_length
    random = np.random.default_rng(layout.grid.dp_rank(rank))
    place = np.broadcast_to(np.arange(shape[1]), shape)
    length = shape[1] // documents
    return [
        Microbatch(
            tokens_BS=random.integers(0, model.vocab_size, shape),
            labels_BS=random.integers(0, model.vocab_size, shape),
            positions_BS=place % length,
            documents_BS=place // length,
            token_ids_BS=np.arange(shape[0] * shape[1]).reshape(shape),
        )
        for _ in range(layout.num_microbatches)
    ]
