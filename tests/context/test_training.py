"""Whole runs under context parallelism: the same losses, and a part of the activations."""

from functools import cache
from math import isclose
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.verify.cases import MODELS, chosen, config, shared_groups
from tests.verify.test_context import WHOLE, context

pytestmark = pytest.mark.slow

STEPS = 20


def losses(rank: int, world: int, settings: Config) -> list[float]:
    """Of every step."""
    with shared_groups():
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        rows = slice(0, settings.training.global_batch_size)
        return [
            engine.step(microbatches(settings, global_batch(settings, step % 4), rows)).loss
            for step in range(STEPS)
        ]


@pytest.mark.parametrize(
    ("strategy", "kind", "more"),
    [
        pytest.param("optim", "p2p", {}, marks=pytest.mark.exhaustive),
        pytest.param("no_shard", "p2p", WHOLE, marks=pytest.mark.exhaustive),
        pytest.param("optim_grads_params", "a2a", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_twenty_steps_without_data_parallelism(
    strategy: str, kind: str, more: dict[str, Any]
) -> None:
    """Gradients must be summed over cp although dp is 1; the first loss alone would not tell."""
    settings = config(MODELS["llama"], lr=1e-2, lr_decay_style="constant", **more)
    (expected,) = run(1, losses, settings)
    assert expected[-4] < 0.8 * expected[0], "nothing was learnt that could go wrong"
    sharded = settings.with_values(data_parallel_sharding_strategy=strategy, **context(2, kind))
    for found in run(2, losses, sharded):
        off = [a for a, b in zip(found, expected, strict=True) if not isclose(a, b, rel_tol=1e-9)]
        assert not off


def kept(rank: int, world: int, settings: Config) -> int:
    """Bytes that a forward keeps for its backward, parameters aside."""
    with shared_groups():
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        (batch,) = engine._batches(microbatches(settings, global_batch(settings, 0), slice(0, 1)))
        stage = engine.model.stages[0]
        engine.model.gradients[0].before_run(trains=True)
        parameters = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = stage(None, batch)
        loss.backward()
        return sum(storages.values())


@cache
def alone(settings: Config) -> int:
    """What one device keeps."""
    (bytes_,) = run(1, kept, settings)
    return bytes_


@pytest.mark.parametrize("world", chosen([2, 4], 4))
@pytest.mark.parametrize(
    ("kind", "more"), [("p2p", 1.02), ("all_gather", 1.02), ("a2a", 1.15), ("a2a+p2p", 1.15)]
)
def test_activations_of_a_rank_are_one_part_of_all(kind: str, more: float, world: int) -> None:
    """Exchanging heads keeps outputs twice, before and after, and few key/value heads repeated."""
    settings = config(MODELS["llama"], seq_length=512, global_batch_size=1, **WHOLE)
    for found in run(world, kept, settings.with_values(**context(world, kind))):
        assert found * world / alone(settings) <= more
