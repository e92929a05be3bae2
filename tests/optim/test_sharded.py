import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fivefold.config.training import OptimizerConfig
from fivefold.mesh.slices import local_slices, local_tensor
from fivefold.optim.adamw import AdamW
from fivefold.optim.grad_norm import clip_, global_grad_norm
from fivefold.optim.schedule import StepRates
from tests.mesh.layouts import LAYOUTS, content, parameters, world_size
from tests.pool import run

CONFIG = OptimizerConfig(lr=0.1)


def _is_first(parameter: nn.Parameter) -> bool:
    """Whether this rank is at coordinate 0 of every axis that replicates a parameter."""
    if not isinstance(parameter, DTensor):
        return True
    here = zip(parameter.device_mesh.get_coordinate() or (), parameter.placements, strict=True)
    return not any(index for index, placement in here if placement.is_replicate())


def _norm_and_clip(rank: int, world: int, layout: str, expected: float) -> None:
    held = parameters(layout)
    grads = []
    for name, parameter in held.items():
        local = content(name, parameter.shape)[local_slices(parameter)].clone()
        grads.append((local, _is_first(parameter) and (rank == 0 or layout != "ddp2")))
    norm = global_grad_norm(grads, dist.group.WORLD)
    assert norm.item() == pytest.approx(expected, rel=1e-12)
    clip_([grad for grad, _ in grads], norm, 1.0)
    clipped = global_grad_norm(grads, dist.group.WORLD)
    assert clipped.item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_element_is_counted_once_in_every_layout(layout: str) -> None:
    full = [parameter.detach().double() for parameter in parameters("plain").values()]
    expected = torch.cat([tensor.flatten() for tensor in full]).norm().item()
    run(world_size(layout), _norm_and_clip, layout, expected)


def _linear() -> nn.Linear:
    return nn.Linear(6, 10, bias=False)  # 10 rows over 4 ranks: 3, 3, 3, 1


def _backward(linear: nn.Module, step: int) -> None:
    linear(content(f"x{step}", (5, 6))).square().sum().backward()


def _step_from_meta(rank: int, world: int, steps: int) -> None:
    reference = _linear()
    with torch.device("meta"):
        sharded = _linear()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (world,)))
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        reference.weight.copy_(content("w", (10, 6)))
        part = local_slices(sharded.weight)
        local_tensor(sharded.weight).copy_(reference.weight[part])
    ours = AdamW(dict(sharded.named_parameters()), CONFIG)
    theirs = AdamW(dict(reference.named_parameters()), CONFIG)
    for step in range(steps):
        for module, optimizer in ((sharded, ours), (reference, theirs)):
            _backward(module, step)
            optimizer.step(StepRates(0.1, 0.1, 0.1))
            optimizer.zero_grad()
    torch.testing.assert_close(
        local_tensor(sharded.weight), reference.weight.detach()[part], rtol=1e-5, atol=1e-6
    )
    moments = ours.state_tensors()["optim.exp_avg.weight"]
    expected = theirs.state_tensors()["optim.exp_avg.weight"].local[part]
    torch.testing.assert_close(moments.local, expected, rtol=1e-4, atol=1e-4)


def test_uneven_shards_that_began_on_the_meta_device_step_like_one_device() -> None:
    run(4, _step_from_meta, 2)
