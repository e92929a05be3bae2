import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fivefold.optim.grad_norm import clip_, global_grad_norm


def test_norm_of_one_rank_counts_only_what_it_owns() -> None:
    grads = [torch.full((3, 3), 2.0), torch.full((4,), 4.0), torch.full((2,), 1e6)]
    norm = global_grad_norm([(grads[0], True), (grads[1], True), (grads[2], False)])
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx((9 * 4 + 4 * 16) ** 0.5)


def test_squares_are_summed_in_fp64_whatever_the_type() -> None:
    grad = torch.full((1000,), 1e-25, dtype=torch.float32)  # squares vanish in fp32
    assert global_grad_norm([(grad, True)]).item() == pytest.approx(1e-25 * 1000**0.5, rel=1e-6)


def test_a_long_gradient_is_not_copied_whole() -> None:
    grad = torch.randn(1000, 300).t()
    grads = [(torch.ones(3), True), (grad, True), (torch.ones(2), True)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        norm = global_grad_norm(grads)
    assert norm.item() == pytest.approx((grad.double().norm() ** 2 + 5).sqrt().item(), rel=1e-12)
    largest = max(event.cpu_memory_usage for event in found.events())
    assert largest < 1000 * 300 * 8


def test_norm_of_nothing_is_zero() -> None:
    assert global_grad_norm([]).item() == 0.0
    assert global_grad_norm([(torch.zeros(0, 4), True)]).item() == 0.0


def test_non_finite_gradients_show() -> None:
    assert not global_grad_norm([(torch.tensor([1.0, float("nan")]), True)]).isfinite()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_vouches_for_what_it_does_not_count(value: float, dtype: torch.dtype) -> None:
    largest = torch.full((3, 4), torch.finfo(dtype).max, dtype=dtype)
    grads = [(torch.ones(4), True), (-largest, False), (torch.zeros(0, 2), False)]
    alone = global_grad_norm(grads)
    assert global_grad_norm(grads, vouches=[largest, torch.zeros(0)]) == alone == 2.0
    largest[2, 3] = value
    assert global_grad_norm(grads, vouches=[torch.ones(2), largest]).isnan()
    copies = [grads[0], (largest, False)]
    assert global_grad_norm(copies, vouches=[]).isnan()
    assert global_grad_norm(copies) == 2.0


@pytest.mark.parametrize("max_norm", [1.0, 10.0, 100.0])
def test_clipping_scales_down_only_and_mixes_types(max_norm: float) -> None:
    ours = [torch.full((3, 3), 2.0), torch.full((4,), 4.0, dtype=torch.float64), torch.zeros(0)]
    before = [grad.clone() for grad in ours]
    norm = global_grad_norm([(grad, True) for grad in ours])
    clip_(ours, norm, max_norm)
    scale = min(1.0, max_norm / (10.0 + 1e-6))
    for clipped, grad in zip(ours, before, strict=True):
        torch.testing.assert_close(clipped, grad * scale)


def test_what_is_not_finite_is_not_clipped_if_it_was_found() -> None:
    ours = [torch.tensor([1.0, float("inf"), -2.0]), torch.tensor([float("nan"), 4.0])]
    before = [grad.clone() for grad in ours]
    norm = global_grad_norm([(grad, True) for grad in ours])
    clip_(ours, norm, 1.0, found_inf=torch.ones(()))
    for grad, kept in zip(ours, before, strict=True):
        torch.testing.assert_close(grad, kept, rtol=0, atol=0, equal_nan=True)
