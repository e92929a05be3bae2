"""Ranks of a launcher that keeps no store: what they have to say is said once."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.peers import free_port
from fivefold.errors import ConfigError
from fivefold.train.meeting import meet
from fivefold.train.rank_env import RankEnv, read_rank_env
from fivefold.train.started import run_started
from tests.programs import Program

WHAT = "the run folder is in use"


def _fail_after(seconds: float) -> int:
    def worker(env: RankEnv) -> int:
        store = meet(env, timedelta(minutes=1))
        dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, store=store)
        dist.barrier()
        time.sleep(seconds)
        raise ConfigError(WHAT)

    return run_started(worker, read_rank_env())


@pytest.mark.parametrize("seconds", [(0.0, 1.5, 0.5), (1.0, 0.0, 0.0)])
def test_an_error_of_all_ranks_is_said_once_whichever_of_them_is_slow(
    seconds: Sequence[float],
) -> None:
    size, port = str(len(seconds)), str(free_port())
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    ranks = [
        Program(_fail_after, wait, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, wait in enumerate(seconds)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert all(rank.returncode == 2 for rank in ranks)
    assert "".join(errors).count(WHAT) == 1
    assert not any(word in "".join(errors) for word in ("Traceback", "TCPStore"))
