import math
from dataclasses import replace

import pytest
import torch

from fivefold.config.presets import PRESETS
from fivefold.model.rope import Rotary, RotaryTables, frequencies
from tests.model.models import LLAMA, LONG, QWEN
from tests.model.reference import reference_frequency


@pytest.mark.parametrize("model", [LLAMA, QWEN, PRESETS["llama3-8b"]])
def test_frequencies_equal_the_published_case_distinction(model) -> None:
    expected = [reference_frequency(model, i) for i in range(model.head_dim // 2)]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(frequencies(model), expected, rtol=1e-14, atol=0)


def test_llama_3_1_scales_low_frequencies_by_eight_and_keeps_high_ones() -> None:
    model = PRESETS["llama3-8b"]
    scaled = frequencies(model)
    plain = 500000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    assert scaled[0] == 1.0
    assert torch.equal(scaled[:29], plain[:29])
    torch.testing.assert_close(scaled[35:], plain[35:] / 8, rtol=1e-14, atol=0)


@pytest.mark.parametrize(("seq_length", "long"), [(64, False), (65, True)])
def test_longrope_divides_by_the_factors_that_whole_rows_choose(
    seq_length: int, long: bool
) -> None:
    """However far the positions are that a microbatch has of them."""
    rotary = Rotary(LONG, [False], seq_length)
    each = LONG.longrope_long_factor if long else LONG.longrope_short_factor
    plain = LONG.rotary_base ** -(torch.arange(3, dtype=torch.float64) / 3)
    scale = (1 + math.log(10) / math.log(64)) ** 0.5
    for position in (5, 64):
        tables = rotary.tables(torch.tensor([[position]]), torch.float64, False)[False]
        expected = scale * (position * plain / torch.tensor(each, dtype=torch.float64)).sin()
        torch.testing.assert_close(tables.sin.flatten(), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("seq_length", "growth"), [(64, 1.0), (65, 1.0 + 3 / 64), (160, 5.5)])
def test_dynamic_ntk_raises_the_base_by_the_length_of_whole_rows(
    seq_length: int, growth: float
) -> None:
    """However far the positions are; the longest wavelength of all grows with the rows."""
    scaled = {"rope_type": "dynamic", "rotary_scaling_factor": 3.0}
    model = replace(QWEN, **scaled, original_max_position_embeddings=64)
    pairs = model.rotary_dim // 2
    base = QWEN.rotary_base * growth ** (pairs / (pairs - 1))
    turns = base ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    tables = Rotary(model, [False], seq_length).tables(torch.tensor([[5]]), torch.float64, False)
    torch.testing.assert_close(tables[False].sin.flatten(), (5 * turns).sin(), rtol=1e-13, atol=0)
    torch.testing.assert_close(turns[-1], frequencies(QWEN)[-1] / growth, rtol=1e-13, atol=0)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 1, QWEN.head_dim, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> torch.Tensor:
        tables = [RotaryTables.at(QWEN, torch.tensor([[p]]), torch.float64) for p in (at_q, at_k)]
        return (tables[0].rotate(q) * tables[1].rotate(k)).sum()

    torch.testing.assert_close(score(9, 4), score(1009, 1004), rtol=1e-9, atol=1e-9)
    assert abs(score(9, 4) - score(9, 5)) > 1e-6


def test_far_positions_are_exact_in_fp32_tables() -> None:
    position = 131071
    tables = RotaryTables.at(PRESETS["llama3-8b"], torch.tensor([[position]]), torch.float32)
    exact = (position * frequencies(PRESETS["llama3-8b"])).sin().float()
    assert torch.equal(tables.sin.flatten(), exact)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved: bool) -> None:
    model = replace(QWEN, rotary_interleaved=interleaved)
    tables = RotaryTables.at(model, torch.tensor([[0, 3, 7]]), torch.float64)
    x = torch.randn(1, 3, 2, QWEN.head_dim, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(tables.rotate, (x,))


@pytest.mark.parametrize("first", [0, 3])
def test_neighbours_are_turned_as_two_halves_are_in_another_order(first: int) -> None:
    """A share of the features from any on; the others stay where they are."""
    halves = replace(QWEN, rotary_percent=0.5)
    R = halves.rotary_dim
    order = torch.arange(QWEN.head_dim)
    order[first : first + R] = first + torch.arange(R).view(2, -1).t().flatten()
    x = torch.randn(1, 3, 2, QWEN.head_dim, dtype=torch.float64)
    turned = [
        RotaryTables.at(model, torch.tensor([[0, 3, 7]]), torch.float64).rotate(given, first)
        for model, given in ((halves, x), (replace(halves, rotary_interleaved=True), x[..., order]))
    ]
    assert torch.equal(turned[0][..., order], turned[1]) and not torch.equal(
        turned[1], x[..., order]
    )
