"""How many files a rank has open, and what is said where it may not have that many."""

import os
import resource
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.train.engine import Engine
from fivefold.train.machine.open_files import OTHERS, check_open_files, gloo_groups, open_files
from tests.pool import run
from tests.predict.layouts import planned

SETTINGS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"data_parallel_sharding_strategy": "optim", "num_distributed_optimizer_instances": 2},
    {"context_parallel_size": 4, "cp_comm_type": ("a2a+p2p",),
     "hierarchical_context_parallel_sizes": (2, 2)},
]  # fmt: skip


def _opened(rank: int, world: int, settings: dict[str, Any], folder: str) -> tuple[int, int]:
    config = Config(PRESETS["debug-llama"]).with_values(precision="fp32", **settings)
    layout = check(config, world)
    before = len(os.listdir("/proc/self/fd"))
    kept = Engine(layout, rank, torch.device("cpu")), Checkpointer(folder)
    opened = len(os.listdir("/proc/self/fd")) - before
    del kept
    groups = gloo_groups(layout, "cpu")
    del groups["all"]  # the pool's
    return opened, open_files(groups, "cpu") - OTHERS


@pytest.mark.parametrize("settings", SETTINGS)
def test_files_are_counted(settings: dict[str, Any], tmp_path: Any) -> None:
    for opened, counted in run(8, _opened, settings, str(tmp_path)):
        assert 0.8 * counted <= opened <= counted + OTHERS / 8, (opened, counted)


def test_a_limit_that_is_too_low_is_raised_or_named_before_anything_starts() -> None:
    layout = planned("llama3-8b", 1024, tp=8)
    needed = open_files(gloo_groups(layout, "cpu"), "cpu")
    set_to: list[tuple[int, int]] = []

    def limits(soft: int, hard: int, device: str) -> None:
        set_to.clear()
        with (
            patch.object(resource, "getrlimit", lambda _: (soft, hard)),
            patch.object(resource, "setrlimit", lambda _, both: set_to.append(both)),
        ):
            check_open_files(layout, device)

    limits(needed, needed, "cpu")
    assert not set_to
    limits(1024, resource.RLIM_INFINITY, "cpu")
    assert set_to == [(needed, resource.RLIM_INFINITY)]
    limits(1024, 1024, "cuda")  # where gloo connects only ranks that talk
    assert not set_to
    with pytest.raises(ConfigError) as caught:
        limits(1024, 2048, "cpu")
    assert set_to == [(2048, 2048)]
    assert f"about {needed:,} open files, and may have 2,048" in str(caught.value)
    assert "1023 (all) + 1023 (checkpoints) + 7 (tensor) + 127 (data)" in str(caught.value)
