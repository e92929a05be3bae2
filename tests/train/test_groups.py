"""Every group of a run waits as long as it was told to, and no longer."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.train import Options
from fivefold.config.sources import load
from fivefold.train.engine import Engine
from fivefold.train.ranks.join import init_process_group
from fivefold.train.ranks.launch import launch_local
from fivefold.train.ranks.rank_env import RankEnv
from tests.train.faults import LAYOUTS

SECONDS = 77.0


@pytest.mark.slow
def test_the_time_out_reaches_every_group(tmp_path):
    def worker(env: RankEnv) -> None:
        init_process_group(env, "cpu", timeout_seconds=SECONDS)
        for ranks, flags in LAYOUTS.values():
            if ranks == env.world_size:
                _, config = load(["debug", *flags.split()], Options)
                Engine(check(config, ranks), env.rank, torch.device("cpu"))
        Checkpointer(tmp_path)
        groups = dist.distributed_c10d._world.pg_map
        assert len(groups) > 5
        for group in groups:
            backend = group._get_backend(torch.device("cpu"))
            assert backend.options._timeout == timedelta(seconds=SECONDS)

    assert launch_local(worker, 4) == 0
