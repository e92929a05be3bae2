"""Rows of experts: where they go, and that the way there makes no copies but those it returns.

Shapes: T tokens, K experts of a token, R rows, E experts, H features, F inner features.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.model.activation import activated
from fivefold.model.moe.grouped import GroupedLinear
from fivefold.model.moe.layer import by_expert, by_part_padded
from fivefold.model.moe.permutation import Rows
from fivefold.model.moe.routing import ExpertChoice
from fivefold.tensor.deferred_weight import DeferredWeights
from fivefold.tensor.grouped import GroupedMultiply

T, K, E, H, F = 512, 4, 8, 96, 160
NUMBERS = 6  # int64 that the way of a row to its expert and back may need at once
PLACES = 16  # those with which fixed places are found, and what was chosen
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SMALL = 1024  # bytes: scalars, and one number for each expert


def _choice(dropped: float) -> ExpertChoice:
    generator = torch.Generator().manual_seed(1)
    experts_TK = torch.rand(T, E, generator=generator).topk(K).indices
    kept_TK = torch.rand(T, K, generator=generator) >= dropped if dropped else None
    return ExpertChoice(experts_TK, torch.rand(T, K, generator=generator), kept_TK, E)


def _allocated(function: Callable[[], object]) -> int:
    """Bytes of all that the allocator gave, also inside of operations."""
    with torch.profiler.profile(profile_memory=True) as profile:
        function()
    assert profile.profiler is not None
    events = profile.profiler.kineto_results.events()
    sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
    return sum(size for size in sizes if size > 0)


def _allocated_both(function: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[int, int]:
    """Bytes of the forward and of the backward."""
    outputs: list[Tensor] = []
    forward = _allocated(lambda: outputs.append(function()))
    upstream = torch.randn_like(outputs[0])
    return forward, _allocated(lambda: torch.autograd.grad(outputs, inputs, upstream))


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_moving_rows_allocates_what_it_returns(dropped: float) -> None:
    """R x H there and T x H back, in both directions, and a few numbers for each slot."""
    (rows, _), numbers = by_expert(_choice(dropped)), NUMBERS * T * K * 8 + SMALL
    taken = len(rows.slots_R)
    assert _allocated(lambda: by_expert(_choice(dropped))) <= 2 * numbers
    x_TH, x_RH = (torch.randn(n, H, requires_grad=True) for n in (T, taken))
    there, back = 4 * taken * H, 4 * T * H
    spread = _allocated_both(lambda: rows.spread(x_TH), [x_TH])
    collect = _allocated_both(lambda: rows.collect(x_RH), [x_RH])
    for measured, formula in zip(spread + collect, (there, back, back, there), strict=True):
        assert formula <= measured <= formula + numbers


def test_fixed_places_allocate_one_row_more_and_a_copy_on_the_way_back() -> None:
    room = T * K // 2
    (rows, _), numbers = by_part_padded(_choice(0.3), 2, room), NUMBERS * T * K * 8 + SMALL
    assert _allocated(lambda: by_part_padded(_choice(0.3), 2, room)) <= PLACES * T * K * 8 + SMALL
    x_TH, x_RH = (torch.randn(n, H, requires_grad=True) for n in (T, 2 * room))
    there = 4 * (2 * room + 1) * H
    back = 4 * T * H + there
    spread = _allocated_both(lambda: rows.spread(x_TH), [x_TH])
    collect = _allocated_both(lambda: rows.collect(x_RH), [x_RH])
    for measured, formula in zip(spread + collect, (there, back, back, there), strict=True):
        assert formula <= measured <= formula + numbers


def test_experts_allocate_what_they_return() -> None:
    """R x F forward and R x H + E x F x H backward a linear; R x F and 2 R x F an activation."""
    rows, rows_E = by_expert(_choice(0.3))
    taken = len(rows.slots_R)
    x_RH = torch.randn(taken, H, requires_grad=True)
    linear = GroupedLinear(E, H, F)
    torch.nn.init.normal_(linear.weight)
    linear.multiply = GroupedMultiply(DeferredWeights())
    into, out = 4 * taken * F, 4 * taken * H
    multiplied = _allocated_both(lambda: linear(x_RH, rows_E), [x_RH, linear.weight])
    assert multiplied == (into, out + 4 * E * F * H)
    model = ModelConfig(num_layers=1, hidden_size=H, num_attention_heads=4, vocab_size=64)
    gate, up, weights_R = (torch.randn(taken, *n, requires_grad=True) for n in ((F,), (F,), ()))
    acted = _allocated_both(lambda: activated(model, [gate, up], weights_R), [gate, up, weights_R])
    assert acted == (into, 2 * into + 4 * taken)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taken", [0, 5, 12])
@pytest.mark.parametrize("per_token", [1, 3])
def test_tokens_are_the_sums_of_their_rows(
    taken: int, per_token: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(taken)
    tokens = 12 // per_token
    slots_R = torch.randperm(12, generator=generator)[:taken]
    rows = Rows(slots_R.to(device), tokens, per_token)
    for shape in ((), (4,), (2, 3)):
        x = torch.randn(taken, *shape, generator=generator).to(dtype)
        true = torch.zeros(tokens, *shape, dtype=torch.float64)
        true.index_add_(0, slots_R // per_token, x.double())
        sums = rows.collect(x.to(device)).cpu()
        exact = dtype == torch.bfloat16  # of few terms summed in fp32, and rounded once
        torch.testing.assert_close(
            sums, true.to(dtype), **({"rtol": 0, "atol": 0} if exact else {})
        )
        assert torch.equal(rows.spread(sums.to(device)).cpu(), sums[slots_R // per_token])
