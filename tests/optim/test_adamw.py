import pytest
import torch
from torch import Tensor, nn

from fivefold.config.training import OptimizerConfig
from fivefold.optim.adamw import AdamW, decays
from fivefold.optim.schedule import StepRates

CONFIG = OptimizerConfig(lr=0.1, weight_decay=0.3, adam_beta2=0.95)
RATES = StepRates(0.1, 0.1, 0.3)


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"a.weight": (4, 3), "a.bias": (4,), "norm.weight": (3,), "none.weight": (0, 3)}
    return {name: nn.Parameter(torch.randn(s, dtype=dtype)) for name, s in shapes.items()}


def grads(step: int, like: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    return {name: torch.randn_like(parameter) for name, parameter in like.items()}


def run(optimizer: AdamW, held: dict[str, nn.Parameter], steps: range) -> None:
    for step in steps:
        for name, grad in grads(step, held).items():
            held[name].grad = grad.to(held[name].grad_dtype)
        lr = 0.1 / (step + 1)
        optimizer.step(StepRates(lr, lr, 0.3))
        optimizer.zero_grad()


def test_equals_torch_with_decay_on_matrices_only() -> None:
    ours, theirs = parameters(), parameters()
    groups = [
        {"params": [theirs["a.weight"]], "weight_decay": 0.3},
        {"params": [theirs["a.bias"], theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    run(AdamW(ours, CONFIG), ours, range(4))
    for step in range(4):
        for name, grad in grads(step, theirs).items():
            theirs[name].grad = grad
        for group in reference.param_groups:
            group["lr"] = 0.1 / (step + 1)
        reference.step()
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_state_loaded_in_place_continues_bitwise(dtype: torch.dtype) -> None:
    straight, resumed = parameters(dtype), parameters(dtype)
    run(AdamW(straight, CONFIG), straight, range(4))

    first = AdamW(resumed, CONFIG)
    run(first, resumed, range(2))
    second = AdamW(resumed, CONFIG)
    weights = second.weights()
    for name, piece in weights.items():
        piece.local.copy_(first.weights()[name].local)
    second.take(weights)
    for name, piece in second.state_tensors().items():
        assert not piece.local.any(), "zeros before the first step"
        piece.local.copy_(first.state_tensors()[name].local)
    second.steps = first.steps
    run(second, resumed, range(2, 4))
    assert second.steps == 4
    for name, parameter in resumed.items():
        assert torch.equal(parameter, straight[name])


def test_state_is_named_and_shaped_like_the_parameters() -> None:
    held = parameters()
    state = AdamW(held, CONFIG).state_tensors()
    assert set(state) == {f"optim.{m}.{n}" for m in ("exp_avg", "exp_avg_sq") for n in held}
    assert state["optim.exp_avg.a.weight"].shape == (4, 3)


def test_a_missing_gradient_counts_as_zero() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(ours, CONFIG), AdamW(theirs, CONFIG)
    run(optimizer, ours, range(2))
    run(reference, theirs, range(2))
    theirs["a.weight"].grad = torch.zeros_like(theirs["a.weight"])
    optimizer.step(RATES)
    reference.step(RATES)
    assert torch.equal(ours["a.weight"], theirs["a.weight"])


def test_a_frozen_parameter_is_left_alone() -> None:
    held = parameters()
    held["a.weight"].requires_grad_(False)
    optimizer = AdamW(held, CONFIG)
    before = held["a.weight"].clone()
    optimizer.step(RATES)
    assert torch.equal(held["a.weight"], before)
    assert not any("a.weight" in name for name in optimizer.state_tensors())


def test_storage_moved_after_construction_is_followed() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = AdamW(ours, CONFIG), AdamW(theirs, CONFIG)
    for parameter in ours.values():
        parameter.data = parameter.data.clone()
    run(optimizer, ours, range(2))
    run(reference, theirs, range(2))
    assert torch.equal(ours["a.weight"], theirs["a.weight"])


def test_decays() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert decays("embed_tokens.weight", matrix)
    assert not decays("experts.bias", matrix)
    assert not decays("norm.weight", vector)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_that_found_infinities_changes_no_bit(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = AdamW(ours, CONFIG), AdamW(theirs, CONFIG)
    run(optimizer, ours, range(2))
    run(reference, theirs, range(2))
    for parameter in ours.values():
        parameter.grad = torch.full_like(parameter, torch.inf, dtype=parameter.grad_dtype)
    optimizer.step(RATES, torch.ones(()))
    optimizer.steps -= 1
    optimizer.zero_grad()
    for found_inf, held, stepped in ((torch.zeros(()), ours, optimizer), (None, theirs, reference)):
        for name, grad in grads(2, held).items():
            held[name].grad = grad.to(held[name].grad_dtype)
        stepped.step(RATES, found_inf)
    for name, parameter in ours.items():
        assert torch.equal(parameter, theirs[name])
    for name, piece in optimizer.state_tensors().items():
        assert torch.equal(piece.local, reference.state_tensors()[name].local)
