"""Draws layouts and settings for the stub: what the engine runs on GPUs, of tiny models."""

from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.model.eight_bit.rules import check_kernels
from tests.verify import matrix
from tests.verify.any_settings import draw
from tests.verify.cases import EXPERTS, LATENT, MIXTURE, MODELS, config

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)
UGLY = MODELS | {"mixture": MIXTURE, "latent experts": replace(LATENT, **EXPERTS)}
EVEN = ("debug-llama", "debug-mixtral", "debug-gpt-oss", "debug-deepseek-v3")
"""Models whose widths suit the kernels of GPUs."""
COMPILED = {"compile": True, "compile_backend": "aot_eager"}
ROWS = matrix.read()
BF16 = {"precision": "bf16"}
ZERO_1, ZERO_2, ZERO_3 = (
    {"data_parallel_sharding_strategy": name}
    for name in ("optim", "optim_grads", "optim_grads_params")
)
TINY = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
PRECISE = BF16 | {"use_precision_aware_optimizer": True}
ON_HOST = {"optimizer_cpu_offload": True}
INTERLEAVED = {
    "pipeline_model_parallel_size": 2,
    "num_virtual_stages_per_pipeline_rank": 2,
    "pipeline_model_parallel_layout": None,
}
EP = {"expert_model_parallel_size": 2}
THEMES: tuple[dict[str, Any], ...] = (
    {},
    BF16 | {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 4},
    BF16 | ZERO_1 | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise", "fp8_param_gather": True},
    BF16 | ZERO_2 | {"fp8_format": "e4m3", "fp8_recipe": "delayed", "fp8_param_gather": True},
    BF16
    | ZERO_3
    | ON_HOST
    | {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True},
    BF16 | {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    BF16 | {"fp8_format": "hybrid", "fp8_recipe": "rowwise", "first_last_layers_bf16": True},
    BF16 | ZERO_2 | {"optimizer": "muon", "muon_nesterov": True},
    {"optimizer": "muon", "qk_clip": True, "qk_clip_threshold": 0.4},
    {"qk_clip": True, "qk_clip_threshold": 0.4, "context_parallel_size": 2},
    PRECISE | {"main_params_dtype": "bf16", "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16"},
    PRECISE | {"store_param_remainders": True, "exp_avg_sq_dtype": "fp8"},
    PRECISE | ZERO_3 | ON_HOST | {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16"},
    {"lora_rank": 2, "use_dora": True, "lora_dropout": 0.3},
    ZERO_3 | {"lora_rank": 2, "use_rslora": True},
    ZERO_3 | {"zero_hpz_partition_size": 2},
    ZERO_3 | {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    ZERO_1 | {"overlap_param_gather_with_optimizer_step": True},
    BF16
    | ZERO_2
    | {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
    EP | {"overlap_moe_expert_parallel_comm": True, "delay_wgrad_compute": True},
    EP | {"moe_shared_expert_overlap": True},
    EP | {"moe_expert_capacity_factor": 1.2, "moe_pad_expert_input_to_capacity": True},
    EP | {"moe_token_dispatcher_type": "flex", "moe_expert_rank_capacity_factor": 0.8},
    ZERO_3 | ON_HOST | {"param_cpu_offload": True},
    ZERO_1 | ON_HOST | {"optimizer_offload_fraction": 0.5},
    {"offload_optimizer_states": True},
    TINY | {"offload_modules": ("qkv_linear", "core_attn"), "activation_offload_fraction": 0.5},
    TINY | {"offload_tensors": ("layer_input",), "recompute_granularity": "full"},
    {
        "recompute_granularity": "selective",
        "recompute_modules": ("mlp",),
        "tiled_mlp_num_shards": 2,
    },
    INTERLEAVED | {"microbatch_group_size_per_virtual_pipeline_stage": 2},
    INTERLEAVED | ZERO_3 | {"pipeline_max_unsharded_stages": 1},
    INTERLEAVED | {"pipeline_schedule": "zb_v", "recompute_in_flight_limit": 1},
    {"precision": "fp16"},
    {"moe_router_load_balancing_type": ("sinkhorn",)},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
    {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
    {"context_parallel_size": 2, "cp_comm_type": ("a2a",)},
)
"""Techniques whose settings depend on each other, and seldom come together by chance. Draws have
them in turn; as they are a prime number, each meets all kinds of GPUs."""
ATTEMPTS = 300
"""Models and layouts that are drawn for a technique, which these GPUs or ranks may not allow."""


def drawn(seed: int, ranks: int, capability: tuple[int, int] = HOPPER) -> Config:
    """A legal configuration for so many ranks, on GPUs of this compute capability."""
    random, theme = Random(seed), THEMES[seed % len(THEMES)]
    for attempt in count():
        row = random.choice([None, *(row for row in ROWS if matrix.ranks(row) == ranks)])
        row = row if random.random() < 0.8 else None
        try:
            return _drawn(random, ranks, row, capability, theme if attempt < ATTEMPTS else {})
        except ConfigError:
            continue
    raise AssertionError("unreachable: the loop counts on")


def _drawn(
    random: Random,
    ranks: int,
    row: matrix.Row | None,
    capability: tuple[int, int],
    theme: dict[str, Any],
) -> Config:
    base: dict[str, Any] = {"global_batch_size": ranks} if row is None else matrix.settings(row)
    if random.random() < 0.8:
        base["precision"] = "bf16"
    if random.random() < 0.15:
        base |= COMPILED
    base |= theme
    if row is not None and random.random() < 0.5:
        model = MODELS[row["family"]]
    else:
        model = random.choice([*map(resolve_model, EVEN), *UGLY.values()])

    def layout_of(more: dict[str, Any]) -> Layout:
        found = config(model, **(base | more))
        check_kernels(found, capability)
        return check(found, ranks)

    layout_of({})
    return layout_of(draw(random, layout_of)).config
