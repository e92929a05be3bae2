"""Ranks of a launcher that keeps no store: what they have to say is said once."""

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from benchmarks.peers import free_port
from fivefold.errors import ConfigError
from fivefold.train.ranks.meeting import meet
from fivefold.train.ranks.rank_env import RankEnv, read_rank_env
from fivefold.train.ranks.started import run_started
from tests.programs import Program

WHAT = "the run folder is in use"


def _run(seconds: float, ends: Callable[[], int]) -> int:
    def worker(env: RankEnv) -> int:
        store = meet(env, timedelta(minutes=1))
        dist.init_process_group("gloo", rank=env.rank, world_size=env.world_size, store=store)
        dist.barrier()
        time.sleep(seconds)
        return ends()

    return run_started(worker, read_rank_env())


def _fail() -> int:
    raise ConfigError(WHAT)


def _succeed() -> int:
    return 0


def _errors(seconds: Sequence[float], ends: Callable[[], int], status: int) -> str:
    """What ranks print that end after so many seconds each."""
    size, port = str(len(seconds)), str(free_port())
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    ranks = [
        Program(_run, wait, ends, env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, wait in enumerate(seconds)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [status] * len(ranks)
    return "".join(errors)


@pytest.mark.parametrize("seconds", [(0.0, 0.8, 0.3), (0.6, 0.0, 0.0)])
def test_an_error_of_all_ranks_is_said_once_whichever_of_them_is_slow(
    seconds: Sequence[float],
) -> None:
    errors = _errors(seconds, _fail, 2)
    assert errors.count(WHAT) == 1
    assert not any(word in errors for word in ("Traceback", "TCPStore"))


def test_ranks_that_succeed_say_nothing_whichever_of_them_is_slow() -> None:
    """The first rank hosts the store on which threads of all ranks wait for questions."""
    assert _errors((0.0, 0.8), _succeed, 0) == ""
