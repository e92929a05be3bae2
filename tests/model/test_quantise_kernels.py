"""Kernels that quantise against their twins, bit by bit: interpreted, and compiled on a GPU."""

from itertools import product
from math import inf, nan
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.model.eight_bit import fp8
from fivefold.model.eight_bit.delayed import WEIGHT, OperandScales
from fivefold.model.eight_bit.fp8 import E4M3, E5M2, Block, Scaled, quantise
from tests.kernels import DEVICES, run_kernels

BLOCKS: list[Block] = [(None, None), (1, None), (None, 1), (1, 128), (128, 1), (128, 128)]
BLOCKS += [(1, 32), (32, 1), (1, 1)]
CASES = 12
"""Of the 192 combinations of a block: the interpreter takes some 50 ms for each."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the kernels run."""
    return run_kernels(request.param, monkeypatch, fp8)


def same(found: Scaled, true: Scaled) -> None:
    for ours, theirs in ((found.bits, true.bits), (found.inverse, true.inverse)):
        ours, theirs = ours.cpu().float(), theirs.float()
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(nan=0.5), theirs.nan_to_num(nan=0.5))
        assert torch.equal(ours.signbit() | ours.isnan(), theirs.signbit() | theirs.isnan())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("block", BLOCKS)
def test_a_tile_is_quantised_as_its_twin_says(block: Block, device: str) -> None:
    torch.manual_seed(0)
    every = product(
        ((3, 130), (260, 140), (1, 1)),
        (torch.bfloat16, torch.float32),
        (E4M3, E5M2),
        (False, True),
        (False, True),
        (None, inf, nan, 0.0),
    )
    for shape, dtype, narrow, powers, turned, bad in Random(1).sample([*every], CASES):
        x = (torch.randn(shape) * 10 ** torch.randn(shape)).to(device, dtype)
        if bad is not None:
            x.view(-1)[-1:] = bad
        x = -x.zero_() if bad == 0.0 else x
        given = x.t().contiguous().t() if turned else x
        found = quantise(given, block, narrow, powers_of_two=powers)
        same(found, plainly(x, block, narrow, powers))
        by_columns = block[1] == 1 != block[0]
        assert (found.bits.t() if by_columns else found.bits).is_contiguous()
        assert torch.equal(
            fp8._by_rows(found.bits.t()).view(torch.uint8), found.bits.t().view(torch.uint8)
        )


def plainly(x: Tensor, block: Block, narrow: torch.dtype, powers: bool) -> Scaled:
    """What the twin makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "runs_triton", lambda _: False)
        return quantise(x.cpu().float(), block, narrow, powers_of_two=powers)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [None, inf, nan])
def test_a_scale_that_is_known_narrows_as_its_twin(
    bad: float | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(150, 200).bfloat16().to(device)
    if bad is not None:
        x[3, 4] = bad
    found = []
    for by_kernel in (True, False):
        scales = OperandScales(*(torch.full((3,), each, device=device) for each in (90.0, 2.0)))
        if not by_kernel:
            monkeypatch.setattr(fp8, "runs_triton", lambda _: False)
        made = scales.quantised(x.t(), WEIGHT, E4M3)
        found.append((made, scales.seen.nan_to_num(nan=-1.0)))
    same(found[0][0], Scaled(*(t.cpu() for t in (found[1][0].bits, found[1][0].inverse)), (1, 1)))
    assert torch.equal(found[0][1], found[1][1]) and found[0][1][WEIGHT] != 2.0
