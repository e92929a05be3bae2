"""Waits of the host for the device, counted where there is no device."""

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.audit.waits import HostWaits
from fivefold.check import check
from fivefold.config.sources import read_config
from fivefold.mesh.slices import local_tensor
from fivefold.model.norms import RMSNorm
from fivefold.train.engine import Engine
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.verify.cases import shared_groups

CPU = torch.device("cpu")
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.view(2, 4).cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x + 1),
    "of what is copied": lambda x: torch.empty(8).copy_(x).tolist(),
    "of what is read beside it": lambda x: (at := torch.arange(8), x * at) and at.tolist(),
}


@pytest.mark.parametrize("name", READS)
def test_what_reads_the_device_waits_for_it(name: str) -> None:
    weight = torch.arange(8.0)
    with HostWaits(CPU, [weight]) as waits:
        READS[name](weight * 2)
    assert waits.places.total() == 1


def test_what_the_host_has_is_read_without_waiting() -> None:
    weight, ids = torch.ones(8), torch.arange(8)
    own, methods = ids.diff() != 0, {*vars(Tensor)}
    with HostWaits(CPU, [weight]) as waits:
        own.nonzero().tolist()
        weight.mul_(2).add_(ids.clone()).view(2, 4).sum()  # launched, not read
        weight[own.nonzero().flatten()].copy_(torch.ones(7))
        torch.empty(8).copy_(ids).tolist()
        assert ids[0] == 0
    assert not waits.places
    assert {*vars(Tensor)} == methods


def test_memory_that_is_used_again_is_not_taken_for_the_device() -> None:
    weight = torch.ones(64)
    with HostWaits(CPU, [weight]) as waits:
        for _ in range(200):
            (weight * 2).sum()  # freed at once: its memory may be the next one's
            torch.ones(64).sum().item()
    assert not waits.places


def _reads_forward(norm: RMSNorm, x: Tensor) -> Tensor:
    assert x.sum().item() is not None
    return _forward(norm, x)


def _reads_backward(norm: RMSNorm, x: Tensor) -> Tensor:
    y = _forward(norm, x)
    y.register_hook(lambda grad: grad.sum().tolist() and None)
    return y


_forward = RMSNorm.forward
# With the place where a layer's norms wait, and that of the last norm.
PLANTS: dict[str, tuple[Callable[[RMSNorm, Tensor], Tensor], tuple[str, ...]]] = {
    "none": (_forward, ()),
    "forward": (_reads_forward, ("at model/layer.py", "at model/transformer.py")),
    "backward": (_reads_backward, ("at pipeline/run/executor.py", "at pipeline/run/executor.py")),
}


@shared_groups()
def _step(rank: int, world: int, planted: str) -> None:
    layout = check(read_config("debug", global_batch_size=2, seq_length=16), 1)
    engine = Engine(layout, rank, CPU)
    forward, lines = PLANTS[planted]
    waits = HostWaits(CPU, map(local_tensor, engine.parameters.values()))
    with patch.object(RMSNorm, "forward", forward), waits:
        engine.step(microbatches_of(layout, rank))
    files: Counter[str] = Counter()
    for place, times in waits.places.items():
        files[place.partition(":")[0]] += times
    expected = Counter({"at train/step_result.py": 1})
    for line, norms in zip(lines, (2 * layout.config.model.num_layers, 1), strict=False):
        expected[line] += norms * layout.num_microbatches
    assert files == expected


@pytest.mark.parametrize("planted", PLANTS)
def test_a_planted_wait_is_found_and_named(planted: str) -> None:
    run(1, _step, planted)
