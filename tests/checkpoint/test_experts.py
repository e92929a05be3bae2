"""Checkpoints of experts go from any of their layouts to any other, and training goes on as if
nothing had happened."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import Config
from fivefold.mesh.slices import piece_of
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import MIXTURE, chosen, config, named, shared_groups

pytestmark = pytest.mark.slow

MODEL = replace(
    MIXTURE,
    num_layers=2,
    moe_layer_freq="[0,1]",
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
)
ZERO = {"strategy": "optim_grads_params"}
# Layouts, one after the other: ranks and settings.
WAYS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "4 to 2 to 1, and parts of experts": [
        (4, {"ep": 4, "strategy": "optim"}),
        (4, {"ep": 2, "etp": 2, "dispatcher": "flex"}),
        (2, {"ep": 2, **ZERO}),
        (1, {}),
        (2, {"etp": 2, "dispatcher": "allgather"}),
    ],
    "8 to 2 to 1, and back": [
        (8, {"ep": 8, "strategy": "optim"}),
        (2, {"ep": 2, **ZERO}),
        (1, {}),
        (8, {"ep": 4, "etp": 2, "tp": 2}),
        (8, {"ep": 2, "pp": 2, "pipeline_model_parallel_layout": "Et|tL", **ZERO}),
        (8, {"ep": 8, "dispatcher": "flex"}),
    ],
    "parts of experts under every strategy": [
        (4, {"etp": 2, "ep": 1, "strategy": "no_shard"}),
        (4, {"etp": 2, "ep": 2, "tp": 2, "strategy": "optim"}),
        (8, {"etp": 4, "ep": 2, "strategy": "optim_grads"}),
        (4, {"etp": 2, "ep": 1, **ZERO}),
        (8, {"etp": 2, "ep": 2, **ZERO}),
    ],
}


def _config(values: dict[str, Any], samples: int = 8) -> Config:
    return config(MODEL, global_batch_size=samples, **named(**values))


def _step(engine: Engine, index: int) -> float:
    return engine.step(own_batch(engine, index)).loss


@shared_groups()
def _first(rank: int, world: int, settings: Config, folder: Path) -> float:
    """Two steps, saved; the loss of the next one."""
    engine = Engine(check(settings, world), rank, torch.device("cpu"))
    for index in range(2):
        _step(engine, index)
    Checkpointer(folder).save(engine.steps, engine.written_tensors(), {})
    return _step(engine, 2)


@shared_groups()
def _on(rank: int, world: int, settings: Config, source: Path, folder: Path) -> float:
    """What was saved, loaded into another layout and saved again; the loss of the next step."""
    engine = Engine(check(settings, world), rank, torch.device("cpu"), initialises=False)
    tensors = engine.stored_tensors()
    Checkpointer(source).load(None, tensors)
    engine.after_load(2, tensors)
    Checkpointer(folder).save(engine.steps, engine.written_tensors(), {})
    return _step(engine, 2)


@shared_groups()
@torch.no_grad()
def _whole(rank: int, world: int, folders: list[Path]) -> list[dict[str, Tensor]]:
    """All that each folder holds, undivided."""
    found = []
    engine = Engine(check(_config({}), 1), rank, torch.device("cpu"), initialises=False)
    tensors = engine.stored_tensors()
    for folder in folders:
        for tensor in tensors.values():
            _local(tensor).zero_()
        Checkpointer(folder).load(None, tensors)
        found.append({name: _local(tensor).clone() for name, tensor in tensors.items()})
    return found


def _local(tensor: Any) -> Tensor:
    return piece_of(tensor).local if isinstance(tensor, Tensor) else tensor.local


@pytest.mark.parametrize("name", chosen(WAYS, "4 to 2 to 1, and parts of experts"))
def test_experts_go_from_layout_to_layout(name: str, tmp_path: Path) -> None:
    samples = max(ranks for ranks, _ in WAYS[name])
    (ranks, values), *others = WAYS[name]
    folders = [tmp_path / str(number) for number in range(len(others) + 1)]
    (loss, *_) = run(ranks, _first, _config(values, samples), folders[0])
    for (ranks, values), source, folder in zip(others, folders, folders[1:], strict=False):
        for again in run(ranks, _on, _config(values, samples), source, folder):
            assert again == pytest.approx(loss, rel=1e-12, abs=0), values
    (saved, *copies) = run(1, _whole, folders)[0]
    moments = [tensor for name, tensor in saved.items() if name.startswith("optim.")]
    assert moments and all(tensor.abs().sum() > 0 for tensor in moments)
    assert any(name.endswith("expert_bias") and tensor.any() for name, tensor in saved.items())
    for copy in copies:
        assert copy.keys() == saved.keys()
        assert all(torch.equal(copy[name], tensor) for name, tensor in saved.items())
