"""Grouped linears against one linear per group, with groups that have no rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.grouped import GroupedLinear
from fivefold.tensor.deferred_weight import DeferredWeights, run_works
from fivefold.tensor.grouped import GroupedMultiply
from tests.tensor.ways import held_sum, in_rooms

H, F_OUT = 6, 10
ROWS = [[3, 0, 5, 1], [0, 9, 0, 0], [0, 0, 0, 0]]
WHERE = ["", ", onto the sum", ", in its room"]
WAYS = ["plain", *(when + where for when in ("now", "later") for where in WHERE)]


def _random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("way", WAYS)
def test_every_group_has_its_own_linear(way: str) -> None:
    linear, deferred = GroupedLinear(4, H, F_OUT).double(), DeferredWeights()
    linear.weight.data.copy_(_random(1, 4, F_OUT, H))
    if way != "plain":
        linear.multiply = GroupedMultiply(deferred)
    if way.endswith("onto the sum"):
        deferred.sums = [held_sum]
    elif way.endswith("in its room"):
        deferred.sums = [in_rooms()]
    weight = linear.weight.detach().clone().requires_grad_()
    for microbatch, rows in enumerate(ROWS):  # each adds to the gradients of those before
        x, true_x = (_random(2 + microbatch, sum(rows), H).requires_grad_() for _ in range(2))
        upstream = _random(9, sum(rows), F_OUT)
        ours = linear(x, torch.tensor(rows))
        each = zip(true_x.split(rows), weight, strict=True)
        true = torch.cat([F.linear(part, own) for part, own in each])
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-12)
        true.backward(upstream)
        before = None if linear.weight.grad is None else linear.weight.grad.clone()
        if way.startswith("later"):
            with deferred.collect() as works:
                ours.backward(upstream)
            after = linear.weight.grad
            assert (after is None and before is None) or torch.equal(after, before)  # type: ignore[arg-type]
            assert list(run_works(works)) == [linear.weight]
        else:
            ours.backward(upstream)
        torch.testing.assert_close(x.grad, true_x.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(linear.weight.grad, weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_the_kernel_of_all_groups_agrees_with_one_after_the_other() -> None:
    rows = torch.tensor([3, 0, 20, 1], device="cuda")
    linear = GroupedLinear(4, 32, 64).cuda().bfloat16()
    linear.weight.data.normal_()
    linear.multiply = GroupedMultiply(DeferredWeights())
    x = torch.randn(24, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = linear(x, rows)
    y.backward(torch.ones_like(y))
    pieces = zip(x.split(rows.tolist()), linear.weight, strict=True)
    true = torch.cat([F.linear(part, own) for part, own in pieces])
    grads = torch.autograd.grad(true, (x, linear.weight), torch.ones_like(true))
    for ours, expected in zip((y, x.grad, linear.weight.grad), (true, *grads), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)
