"""Memory that tensors hold is counted to the byte, and limited."""

import re
from random import Random

import pytest
import torch
from torch import Tensor

from fivefold.audit.holdings import DeviceLimit
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.errors import ConfigError, TrainingError
from fivefold.memory.host import HostLink
from fivefold.train.engine import Engine
from tests.optim.test_offload import _engine, _step
from tests.pool import Pool
from tests.verify.cases import MODELS, config, named

ZERO3 = {"strategy": "optim_grads_params"}
AWAY = ZERO3 | {
    "optimizer_cpu_offload": True,
    "param_cpu_offload": True,
    "recompute_granularity": "full",
}


@pytest.mark.parametrize("seed", range(3))
def test_what_operations_make_and_give_back_is_counted_to_the_byte(seed: int) -> None:
    random, kept, sizes = Random(seed), dict[int, Tensor](), dict[int, int]()
    weights, host = torch.zeros(100), torch.zeros(1000)
    limit, link = DeviceLimit(1e9, {"weights": [weights]}, [host]), HostLink(torch.device("cpu"))
    peak = weights.nbytes
    with limit:
        for number in range(100):
            kind = random.choice(("new", "view", "in place", "resize", "free", "host"))
            if kind == "new":
                kept[number] = torch.ones(random.randint(0, 50), dtype=torch.float64)
                sizes[number] = kept[number].nbytes
            elif kind == "host":
                host[:100].copy_(weights)
                kept[number], _ = link.to_host(weights)
                sizes[number] = 0
            elif kept:
                at = random.choice([*kept])
                if kind == "free":
                    del kept[at], sizes[at]
                elif kind == "resize" and sizes[at]:
                    kept[at].untyped_storage().resize_(0)
                    sizes[at] = 0
                elif sizes[at]:
                    _ = kept[at][1:].view(-1) if kind == "view" else kept[at].add_(1)
                    del _
            assert limit.holdings.total == weights.nbytes + sum(sizes.values())
            peak = max(peak, limit.holdings.total)
    assert limit.holdings.peak == peak


def _peak(engine: Engine) -> int:
    assert isinstance(engine.model.limited, DeviceLimit)
    return engine.model.limited.holdings.peak


def _limited(rank: int, world: int, plain: Config, away: Config) -> str:
    every = [_engine(settings, rank, world) for settings in (plain, away)]
    for step in range(2):
        results = [_step(engine, step) for engine in every]
        assert results[0] == results[1]
    here, there = map(_peak, every)
    assert 2 * there < here, (here, there)
    _step(_engine(away.with_values(device_memory_limit=str(there)), rank, world), 0)
    with pytest.raises(TrainingError) as caught:
        _step(_engine(plain.with_values(device_memory_limit=str(here - 1)), rank, world), 0)
    with pytest.raises(TrainingError, match="weights"):  # from the start
        _engine(plain.with_values(device_memory_limit="1KiB"), rank, world)
    return str(caught.value)


def test_a_step_that_needs_more_stops_and_says_what_holds_it(pool: Pool) -> None:
    values = {"device_memory_limit": "1GiB", "precision": "bf16"}
    values |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    plain, away = (config(MODELS["gpt"], 1, **named(**way, **values)) for way in (ZERO3, AWAY))
    (told,) = pool.run(1, _limited, plain, away)
    first, *lines = told.splitlines()
    assert "more than --device-memory-limit" in first
    assert any(re.search(r"iB  (weights|optimizer)$", line) for line in lines)
    assert any(" at model/" in line for line in lines)


@pytest.mark.parametrize("limit", ["", "3 apples", "-1GiB"])
def test_a_limit_that_is_no_size_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        check(config(MODELS["gpt"], 1, device_memory_limit=limit), 1)
