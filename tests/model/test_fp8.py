"""8-bit matrices and products, against formulas and loops of their own."""

from itertools import pairwise, product
from math import floor, inf, log2, nan

import pytest
import torch
from torch import Tensor

from fivefold.config.memory import MemoryConfig
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.model.eight_bit import fp8
from fivefold.model.eight_bit.fp8 import (
    E4M3,
    E5M2,
    EACH_ELEMENT,
    RECIPES,
    Block,
    multiply,
    quantise,
    tiled_scales,
)
from fivefold.model.eight_bit.groups import EightBitGroups
from fivefold.model.eight_bit.layers import eight_bit, install_eight_bit
from fivefold.model.eight_bit.linear import EightBit
from fivefold.model.transformer import Stage
from fivefold.pipeline.split.stages import StageSpec

BITS = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}
"""Bits of the mantissa, least exponent of a normal number, largest number (Micikevicius 2022)."""
BLOCKS: list[Block] = [(None, None), (1, None), (None, 1), (1, 128), (128, 1), (128, 128), (1, 1)]
BLOCKS += [(1, 32), (32, 1)]


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """To nearest in 8 bits, ties to even, by the definition of the format."""
    mantissa, least, largest = BITS[dtype]
    if value == 0:
        return 0.0
    step = 2.0 ** (max(floor(log2(abs(value))), least) - mantissa)
    return max(-largest, min(largest, round(value / step) * step))


def _by_hand(x: Tensor, block: Block, dtype: torch.dtype, powers: bool) -> Tensor:
    """What the bits stand for, element by element."""
    out = torch.empty_like(x, dtype=torch.float64)
    m, k = (each or size for each, size in zip(block, x.shape, strict=True))
    for top, left in product(range(0, x.shape[0], m), range(0, x.shape[1], k)):
        part = x[top : top + m, left : left + k]
        scale = torch.tensor(BITS[dtype][2]) / part.abs().max().float().clamp(min=1e-30)
        factor = 2.0 ** floor(log2(float(scale))) if powers else float(scale)
        inverse = float(torch.tensor(1.0) / torch.tensor(factor))
        for i, j in product(range(part.shape[0]), range(part.shape[1])):
            narrow = _rounded(float(part[i, j]) * factor, dtype)
            out[top + i, left + j] = narrow * inverse
    return out


@pytest.mark.parametrize("dtype", BITS)
def test_every_number_of_a_format_rounds_to_itself_and_what_lies_between_to_even(
    dtype: torch.dtype,
) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    exact = sorted({float(v) for v in every[every.isfinite()]})
    middles = [(a + b) / 2 for a, b in pairwise(exact)]
    for value in (*exact, *middles, *(m * (1 + 1e-6) for m in middles)):
        assert float(torch.tensor(value).to(dtype)) == _rounded(value, dtype), value


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(3, 130), (130, 5), (16, 128)])
def test_a_matrix_is_scaled_block_by_block(block: Block, shape: tuple[int, int]) -> None:
    x = _random(*shape) * 10 ** _random(*shape, seed=1)
    x[0, :3] = torch.tensor([0.0, 1e-9, -7e4])
    for dtype, powers in product(BITS, (False, True)):
        ours = quantise(x, block, dtype, powers_of_two=powers)
        assert ours.bits.is_contiguous() and ours.bits.untyped_storage().nbytes() == x.numel()
        torch.testing.assert_close(
            ours.wide(torch.float64), _by_hand(x, block, dtype, powers), rtol=0, atol=0
        )
        assert torch.equal(ours.t().wide(torch.float64), ours.wide(torch.float64).t())


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_stay_zeros_and_what_is_not_finite_is_seen(block: Block, powers: bool) -> None:
    zeros = quantise(torch.zeros(4, 6), block, E4M3, powers_of_two=powers)
    assert not zeros.wide(torch.float32).any()
    for bad in (inf, -inf, nan):
        x = _random(4, 6, dtype=torch.bfloat16)
        x[1, 2] = bad
        product = multiply(quantise(x, block, E4M3, powers_of_two=powers), zeros, torch.bfloat16)
        assert product[1].isnan().all()
    empty = quantise(torch.zeros(0, 6), block, E4M3, powers_of_two=powers)
    assert multiply(empty, zeros, torch.float32).shape == (0, 4)
    assert not multiply(empty.t(), empty.t(), torch.float32).any()


def test_blocks_of_a_product_are_summed_with_both_their_scales() -> None:
    """DeepSeek-V3's: partial sums over 128, times a scale of the row and one of the tile."""
    x, w = _random(3, 300), _random(140, 300, seed=1)
    a, b = quantise(x, (1, 128), E4M3), quantise(w, (128, 128), E4M3)
    expected = torch.zeros(3, 140, dtype=torch.float64)
    for m, n, k in product(range(3), range(140), range(3)):
        part = slice(128 * k, 128 * k + 128)
        partial = a.bits[m, part].double() @ b.bits[n, part].double()
        expected[m, n] += partial * float(a.inverse[m, k]) * float(b.inverse[n // 128, k])
    torch.testing.assert_close(multiply(a, b, torch.float64), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", BITS)
def test_a_power_of_two_is_kept_as_its_exponent(dtype: torch.dtype) -> None:
    """Of any magnitude that fp32 has; what is not finite is undefined."""
    x = _random(5, 70) * torch.tensor([1e-37, 1e-12, 1.0, 1e30, 3e37])[:, None]
    wide, narrow = (
        quantise(x.float(), (1, 32), dtype, powers_of_two=True, exponents=exponents)
        for exponents in (False, True)
    )
    assert narrow.inverse.element_size() == 1 and narrow.inverse.shape == (5, 3)
    assert torch.equal(narrow.wide(torch.float64), wide.wide(torch.float64))
    assert narrow.wide(torch.float64)[1:].abs().amin() > 0
    for bad in (inf, nan):
        x[2, 33] = bad
        again = quantise(x.float(), (1, 32), dtype, powers_of_two=True, exponents=True)
        assert again.wide(torch.float64)[2, 33].isnan()
        assert again.wide(torch.float64)[2, :32].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 9), (300, 3)])
def test_scales_lie_where_the_tensor_cores_look(shape: tuple[int, int]) -> None:
    """By the formula in cuBLAS's manual, tile after tile along a row of tiles."""
    rows, columns = shape
    number = torch.arange(rows * columns).remainder(200).add(1).to(torch.uint8).view(shape)
    found = tiled_scales(number.view(torch.float8_e8m0fnu)).view(torch.uint8)
    across = -(-columns // 4)
    expected = torch.zeros(-(-rows // 128) * across * 512, dtype=torch.uint8)
    for row, column in product(range(rows), range(columns)):
        tile = row // 128 * across + column // 4
        inside = row % 128 % 32 * 16 + row % 128 // 32 * 4 + column % 4
        expected[tile * 512 + inside] = number[row, column]
    assert torch.equal(found, expected)


def _steps(recipe: str) -> dict[str, tuple[Block, Block]]:
    """Blocks of both operands of each product, the depth last, as the recipes' authors say."""
    whole: Block = (None, None)
    return {
        "tensorwise": {"y": (whole, whole), "dx": (whole, whole), "dw": (whole, whole)},
        "rowwise": dict.fromkeys(("y", "dx", "dw"), ((1, None), (1, None))),
        "blockwise": {
            "y": ((1, 128), (128, 128)),
            "dx": ((1, 128), (128, 128)),
            "dw": ((1, 128), (1, 128)),
        },
        "mxfp8": dict.fromkeys(("y", "dx", "dw"), ((1, 32), (1, 32))),
    }[recipe]  # type: ignore[return-value]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["e4m3", "hybrid"])
def test_a_layer_quantises_each_operand_for_its_product(recipe: str, form: str) -> None:
    products = eight_bit(
        TrainingConfig(fp8_format=form, fp8_recipe=recipe),  # type: ignore[arg-type]
        torch.float64,
    )
    assert products is not None
    powers, of_grad = recipe != "tensorwise", E5M2 if form == "hybrid" else E4M3
    x, g = _random(136, 200), _random(136, 40, seed=1)
    w, v = _random(40, 200, seed=2), _random(40, 200, seed=3)

    def true(left: Tensor, right: Tensor, which: str, dtype: torch.dtype = E4M3) -> Tensor:
        one, other = _steps(recipe)[which]
        a = quantise(left, one, dtype, powers_of_two=powers).wide(torch.float64)
        return a @ quantise(right, other, E4M3, powers_of_two=powers).wide(torch.float64).t()

    for keeps in (False, True):
        leaves = [each.clone().requires_grad_() for each in (x, w, v)]
        each = EightBit(products.recipe, products.dtype, products.gradients, keeps_input=keeps)
        y, z = each.apply((each, each), leaves[0], leaves[1:], (None, torch.ones(40).double()))
        torch.autograd.backward([y, z], [g, 2 * g])
        expected = (
            true(x, w, "y"),
            true(x, v, "y") + 1,
            true(g, w.t(), "dx", of_grad) + true(2 * g, v.t(), "dx", of_grad),
            true(g.t(), x.t(), "dw", of_grad),
            true(2 * g.t(), x.t(), "dw", of_grad),
        )
        found = (y, z, *(leaf.grad for leaf in leaves))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(y, x @ w.t(), rtol=1e-3)  # rounded at all


@pytest.mark.parametrize("recipe", RECIPES)
def test_experts_multiply_as_if_each_were_alone(recipe: str) -> None:
    one = EightBit(RECIPES[recipe], torch.float64, E5M2)
    rows = [3, 0, 130, 1]
    ends = [3, 3, 133, 134]
    x, g = _random(134, 20), _random(134, 12, seed=1)
    weights = [_random(4, 12, 20, seed=seed).requires_grad_() for seed in (2, 3)]
    leaf = x.clone().requires_grad_()
    groups = EightBitGroups(one, ends)
    ys = groups.apply((groups, groups), leaf, weights, (None, None))
    torch.autograd.backward(ys, [g, -g])
    for index, (part, grad) in enumerate(zip(x.split(rows), g.split(rows), strict=True)):
        own = [
            part.clone().requires_grad_(),
            *(w[index].detach().requires_grad_() for w in weights),
        ]
        zs = one.apply((one, one), own[0], own[1:], (None, None))
        torch.autograd.backward(zs, [grad, -grad])
        where = slice(ends[index] - rows[index], ends[index])
        found = [ys[0][where], ys[1][where], leaf.grad[where], *(w.grad[index] for w in weights)]  # type: ignore[index]
        for ours, theirs in zip(found, [*zs, *(leaf.grad for leaf in own)], strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_of_experts_are_made_written_and_added_alike(recipe: str) -> None:
    groups = EightBitGroups(EightBit(RECIPES[recipe], torch.float64, E5M2), [3, 3, 133, 134])
    _, kept = groups.input(_random(134, 20))
    grad = groups.gradient(_random(134, 12, seed=1))
    made, before = groups.weight_gradient(grad, kept), _random(4, 12, 20, seed=2)
    written, added = torch.full_like(before, torch.nan), before.clone()
    groups.write_weight_gradient(grad, kept, written)
    assert groups.weight_gradient(grad, kept, added) is added
    assert torch.equal(written, made)
    assert torch.equal(added, before + made)


def test_routers_gates_and_the_output_layer_are_left_alone() -> None:
    model = ModelConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        vocab_size=50,
        num_experts=4,
        moe_shared_expert_intermediate_size=8,
        moe_shared_expert_gate=True,
        moe_layer_freq="[0,1]",
        mtp_num_layers=1,
    )
    with torch.device("meta"):
        stage = Stage(model, StageSpec(True, (0, 1), True, mtp=1))
    install_eight_bit(stage, EightBit(EACH_ELEMENT, torch.float64), MemoryConfig())
    modules = dict(stage.named_modules())
    narrow = {
        name
        for name, module in modules.items()
        if isinstance(getattr(module, "multiply", None), EightBit)
        or "EightBit" in type(getattr(module, "products", None)).__name__
    }
    plain = {n for n in modules if n.rpartition(".")[2] in ("lm_head", "shared_expert_gate")}
    named = {name for name in modules if name.endswith("_proj") or name in plain}
    assert plain and narrow == named - plain


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_is_asked_for_products_alone_that_it_has_a_kernel_for(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = RECIPES[recipe]
    how = {"powers_of_two": kept.powers_of_two, "exponents": kept.exponents}
    (one, other), *_ = _steps(recipe).values()
    a, b = (quantise(_random(64, 128).bfloat16(), x, E4M3, **how) for x in (one, other))
    able = set()
    for capability in [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0)]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, it=capability: it)
        if fp8._has_kernel(a, b):
            able.add(capability)
    blackwell = {(10, 0), (10, 3), (11, 0), (12, 0)}
    expected = {
        "tensorwise": {(8, 9), (9, 0), *blackwell},
        "rowwise": {(9, 0), (10, 0), (10, 3)},
        "blockwise": {(9, 0)},
        "mxfp8": blackwell,
    }
    assert able == expected[recipe]


@pytest.mark.parametrize("sizes", product((16, 128, 384, 512), repeat=2), ids=str)
def test_scales_of_blocks_have_the_strides_that_kernels_are_given(sizes: tuple[int, int]) -> None:
    """PyTorch refuses others, also along dims of one element and where nothing is padded."""
    for block in ((1, 128), (128, 128)):
        straight = quantise(_random(*sizes), block, E4M3)
        turned = quantise(_random(*sizes).t(), block[::-1], E4M3).t()  # as dX and dW do
        turned_back = quantise(_random(*sizes[::-1]), block[::-1], E4M3).t()
        for x in (straight, turned, turned_back):
            laid = fp8._laid_out(x)
            assert laid.stride() == (1, len(laid))
            shown = laid if block[0] == 1 else laid.t()
            assert torch.equal(shown[:, : x.inverse.shape[1]], x.inverse)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", [(256, 384, 512), (40, 72, 200), (1, 16, 130)])
def test_the_kernel_is_its_plain_twin(recipe: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    kept = RECIPES[recipe]
    how = {"powers_of_two": kept.powers_of_two, "exponents": kept.exponents}
    for one, other in set(_steps(recipe).values()):
        for left_type in (E4M3, E5M2):
            a = quantise(_random(m, k).bfloat16(), one, left_type, **how)
            b = quantise(_random(n, k, seed=1).bfloat16(), other, E4M3, **how)
            on_gpu = [
                quantise(x.bfloat16().cuda(), block, dtype, **how)
                for x, block, dtype in (
                    (_random(m, k), one, left_type),
                    (_random(n, k, seed=1), other, E4M3),
                )
            ]
            for cpu, gpu in zip((a, b), on_gpu, strict=True):
                assert torch.equal(cpu.bits.view(torch.uint8), gpu.bits.cpu().view(torch.uint8))
                assert torch.equal(cpu.inverse.float(), gpu.inverse.cpu().float())
            ours = multiply(*on_gpu, torch.bfloat16).cpu().double()
            true = multiply(a, b, torch.float64)
            assert (ours - true).norm() / true.norm() < 2**-8


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[96, 0, 33, 1], [0, 130, 0, 0]])
def test_one_call_multiplies_as_each_group_alone(rows: list[int]) -> None:
    ends = [sum(rows[: i + 1]) for i in range(len(rows))]
    found = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        one = EightBit(RECIPES["rowwise"], dtype, E4M3)
        x, g, w = _random(ends[-1], 64), _random(ends[-1], 48, seed=1), _random(4, 48, 64, seed=2)
        leaves = [each.bfloat16().to(device, dtype).requires_grad_() for each in (x, w)]
        groups = EightBitGroups(one, ends)
        (y,) = groups.apply((groups,), leaves[0], leaves[1:], (None,))
        y.backward(g.bfloat16().to(device, dtype))
        found.append([y, *(leaf.grad for leaf in leaves)])
    for ours, true in zip(*found, strict=True):
        assert (ours.cpu().double() - true).norm() < 2**-7 * true.norm()
