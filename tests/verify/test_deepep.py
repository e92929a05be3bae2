"""Tokens that travel by DeepEP's kernels reach what they reach by our messages.

There is no GPU in these tests: a stand-in has the kernels' interface (deep_ep_stand_in.py).
"""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fivefold.check import check
from fivefold.errors import ConfigError
from fivefold.expert.deepep import Kernels
from fivefold.expert.deepep_rules import check_deepep
from fivefold.verify.report import VerifyReport
from tests.verify.cases import MIXTURE, compare_on_rank, config, verify_in_pool
from tests.verify.deep_ep_stand_in import StandInBuffer, launched, package

pytestmark = pytest.mark.slow

MODEL = replace(MIXTURE, hidden_size=24)  # a row in fp32 is a multiple of 16 bytes
FLEX = {"moe_token_dispatcher_type": "flex", "moe_enable_deepep": True}
CASES: list[tuple[int, dict[str, Any]]] = [
    (
        2,
        {
            "expert_model_parallel_size": 2,
            "moe_router_topk": 1,
            "moe_router_score_function": "sigmoid",
            "moe_apply_probs_on_input": True,
            "moe_shared_expert_overlap": True,
        },
    ),
    (
        4,
        {
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 2,
            "moe_expert_capacity_factor": 0.7,
            "data_parallel_sharding_strategy": "optim",
        },
    ),
    (
        4,
        {
            "expert_model_parallel_size": 4,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "moe_expert_rank_capacity_factor": 0.8,
            "recompute_granularity": "full",
        },
    ),
]


@contextmanager
def _installed() -> Iterator[None]:
    sys.modules["deep_ep"] = package()
    try:
        yield
    finally:
        del sys.modules["deep_ep"]


def _with_stand_in(rank: int, world: int, *arguments: Any) -> VerifyReport | None:
    calls: list[str] = []
    dispatch = StandInBuffer.dispatch

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("backward" if "handle" in kwargs else "forward")
        return dispatch(*args, **kwargs)

    with (
        _installed(),
        launched,
        patch.object(StandInBuffer, "num_sms", 20),
        patch.object(StandInBuffer, "dispatch", counted),
    ):
        report = compare_on_rank(rank, world, *arguments)
        assert {"forward", "backward"} <= set(calls), "the kernels were not called"
        assert StandInBuffer.num_sms == 24, "moe_deepep_num_sms"
    return report


@pytest.mark.parametrize(
    ("ranks", "values"),
    [*CASES[:-1], pytest.param(*CASES[-1], marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_the_kernels_send_what_is_needed(ranks: int, values: dict[str, Any]) -> None:
    settings = config(MODEL, ranks, **FLEX, moe_deepep_num_sms=24, **values)
    report = verify_in_pool(ranks, settings, on_rank=_with_stand_in, steps=1)
    assert report.passed, report.text()


def test_the_number_of_multiprocessors_reaches_the_buffer() -> None:
    group: Any = SimpleNamespace(size=lambda: 4)
    with patch.object(StandInBuffer, "num_sms", 20):
        kernels = Kernels(group, 12, package())
        buffer = kernels.buffer(torch.zeros(3, 64, dtype=torch.bfloat16))
        assert StandInBuffer.num_sms == 12
    assert buffer.num_nvl_bytes == 12 * (64 * 2) * 4
    assert kernels.buffer(torch.zeros(5, 64, dtype=torch.bfloat16)) is buffer


# deep_ep/buffers/legacy.py of release 2.1.0, without self.
ARGUMENTS = {
    "__init__": "group num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
    "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy enable_shrink comm",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "get_dispatch_layout": "topk_idx num_experts previous_event async_finish "
    "allocate_on_comm_stream",
    "dispatch": "x handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
    "num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens config "
    "previous_event async_finish allocate_on_comm_stream",
    "combine": "x handle topk_weights bias config previous_event async_finish "
    "allocate_on_comm_stream",
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_stand_in_has_the_arguments_of_the_package(name: str) -> None:
    found = [n for n in inspect.signature(getattr(StandInBuffer, name)).parameters if n != "self"]
    assert found == ARGUMENTS[name].split()
    if importlib.util.find_spec("deep_ep") is not None:
        theirs = inspect.signature(getattr(Kernels(None, 20).package.Buffer, name))  # type: ignore[arg-type]
        assert [n for n in theirs.parameters if n != "self"] == found


def test_where_the_kernels_cannot_run_they_are_refused_by_name() -> None:
    settings = config(MIXTURE, **FLEX, expert_model_parallel_size=2)
    missing = patch("fivefold.expert.deepep_rules.find_spec", return_value=None)
    with missing, pytest.raises(ConfigError) as error:
        check_deepep(settings, "cpu")
    said = str(error.value)
    for words in ("deep_ep, which is not installed", "the device is cpu", "precision is fp64"):
        assert words in said
    assert "hidden_size 20" in said and "--hidden-size 24" in said
    assert said.count("--no-moe-enable-deepep") == 4
    spec = SimpleNamespace(origin="somewhere")
    with patch("fivefold.expert.deepep_rules.find_spec", return_value=spec):
        check_deepep(settings.with_values(precision="bf16", hidden_size=24), "cuda")


@pytest.mark.parametrize(
    ("values", "works"),
    [
        ({"moe_token_dispatcher_type": "alltoall"}, "--moe-token-dispatcher-type flex"),
        ({"expert_model_parallel_size": 1}, "--expert-model-parallel-size 2"),
        ({"moe_deepep_num_sms": 7}, "--moe-deepep-num-sms 8"),
        ({"num_experts": 12, "expert_model_parallel_size": 6}, "--expert-model-parallel-size 4"),
        (
            {
                "num_experts": 16,
                "expert_model_parallel_size": 16,
                "moe_expert_rank_capacity_factor": 1.5,
            },
            "--expert-model-parallel-size 8",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_the_kernels(values: dict[str, Any], works: str) -> None:
    settings = config(MODEL).with_values(**FLEX | {"expert_model_parallel_size": 2} | values)
    with pytest.raises(ConfigError, match="deepep") as error:
        check(settings, 48)
    assert works in str(error.value)
