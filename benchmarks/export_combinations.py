"""Layouts to export in which several settings meet, drawn at random."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from random import Random
from typing import Any

from benchmarks.export_cases import CHANGES, planned
from fivefold.config.sharding import SHARDING
from fivefold.errors import ConfigError
from fivefold.layout import Layout

_PRESETS = (
    *("llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gpt2", "qwen3-30b-a3b", "gpt-oss-20b"),
    "deepseek-v3",
)
_DEGREES: Mapping[str, tuple[Any, ...]] = {
    "data_parallel_sharding_strategy": tuple(SHARDING),
    "tensor_model_parallel_size": (1, 2, 4, 8),
    "sequence_parallel": (True,),
    "pipeline_model_parallel_size": (1, 2, 4),
    "num_virtual_stages_per_pipeline_rank": (None, 2),
    "context_parallel_size": (1, 2, 4),
    "expert_model_parallel_size": (1, 2, 4, 8),
    "precision": ("bf16", "fp16", "fp32"),
    "micro_batch_size": (1, 2),
}
_MORE: Mapping[str, tuple[Any, ...]] = {
    "recompute_modules": (("moe_act",), ("layernorm",), ("mla_up_proj", "moe"), ("mlp",)),
    "moe_router_load_balancing_type": (
        *(("sinkhorn",), ("aux_loss",), ("seq_aux_loss", "global_aux_loss")),
    ),
    "moe_aux_loss_coeff": ((0.01,), (0.01, 0.02)),
    "moe_router_topk": (1, 3),
    "moe_token_dispatcher_type": ("allgather", "flex"),
    "fp8_recipe": ("tensorwise", "rowwise", "blockwise", "mxfp8"),
    "rope_type": ("rope",),
    "activation_func": ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "squared_relu", "xielu"),
    "gated_linear_unit": (True, False),
    "add_bias_linear": (True,),
    "num_layers": (7, 30, 33),
    "mtp_num_layers": (2,),
    "cp_comm_type": (("a2a",), ("all_gather",)),
    "offload_modules": (("attn_norm", "mlp_norm"), ("expert_fc1", "moe_act")),
    "microbatch_group_size_per_virtual_pipeline_stage": (2, 3, 8),
    "pipeline_schedule": ("gpipe", "interleaved_zb", "zb_v", "combined_1f1b"),
    "decoder_first_pipeline_num_layers": (0, 5),
    "decoder_last_pipeline_num_layers": (0, 5),
    "lr_warmup_iters": (1, 50, 200),
    "num_query_groups": (None, 2),
}


def combinations(count: int, seed: int = 0) -> Iterator[tuple[str, Layout]]:
    """So many layouts that are valid, each with what it was made from."""
    draw = Random(seed)
    found = 0
    while found < count:
        values: dict[str, Any] = {"global_batch_size": 64, "seq_length": 1024}
        values["preset"] = draw.choice(_PRESETS)
        for table, most in ((_DEGREES, 4), (_MORE, 3)):
            for name in draw.sample(sorted(table), draw.randint(0, most)):
                values[name] = draw.choice(table[name])
        for name in draw.sample(sorted(CHANGES), draw.randint(1, 4)):
            change = CHANGES[name]
            values = {**values, **change.needs, **change.along, name: change.value}
        world = draw.choice((8, 16, 32))
        with suppress(ConfigError):
            made_from = {**values, "ranks": world}
            yield str(made_from), planned(values.pop("preset"), world, values)
            found += 1
