"""Grouped linears against one linear per group, with groups that have no rows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.moe import grouped
from fivefold.model.moe.grouped import GroupedLinear, grouped_weight_gradient, has_kernel
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


@pytest.mark.parametrize("adds_bias", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("rows", ROWS)
def test_each_row_gets_its_groups_bias_and_none_is_kept(
    rows: list[int], weighted: bool, adds_bias: bool
) -> None:
    """For as many features as are taken at a time and some more."""
    features = grouped.COLUMNS + 2
    linear = GroupedLinear(4, H, features, bias=True).double()
    assert linear.bias is not None
    linear.bias.data.copy_(_random(1, 4, features))
    y, weights = _random(2, sum(rows), features), _random(3, sum(rows))
    plain = [x.clone().requires_grad_() for x in (y, linear.bias.detach(), weights)]
    ours = [y.requires_grad_(), linear.bias, weights.requires_grad_()]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], id):
        linear.biased(y, torch.tensor(rows), weights if weighted else None, adds_bias=adds_bias)
    assert max(kept) <= linear.bias.numel()
    found = linear.biased(y, torch.tensor(rows), weights if weighted else None, adds_bias=adds_bias)
    of_rows = plain[1].repeat_interleave(torch.tensor(rows), 0)
    of_rows = of_rows * plain[2][:, None] if weighted else of_rows
    torch.testing.assert_close(found, plain[0] + of_rows * adds_bias, rtol=1e-12, atol=1e-12)
    assert not found._is_view()  # FSDP2 warns of one that a unit returns
    upstream = _random(4, sum(rows), features)
    found.backward(upstream)
    (plain[0] + of_rows).backward(upstream)  # ranks that split experts have a whole gradient each
    if not (weighted and adds_bias):
        plain[2].grad = None
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize(
    ("capability", "known"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_where_torch_would_wait_in_each_product_the_host_waits_once(
    capability: tuple[int, int], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device="cuda", shape=(24, 8))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert has_kernel(rows, [torch.empty(4, 16, 8)]) == known
    assert not has_kernel(rows, [torch.empty(4, 16, 12)])
    rows.shape = (0, 8)
    assert not has_kernel(rows, [torch.empty(4, 16, 8)])


@pytest.mark.parametrize("beta", [None, 1, 0])
def test_groups_without_rows_have_no_gradient_where_the_kernel_leaves_them_out(
    beta: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = torch.tensor(ROWS[0])
    x, grad = _random(3, 9, H), _random(4, 9, F_OUT)
    onto = _random(5, len(rows), F_OUT, H)
    options: dict[str, Any] = {} if beta is None else {"onto_EFH": onto.clone(), "beta": beta}
    expected = torch.stack(
        [g.t() @ one for g, one in zip(*(t.split(ROWS[0]) for t in (grad, x)), strict=True)]
    )

    def kernel(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        assert torch.equal(offs, rows.cumsum(0)) and left.is_set_to(grad.t()) and right is x
        return expected.masked_fill((rows == 0)[:, None, None], torch.nan)

    monkeypatch.setattr(grouped, "leaves_out_empty_groups", lambda _: True)
    monkeypatch.setattr(torch, "_grouped_mm", kernel)
    ours = grouped_weight_gradient(grad, x, rows, None, **options)
    torch.testing.assert_close(ours, expected + (onto if beta else 0))


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
