"""Bounds are bounds: what they exclude could not have won. Held against the real predictions."""

from functools import cache
from math import inf

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.description.shape import count_parameters
from fivefold.predict.cluster_file import load_cluster
from fivefold.predict.memory.peak import peak_memory
from fivefold.predict.step import predict
from fivefold.search.bound_tables import Ranks
from fivefold.search.branch_and_bound import Ledger, OpenCandidates
from fivefold.search.enumeration import enumerate_space
from fivefold.search.memory_bound import least_state, memory_bound
from fivefold.search.request import Request
from fivefold.search.space import Space
from fivefold.search.time_bound import time_bound
from tests.verify.cases import chosen

TIGHT = 1e-9  # relative; sums in another order
CASES = {
    "llama3-8b": ("H100", 32, 64, 8192),
    "gpt2": ("A100", 16, 64, 1024),
    "mixtral-8x7b": ("H100", 32, 32, 4096),
    "deepseek-v2-lite": ("H800", 16, 32, 4096),
    "nemotron-3-nano-30b-a3b": ("H100", 16, 32, 8192),
}
OTHERWISE = (
    {},
    {"precision": "fp32", "ddp_bucket_size": 10_000_000},
    {"grad_reduce_in_bf16": True, "ddp_reduce_scatter_with_fp32_accumulation": True},
    {"overlap_param_gather_with_optimizer_step": True},
    {"overlap_param_gather": False, "overlap_grad_reduce": False},
    {"optimizer": "muon", "muon_nesterov": True},
    {"norm_placement": "after"},
    {"zero_quantized_weights": True, "zero_quantized_gradients": True},
    {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True},
    {
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 3,
    },
    {
        "zero_hpz_partition_size": 4,
        "zero_quantized_gradients": True,
        "zero_qgz_partition_size": 4,
    },
)


@cache
def space_of(model: str, otherwise: int = 0) -> Space:
    _, world, batch, length = CASES[model]
    config = Config(PRESETS[model]).with_values(
        global_batch_size=batch, seq_length=length, **OTHERWISE[otherwise]
    )
    space = enumerate_space(config, world)
    # Long programs take seconds to sweep, and repeat what short ones show.
    stages = np.array([len(partition.split.stages) for partition in space.partitions])[
        space.columns["partition"]
    ]
    return space.take(np.flatnonzero(stages * space.columns["microbatches"] <= 600))


@pytest.mark.slow
@pytest.mark.parametrize("model", chosen(CASES, "gpt2", "deepseek-v2-lite"))
@example(place=0.7337371690994527, otherwise=0)  # most is held in the drain
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(place=st.floats(0, 1, exclude_max=True), otherwise=st.sampled_from(range(len(OTHERWISE))))
def test_no_layout_is_faster_or_smaller_than_its_bounds(
    model: str, place: float, otherwise: int
) -> None:
    gpu, world, *_ = CASES[model]
    cluster, space = load_cluster(gpu, world), space_of(model, otherwise)
    row = space.take(np.array([int(place * len(space))]))
    ranks = Ranks.of(row.config.model, row.partitions)
    layout = check(row.config_of(0), world, planned=True)
    memory, prediction = peak_memory(layout, cluster), predict(layout, cluster)
    assert memory_bound(row, ranks)[0] <= memory.max_allocated * (1 + TIGHT)
    assert least_state(row.config) <= world * memory.max_allocated * (1 + TIGHT)
    bounds = time_bound(row, ranks, cluster)
    least = bounds.seconds[0]
    assert least <= prediction.step_time * (1 + TIGHT)
    request = Request(row.config, frozenset(), cluster)
    candidates = OpenCandidates(request, row, bounds, Ledger(inf))
    candidates.time([0])
    assert least <= candidates.unseen <= prediction.step_time * (1 + TIGHT)
    rounds = "zero_quantized_gradients" in OTHERWISE[otherwise]  # by kernels that have no bound
    assert rounds or least >= prediction.step_time / 5  # and they say something


def test_all_ranks_together_hold_each_weight_with_its_state() -> None:
    config = Config(PRESETS["llama3-8b"]).with_values(precision="bf16")
    weights = count_parameters(config.model, padded=False).total
    assert least_state(config) == 12 * weights  # in fp32, with both moments
    on_host = config.with_values(optimizer_cpu_offload=True)
    assert least_state(on_host) == 2 * weights


def test_replicas_that_do_not_divide_those_of_experts_are_bounded() -> None:
    """Of six copies of an expert, of which four groups have replicas, three share its state."""
    config = Config(PRESETS["debug-mixtral"]).with_values(global_batch_size=24, seq_length=64)
    space, cluster = enumerate_space(config, 24), load_cluster("H100", 24)
    c = space.columns
    copies = c["dp"] * c["cp"] * c["tp"] // (c["ep"] * c["etp"])
    uneven = np.flatnonzero((copies % c["instances"] > 0) & (np.gcd(copies, c["instances"]) > 1))
    assert len(uneven) > 20
    few = space.take(uneven[:: len(uneven) // 20])
    ranks = Ranks.of(few.config.model, few.partitions)
    memory, least = memory_bound(few, ranks), time_bound(few, ranks, cluster).seconds
    for row in range(len(few)):
        layout = check(few.config_of(row), 24, planned=True)
        assert memory[row] <= peak_memory(layout, cluster).max_allocated * (1 + TIGHT)
        assert least[row] <= predict(layout, cluster).step_time * (1 + TIGHT)


def test_bounds_of_many_are_those_of_each() -> None:
    cluster, space = load_cluster("H100", 32), space_of("llama3-8b")
    few = space.take(np.arange(0, len(space), len(space) // 50))
    ranks = Ranks.of(few.config.model, few.partitions)
    together = time_bound(few, ranks, cluster).seconds
    memory = memory_bound(few, ranks)
    for row in range(0, len(few), 7):
        alone = few.take(np.array([row]))
        assert time_bound(alone, ranks, cluster).seconds[0] == pytest.approx(together[row])
        assert memory_bound(alone, ranks)[0] == pytest.approx(memory[row])
