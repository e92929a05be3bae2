"""Leaves of DTensor parameters: where their gradients go, and what memory they hold."""

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fivefold.model.leaves import add_to_grad, local, when_accumulated
from fivefold.rehearse.world import pretended_world
from tests.pool import run


def _parameter(placement: Placement) -> nn.Parameter:
    """[3, 2] on each of two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    part = torch.arange(6.0).view(3, 2)
    return nn.Parameter(DTensor.from_local(part, mesh, [placement]))


def _gradients_of_every_way(rank: int, world: int, placement: Placement) -> None:
    parameter, calls = _parameter(placement), []
    when_accumulated(parameter, lambda: calls.append(_here(parameter).clone()))
    expected = torch.zeros(3, 2)
    for factor in (2.0, 3.0):
        (local(parameter) * factor + local(parameter)).sum().backward()  # one sum of two uses
        expected += factor + 1
        assert len(calls) == 1 and calls.pop().equal(expected)
        assert local(parameter).grad is None
    (parameter.to_local() * 5.0).sum().backward()  # the way of a compiled layer
    expected += 5
    assert len(calls) == 1 and calls.pop().equal(expected)
    add_to_grad(parameter, torch.ones(1, 2), slice(2, 3))
    expected[2] += 1
    assert _here(parameter).equal(expected)
    assert isinstance(parameter.grad, DTensor)
    assert parameter.grad.placements == parameter.placements
    assert parameter.grad.shape == parameter.shape


def _here(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_every_way_of_a_gradient_leads_to_the_parameter(placement: Placement) -> None:
    run(2, _gradients_of_every_way, placement)


def test_a_leaf_is_the_memory_of_its_parameter_and_goes_with_it() -> None:
    with pretended_world(0, 2, gpus=True):
        parameter = _parameter(Shard(0))
        leaf = local(parameter)
        assert leaf is local(parameter) and leaf.is_leaf and leaf.requires_grad
        with torch.no_grad():
            parameter.fill_(7.0)
        assert leaf.equal(torch.full((3, 2), 7.0))
        gone = weakref.ref(leaf)
        del leaf, parameter
        gc.collect()
        assert gone() is None


def test_a_backward_that_gives_no_gradient_leaves_none() -> None:
    with pretended_world(0, 2, gpus=True):
        parameter = _parameter(Shard(0))
        _NoGradient.apply(torch.ones(3, 2, requires_grad=True), local(parameter)).sum().backward()
        assert parameter.grad is None


class _NoGradient(torch.autograd.Function):
    """Adds without a gradient for the second summand, as a backward that puts dW aside."""

    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        return x + weight

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
