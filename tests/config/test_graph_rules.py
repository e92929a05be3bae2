"""Which runs may replay a step as one graph: all others are refused by name, with what works."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.config.rules.graph import OFF, check_graph_device
from fivefold.errors import ConfigError
from tests.config.test_model_config import SPARSE

LLAMA = PRESETS["debug-llama"]
GRAPH = {"cuda_graph_impl": "local", "reset_attention_mask": False, "global_batch_size": 8}
SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}
REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "reset_attention_mask": ({"reset_attention_mask": True}, 1),
    "attention_chunk_size": ({"attention_chunk_size": 8}, 1),
    "linear attention": (
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "2"},
        1,
    ),
    "Mamba-2": (
        {"hybrid_override_pattern": "M*-".ljust(LLAMA.num_layers, "M"), "mamba_num_groups": 2},
        1,
    ),
    "hidden_dropout": ({"hidden_dropout": 0.1}, 1),
    "attention_dropout": ({"attention_dropout": 0.1}, 1),
    "lora_dropout": ({"lora_rank": 4, "lora_dropout": 0.1}, 1),
    "8 experts": ({"num_experts": 8, "moe_ffn_hidden_size": 32}, 1),
    "pp 2": ({"pipeline_model_parallel_size": 2}, 2),
    "tp_comm_overlap": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "tp_comm_overlap": True},
        2,
    ),
    "overlap_param_gather_with_optimizer_step": (
        {
            "data_parallel_sharding_strategy": "optim",
            "overlap_param_gather_with_optimizer_step": True,
        },
        2,
    ),
    "optimizer_cpu_offload": ({"optimizer_cpu_offload": True}, 1),
    "offload_optimizer_states": ({"offload_optimizer_states": True}, 1),
    "param_cpu_offload": ({**SHARDED, "optimizer_cpu_offload": True, "param_cpu_offload": True}, 2),
    "fine_grained_activation_offloading": (
        {"fine_grained_activation_offloading": True, "offload_modules": ("core_attn",)},
        1,
    ),
    "log_straggler": ({"log_straggler": True}, 2),
}
ALLOWED: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "compiled": ({"compile": True}, 1),
    "fp8": ({"fp8_format": "hybrid"}, 1),
    "recomputed": ({"recompute_granularity": "full"}, 1),
    "adapters": ({"lora_rank": 4}, 1),
    "chosen tokens": (SPARSE, 1),
    "tensor": ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
    "ring": ({"context_parallel_size": 2}, 2),
    "sharded": (SHARDED, 2),
    "positions": ({"reset_position_ids": False}, 1),
    "profile": ({"profile": True}, 1),
    "hashes": ({"check_weight_hash_across_dp_replicas_interval": 5}, 2),
}


def _of(values: dict[str, Any]) -> Config:
    return Config(LLAMA).with_values(**GRAPH | values)


@given(
    st.sets(st.sampled_from([*REFUSED]), max_size=4),
    st.sets(st.sampled_from([*ALLOWED]), max_size=3),
)
def test_any_run_is_refused_by_name_or_may_replay(refused: set[str], allowed: set[str]) -> None:
    """What is refused without graphs, too, says nothing here."""
    values: dict[str, Any] = {}
    world = 1
    for more, ranks in [ALLOWED[name] for name in allowed] + [REFUSED[name] for name in refused]:
        values |= more
        world = max(world, ranks)
    config = _of(values)
    parallel = config.parallel
    degree = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    world = max(world, degree * parallel.pipeline_model_parallel_size)
    try:
        check(config.with_values(cuda_graph_impl=None), world)
    except ConfigError:
        return
    if not refused:
        check(config, world)
        return
    with pytest.raises(ConfigError) as told:
        check(config, world)
    said = [mistake.what for mistake in told.value.mistakes]
    assert all("cuda_graph_impl" in what for what in said)
    alone = config.parallel.tensor_model_parallel_size == 1
    for name in refused - ({"tp_comm_overlap"} if alone else set()):
        assert any(re.search(rf"\b{name}\b", what) for what in said), (name, said)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_what_works(name: str) -> None:
    values, world = REFUSED[name]
    with pytest.raises(ConfigError) as told:
        check(_of(values), world)
    assert all(mistake.works[-1] == OFF for mistake in told.value.mistakes)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_passes(name: str) -> None:
    values, world = ALLOWED[name]
    assert check(_of(values), world).config.training.cuda_graph_impl == "local"


def test_no_setting_is_looked_at_without_graphs() -> None:
    for values, world in REFUSED.values():
        check(_of(values | {"cuda_graph_impl": None}), world)


def test_graphs_need_a_gpu_of_the_rank_s_own() -> None:
    config = _of({})
    check_graph_device(config, "cuda", shared=False)
    check_graph_device(config.with_values(cuda_graph_impl=None), "cpu", shared=False)
    with pytest.raises(ConfigError, match="the device is cpu"):
        check_graph_device(config, "cpu", shared=False)
    with pytest.raises(ConfigError, match="share a GPU"):
        check_graph_device(config, "cuda", shared=True)
