"""A shrunk recipe is small, and parallelism divides it as it divided the large one."""

from itertools import pairwise
from typing import Any

import pytest

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.counts.shards import num_expert_shards
from fivefold.description.shape import count_parameters
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.verify.shrink import LARGEST_BATCH, LARGEST_MODEL, prepare


def layout_of(model: str, world: int, **settings: Any) -> Layout:
    return check(Config(model=PRESETS[model]).with_values(**settings), world)


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "8b": (
        "llama3-8b",
        16,
        {
            "tensor_model_parallel_size": 8,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 4,
            "global_batch_size": 64,
            "seq_length": 8192,
        },
    ),
    "8b, fewer kv heads than tp": (
        "llama3-8b",
        32,
        {
            "tensor_model_parallel_size": 16,
            "data_parallel_sharding_strategy": "optim",
            "global_batch_size": 64,
        },
    ),
    "405b, uneven stages": (
        "llama3-405b",
        128,
        {
            "tensor_model_parallel_size": 8,
            "pipeline_model_parallel_size": 16,
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "global_batch_size": 8,
            "seq_length": 8192,
        },
    ),
    "latents": (
        "deepseek-v2-lite",
        8,
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "context_parallel_size": 2,
            "cp_comm_type": ("all_gather",),
            "global_batch_size": 8,
            "seq_length": 4096,
        },
    ),
    "sinks, a window in every other layer": (
        "gpt-oss-20b",
        8,
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "global_batch_size": 8,
            "seq_length": 4096,
        },
    ),
    "one mixer each": (
        "nemotron-3-nano-30b-a3b",
        16,
        {
            "tensor_model_parallel_size": 4,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "expert_model_parallel_size": 8,
            "context_parallel_size": 2,
            "global_batch_size": 16,
            "seq_length": 4096,
        },
    ),
    "mixers without attention": (
        "nemotron-h-8b",
        4,
        {
            "tensor_model_parallel_size": 2,
            "hybrid_override_pattern": "M-" * 26,
            "num_query_groups": None,
            "kv_channels": None,
            "global_batch_size": 16,
        },
    ),
    "gpt2, empty stage": (
        "gpt2",
        4,
        {
            "pipeline_model_parallel_size": 4,
            "pipeline_model_parallel_layout": "Et*6||t*5|tL",
            "global_batch_size": 512,
        },
    ),
    "a v": (
        "gpt2",
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "v:Et*3|t*3|t*3|t*3L",
            "pipeline_schedule": "gpipe",
        },
    ),
    "qwen": ("qwen3-8b", 4, {"tensor_model_parallel_size": 4}),
    "experts": (
        "qwen3-30b-a3b",
        16,
        {
            "expert_model_parallel_size": 4,
            "expert_tensor_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "global_batch_size": 64,
        },
    ),
    "dense layers first, groups of experts": (
        "qwen3-235b-a22b",
        16,
        {
            "expert_model_parallel_size": 4,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_model_parallel_size": 2,
            "moe_layer_freq": "[0]*3+[1]*91",
            "moe_router_num_groups": 8,
            "moe_router_group_topk": 4,
            "moe_shared_expert_intermediate_size": 1536,
            "global_batch_size": 64,
        },
    ),
    "every second layer, a stage of one": (
        "mixtral-8x7b",
        2,
        {
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": "Et|t*31L",
            "moe_layer_freq": "2",
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_structure_survives(case: str) -> None:
    model, world, settings = CASES[case]
    large = layout_of(model, world, **settings)
    small, changes = prepare(large)
    old, new = large.config.model, small.config.model
    assert count_parameters(new).total <= LARGEST_MODEL
    assert f"{new.num_layers} layers" in changes[0]
    training = small.config.training
    assert training.global_batch_size * training.seq_length <= LARGEST_BATCH
    assert small.grid == large.grid and small.schedule == large.schedule
    assert small.split.placement == large.split.placement
    for before, after in zip(large.split.stages, small.split.stages, strict=True):
        assert (before.embedding, before.head) == (after.embedding, after.head)
        assert bool(before.layers) == bool(after.layers)
    assert _order(large) == _order(small)
    tp = large.grid.tp
    assert (old.num_kv_heads < tp) == (new.num_kv_heads < tp)
    assert (old.num_kv_heads < old.num_attention_heads) == (
        new.num_kv_heads < new.num_attention_heads
    )
    assert (old.q_size == old.hidden_size) == (new.q_size == new.hidden_size)
    assert (old.vocab_size == old.padded_vocab_size) == (new.vocab_size == new.padded_vocab_size)
    few = small.num_microbatches
    assert (few < large.grid.pp) == (large.num_microbatches < large.grid.pp)
    for name in ("qk_layernorm", "add_bias_linear", "hidden_dropout", "normalization"):
        assert getattr(old, name) == getattr(new, name)
    _check_experts(large, small)


def _check_experts(large: Layout, small: Layout) -> None:
    """Both kinds of layers are in the stages that had them, and experts relate to ranks, groups,
    shards and choices as they did."""
    old, new = large.config.model, small.config.model
    for before, after in zip(large.split.stages, small.split.stages, strict=True):
        kinds = set(map(old.is_moe, before.layers))
        assert set(map(new.is_moe, after.layers)) <= kinds
        assert len(after.layers) == 1 or set(map(new.is_moe, after.layers)) == kinds
    if old.num_experts is None or new.num_experts is None:
        assert old.num_experts == new.num_experts
        return
    assert new.num_experts <= old.num_experts
    ep, shards = large.grid.ep, num_expert_shards(large)
    for part in (ep, old.moe_router_num_groups or 1, ep * shards):
        assert (old.num_experts % part == 0) == (new.num_experts % part == 0)
        assert old.num_experts % part or (old.num_experts > part) == (new.num_experts > part)
    assert new.moe_router_num_groups == old.moe_router_num_groups
    assert 1 < 2 * new.moe_router_topk <= new.num_experts
    assert bool(new.shared_ffn_size) == bool(old.shared_ffn_size)


UNPREDICTED: dict[str, Any] = {"mtp_num_layers": 0, "mtp_hybrid_override_pattern": None}


@pytest.mark.parametrize(
    "model", [name for name, model in PRESETS.items() if model.num_experts and not model.unmodelled]
)
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_every_preset_with_experts_can_be_shrunk(model: str, ep: int, etp: int) -> None:
    degrees = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
    large = layout_of(model, 8, **degrees, global_batch_size=64, **UNPREDICTED)
    small, _ = prepare(large)
    assert count_parameters(small.config.model).total <= LARGEST_MODEL
    assert small.grid == large.grid
    _check_experts(large, small)


def _order(layout: Layout) -> list[bool]:
    """For each pair of neighbouring stages, whether they hold equally many layers."""
    counts = [len(stage.layers) for stage in layout.split.stages]
    return [a == b for a, b in pairwise(counts)]


def test_a_small_recipe_keeps_its_model_and_batch() -> None:
    large = layout_of("debug-gpt", 2, tensor_model_parallel_size=2, seq_length=64)
    small, changes = prepare(large)
    assert small.config.model == large.config.model
    assert small.config.training == large.config.training
    assert len(changes) == 1 and changes[0].startswith("AdamW at a constant rate")


def test_small_activations_move_too() -> None:
    moved = {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)}
    layout, changes = prepare(layout_of("debug-llama", 1, **moved))
    assert layout.config.memory.min_offloaded_tensor_size == 1
    assert "activations of any size are moved" in changes


@pytest.mark.parametrize("numbers", [(2, 2, 0, 1), (0, 1, 1, 0)])
def test_stages_recompute_none_some_or_all_of_their_layers_as_before(
    numbers: tuple[int, ...],
) -> None:
    again = {
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": numbers,
    }
    large = layout_of("llama3-8b", 4, pipeline_model_parallel_size=4, num_layers=8, **again)
    small, _ = prepare(large)
    counts = [len(stage.layers) for stage in small.split.stages]
    found = small.config.memory.recompute_num_layers
    assert [bool(n) for n in found] == [bool(n) for n in numbers]
    assert all(n == count for n, count, old in zip(found, counts, numbers, strict=True) if old == 2)


@pytest.mark.parametrize("method", ["uniform", "block"])
@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize(("number", "groups"), [(3, 2), (8, 1)])
def test_one_number_leaves_groups_and_layers_of_both_kinds(
    method: str, pp: int, number: int, groups: int
) -> None:
    again = {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": (number,),
    }
    large = layout_of("llama3-8b", pp, pipeline_model_parallel_size=pp, num_layers=8 * pp, **again)
    small, _ = prepare(large)
    for stage in small.split.stages:
        found = small.config.memory.recomputed_groups(len(stage.layers))
        is_again = [again for layers, again in found if layers]
        assert len(set(is_again) if method == "block" else is_again) == groups


@pytest.mark.parametrize("preset", ["llama3-8b", "mixtral-8x7b", "nemotron-h-8b"])
@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("ends", [(1, 1), (0, 9), (7, 2), (4, 0)])
def test_layers_at_both_ends_keep_bf16(preset: str, pp: int, ends: tuple[int, int]) -> None:
    settings = {
        "pipeline_model_parallel_size": pp,
        "precision": "bf16",
        "fp8_format": "e4m3",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": ends[0],
        "num_layers_at_end_in_bf16": ends[1],
    }
    small, _ = prepare(layout_of(preset, pp, **settings))
    wide = [*map(small.config.model.is_wide, range(small.config.model.num_layers))]
    assert (wide[0], wide[-1]) == (ends[0] > 0, ends[1] > 0)
    assert not all(wide)


ZERO3 = "optim_grads_params"
BY_SCORE = {"moe_expert_capacity_factor": 1.0}


@pytest.mark.parametrize(
    ("settings", "mistakes"),
    [
        ({"fp8_format": "e4m3"} | BY_SCORE, 2),
        ({"zero_quantized_weights": True, "data_parallel_sharding_strategy": ZERO3}, 1),
        (BY_SCORE, 1),
        ({"moe_expert_rank_capacity_factor": 1.0}, 1),
        ({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}, 1),
        (BY_SCORE | {"moe_token_drop_policy": "position"}, 0),
        (BY_SCORE | {"precision": "fp64"}, 0),
        (BY_SCORE | {"precision": "bf16"}, 0),
    ],
)
def test_what_a_last_bit_decides_is_not_compared(settings: dict[str, Any], mistakes: int) -> None:
    layout = layout_of("debug-mixtral", 2, **({"precision": "fp32"} | settings))
    if mistakes == 0:
        prepare(layout)
        return
    with pytest.raises(ConfigError, match="a last bit of fp32") as refused:
        prepare(layout)
    assert len(refused.value.mistakes) == mistakes
