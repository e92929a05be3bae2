"""Blocks of ZeRO++: their rounding, their bytes, and what is not finite."""

import importlib
from math import inf, nan
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.data_parallel import quantised
from fivefold.data_parallel.blocks import BLOCK, GRADIENT_BITS, WEIGHT_BITS, UnitSizes
from fivefold.data_parallel.quantised import Blocks, Format, Whole
from tests.kernels import DEVICES, run_kernels
from tests.verify.cases import chosen

WAYS = [Blocks(WEIGHT_BITS), Blocks(GRADIENT_BITS), Blocks(8, 1, powers_of_two=True)]


def _numbers(seed: int, *shape: int) -> Tensor:
    """Magnitudes over many orders, some zeros, a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-12, 6, shape, generator=generator)
    x[..., ::7] = 0.0
    x[..., 2 * BLOCK : 3 * BLOCK] = 0.0
    return x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_an_element_is_off_by_half_a_step_of_its_block_at_most(
    way: Blocks, dtype: torch.dtype
) -> None:
    for seed, elements in enumerate((1, BLOCK - 1, BLOCK, 5 * BLOCK + 3)):
        x = _numbers(seed, 3, elements).to(dtype)
        sent = way.pack(x)
        assert sent.dtype == torch.uint8 and sent.shape == (3, way.length(elements))
        arrived = way.unpack(sent, elements, dtype).double()
        steps = [
            block.abs().amax(1, keepdim=True).expand_as(block) / (2 ** (way.bits - 1) - 1)
            for block in x.double().split(way.size, 1)
        ]
        limit = torch.cat(steps, 1) * (0.5 if not way.powers_of_two else 1.0)
        rounding = torch.finfo(dtype).eps * x.double().abs() + 1e-30
        assert ((arrived - x.double()).abs() <= limit * (1 + 1e-6) + rounding).all()
        assert (arrived[x == 0] == 0).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_seen_where_it_arrives(way: Blocks, bad: float) -> None:
    x = torch.ones(2, 3 * BLOCK)
    x[1, BLOCK + 5] = bad
    arrived = way.unpack(way.pack(x), x.shape[1], x.dtype)
    assert arrived[0].isfinite().all() and arrived[1, :BLOCK].isfinite().all()
    assert not arrived[1, BLOCK + 5].isfinite()


@pytest.mark.parametrize("bits", [WEIGHT_BITS, GRADIENT_BITS])
@pytest.mark.parametrize(
    "shapes", [[(9, 20), (20,), (3, 4, 5)], [(20,), (7,)], [(130, 1)], [(0, 5), (3,)]]
)
def test_a_message_has_the_bytes_that_are_counted_and_vectors_are_exact(
    bits: int, shapes: list[tuple[int, ...]]
) -> None:
    parameters = [(torch.Size(shape), torch.Size(shape).numel()) for shape in shapes]
    format = Format.of(parameters, Blocks(bits), torch.float32)
    elements = [size for _, size in parameters]
    x = _numbers(1, 2, sum(elements)).float()
    sent = format.pack(x[None])
    sizes = UnitSizes.of((tuple(shape), size) for shape, size in parameters)
    assert sent.shape == (2, sizes.message(bits, 4))
    arrived = format.unpack(sent[None], torch.full_like(x, torch.nan))
    pairs = zip(arrived.split(elements, 1), x.split(elements, 1), shapes, strict=True)
    assert all(torch.equal(a, b) for a, b, shape in pairs if len(shape) == 1)
    whole = format.sending(Whole(torch.float32))
    assert torch.equal(whole.unpack(whole.pack(x[None])[None], torch.empty_like(x)), x)


UNITS = (
    [(9, 20), (20,), (3, 4, 5)],  # runs that begin within a block
    [(2, BLOCK), (20,), (3, BLOCK), (5, 4, BLOCK), (7,), (5, 3)],
    [(20,), (7,)],
    [(0, 5), (3, 5)],
    [(11 * BLOCK, 1), (1,)],
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("seed", chosen(range(12), *{*range(12)} - {3, 10, 11}))
@pytest.mark.parametrize("place", DEVICES)
def test_kernels_send_and_add_up_the_same_bits(
    place: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    shapes, way = rng.choice(UNITS), rng.choice(WAYS)
    dtype = rng.choice((torch.bfloat16, torch.float16, torch.float32))
    parameters = [(torch.Size(shape), torch.Size(shape).numel()) for shape in shapes]
    format = Format.of(parameters, way, dtype)
    ranks, rows, elements = rng.randint(1, 3), rng.randint(1, 2), sum(format.sizes)
    x = (_numbers(seed, rows, ranks, elements) * 1e-3).clamp(-6e4, 6e4).to(dtype)
    bad = rng.choice((None, None, None, inf, -inf, nan))
    if bad is not None:
        x[rng.randrange(rows), rng.randrange(ranks), rng.randrange(elements)] = bad
    x = x.transpose(0, 1)  # as ranks of a node are taken apart
    sent = format.pack(x)
    total = format.unpack(sent.view(ranks, rows, -1), torch.full_like(x[0], nan))
    device = run_kernels(place, monkeypatch, quantised)
    kernels = importlib.import_module("fivefold.data_parallel.quantised_kernels")
    monkeypatch.setattr(kernels, "TILE", 2 * BLOCK)
    by_kernels = format.pack(x.to(device))
    if bad is None:
        assert torch.equal(by_kernels.cpu(), sent)
    out = torch.full_like(x[0], nan, device=device)
    found = format.unpack(by_kernels.view(ranks, rows, -1), out).cpu()
    assert torch.equal(found.isfinite(), total.isfinite())
    assert torch.equal(found[found.isfinite()], total[total.isfinite()])
