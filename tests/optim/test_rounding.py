"""Moments of few bits: right on average, and the same numbers wherever an element lies."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.training import BLOCK, OptimizerConfig
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece
from fivefold.optim import rounding
from fivefold.optim.adamw import AdamW, state_piece
from fivefold.optim.eight_bit import FORMATS
from fivefold.optim.rounding import MOMENTS, NamedElements, divide, exact, rounded, scale_of
from fivefold.optim.schedule import StepRates
from tests.kernels import DEVICES, run_kernels
from tests.verify.cases import chosen

SHAPES = {"a.weight": (37, 129), "experts.weight": (4, 9, 21), "a.bias": (70,), "b.weight": (1, 5)}


def same_bits(x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and torch.equal(
        x.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
    )


def settings(
    first: str = "bf16", second: str = "bf16", gradients: str = "fp32", **others: float
) -> OptimizerConfig:
    return OptimizerConfig(
        use_precision_aware_optimizer=True,
        main_grads_dtype=gradients,
        exp_avg_dtype=first,
        exp_avg_sq_dtype=second,
        **others,
    )


def whole(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}


def gradient(name: str, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SHAPES[name], generator=generator, dtype=dtype)


def trained(
    config: OptimizerConfig,
    cuts: dict[str, tuple[slice, ...]],
    dtype: torch.dtype,
    steps: int = 5,
    device: str = "cpu",
) -> tuple[dict[str, nn.Parameter], AdamW]:
    """Parts of all parameters after some steps."""
    places = {
        name: NamedElements(7, name, shape, cuts.get(name, tuple(slice(0, size) for size in shape)))
        for name, shape in SHAPES.items()
    }
    held = {
        n: nn.Parameter(w[places[n].slices].clone().to(device)) for n, w in whole(dtype).items()
    }
    optimizer = AdamW(held, config, places=places)
    for step in range(steps):
        for name, parameter in held.items():
            grad = gradient(name, step, dtype)[places[name].slices]
            parameter.grad = grad.to(device, parameter.grad_dtype, copy=True)
        optimizer.step(StepRates(0.01, 0.01, 0.1))
    return held, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "types",
    [
        ("bf16", "bf16", "fp32"),
        ("fp32", "bf16", "fp32"),
        ("bf16", "fp32", "bf16"),
        ("fp32", "fp32", "bf16"),
        ("fp8", "fp8", "fp32"),
        ("fp8", "bf16", "bf16"),
        ("fp32", "fp8", "fp32"),
    ],
)
def test_every_part_has_the_bits_of_the_whole(
    types: tuple[str, str, str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, moments, steps = settings(*types), types[:2], 3
    straight, reference = trained(config, {}, dtype, steps)
    monkeypatch.setattr(rounding, "AT_A_TIME", {"cpu": 50})
    random = torch.Generator().manual_seed(3)
    for _ in range(2):
        cuts = {}
        for name, shape in SHAPES.items():
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=random).tolist()) for n in shape]
            if "fp8" in moments and len(shape) > 1:  # no layout may cut a block
                ends[-1] = [end if end == shape[-1] else end // BLOCK * BLOCK for end in ends[-1]]
            cuts[name] = tuple(slice(*pair) for pair in ends)
        held, optimizer = trained(config, cuts, dtype, steps)
        for name, part in cuts.items():
            assert torch.equal(held[name], straight[name][part])
            for moment, kind in zip(MOMENTS, moments, strict=True):
                key = f"optim.{moment}.{name}"
                own = optimizer.state_tensors()[key].local
                eight = kind == "fp8" and own.ndim > 1
                narrow = {"bf16": torch.bfloat16, "fp8": FORMATS[moment].dtype if eight else dtype}
                assert own.dtype == narrow.get(kind, dtype)
                assert same_bits(own, reference.state_tensors()[key].local[part])
                if eight:
                    place = Piece(own, torch.Size(SHAPES[name]), part)
                    scales = state_piece(scale_of(moment), place, own)
                    key = f"optim.{scale_of(moment)}.{name}"
                    theirs = reference.state_tensors()[key].local[scales.slices]
                    assert torch.equal(optimizer.state_tensors()[key].local, theirs)


KINDS = {
    "bf16": (settings("bf16", "bf16"), torch.float64),
    "8 bits": (settings("fp8", "fp8"), torch.float64),
    "8 bits, one of both": (settings("fp8", "fp32"), torch.float64),
    "bf16 and 8 bits, gradients": (settings("bf16", "fp8", "bf16"), torch.float64),
    "fp32": (settings("bf16", "fp8"), torch.float32),
    "gradients": (settings("fp32", "fp32", "bf16"), torch.float32),
    "remainders": (
        replace(settings("fp8", "bf16"), store_param_remainders=True),
        torch.bfloat16,
    ),
    "weights": (replace(settings("fp32", "fp8"), main_params_dtype="bf16"), torch.bfloat16),
}


BITS = {1: torch.uint8, 2: torch.int16}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("kind", chosen(KINDS, "bf16 and 8 bits, gradients", "remainders"))
@pytest.mark.parametrize("place", DEVICES)
def test_one_kernel_keeps_the_same_bits(
    place: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they compute in fp64; in fp32 but for the few whose last bits made a difference."""
    (config, dtype), cuts = KINDS[kind], {"a.weight": (slice(5, 30), slice(32, 129))}
    _, plain = trained(config, cuts, dtype, steps=2)
    device = run_kernels(place, monkeypatch, rounding)
    kernels = importlib.import_module("fivefold.optim.adamw_kernels")
    monkeypatch.setattr(kernels, "ELEMENTS", 128)
    _, fused = trained(config, cuts, dtype, steps=2, device=device)
    exactly = dtype == torch.float64
    limit = 1e-12 if exactly else 1e-5
    for name, weight in fused.weights().items():
        ours, theirs = weight.local.detach().cpu(), plain.weights()[name].local.detach()
        if ours.dtype == torch.bfloat16:
            assert (ours != theirs).float().mean() < 0.01
        nearest = 2**-7 if ours.dtype == torch.bfloat16 else limit
        torch.testing.assert_close(ours, theirs, rtol=nearest, atol=limit)
    for name, piece in fused.state_tensors().items():
        ours, theirs = piece.local.cpu(), plain.state_tensors()[name].local
        if ours.dtype.itemsize > 2:
            torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
        elif exactly:  # what is 0 but for fp64's own rounding has no bits to compare
            same = ours.view(BITS[ours.itemsize]) == theirs.view(BITS[ours.itemsize])
            nothing = (ours.float().abs() < 1e-14) & (theirs.float().abs() < 1e-14)
            assert (same | nothing).all() and same.float().mean() > 0.99, name
        else:
            assert (ours.float() != theirs.float()).float().mean() < 0.02, name


def test_rounding_is_right_on_average_and_keeps_what_fits() -> None:
    x = torch.tensor([1.0 + 2**-9, -3.1, 1e-39, 2.5e30, 0.3])
    bits = torch.arange(1 << 16)[:, None].expand(-1, len(x))
    found = rounded(x.expand(1 << 16, -1), bits).double()
    torch.testing.assert_close(found.mean(0), x.double(), rtol=1e-7, atol=1e-44)
    assert (found.unique(dim=0).std(0) > 0).all()
    kept = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.5, 1e38]).bfloat16()
    again = rounded(kept.float(), torch.full((len(kept),), -1))
    assert torch.equal(again.view(torch.int16), kept.view(torch.int16))
    nan = torch.tensor([0x7FFFFFFF, 0x7F800001], dtype=torch.int32).view(torch.float32)
    assert rounded(nan, torch.tensor([-1, 0])).isnan().all()


def test_the_update_sees_gradients_of_bf16_as_they_are() -> None:
    """The same gradients in fp32 give the same bits."""
    held, _ = trained(settings("fp32", "fp32", "bf16"), {}, torch.float32)
    wide = {n: nn.Parameter(w) for n, w in whole().items()}
    optimizer = AdamW(wide, OptimizerConfig())
    for step in range(5):
        for name, parameter in wide.items():
            parameter.grad = gradient(name, step, torch.float32).bfloat16().float()
        optimizer.step(StepRates(0.01, 0.01, 0.1))
    for name, parameter in wide.items():
        torch.testing.assert_close(held[name], parameter, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("moment", MOMENTS)
def test_8_bits_are_right_on_average_and_one_of_both_neighbours(moment: str) -> None:
    form = FORMATS[moment]
    generator = torch.Generator().manual_seed(1)
    spread = torch.randn(8, 70, generator=generator) * 4  # powers of two
    x = torch.randn(8, 70, generator=generator).abs() * spread.exp2() * 1e-3
    if moment == "exp_avg":
        x *= torch.randn(8, 70, generator=generator).sign()
    total, draws = torch.zeros_like(x, dtype=torch.float64), 1 << 10
    for draw in range(draws):
        bits = torch.full(x.shape, (draw << 6) + 31)
        packed, scales = form.pack(x, bits)
        found = form.unpack(packed, scales)
        total += found
        step = x.abs().log2().floor().exp2() * 2.0**-form.fraction
        smallest = 2.0 ** (form.least - form.fraction) * (scales.double() - 127).exp2()
        within = torch.maximum(step, smallest.float().repeat_interleave(BLOCK, 1)[:, :70])
        assert ((found - x).abs() < within * 1.0001).all()
    off = (total / draws - x).abs() * (x.abs() > within * form.keeps_positive)
    assert (off <= within / draws).all() and scales.shape == (8, 3)


def test_no_second_moment_becomes_0_and_none_leaves_the_range() -> None:
    form = FORMATS["exp_avg_sq"]
    x = torch.tensor([[1.0, 1e-30, 0.0, 2.9e38, 1e-38], [0.0] * 5])
    none, all_ = torch.zeros(x.shape, dtype=torch.int64), torch.full(x.shape, 0xFFFF)
    for bits in (none, all_):
        found = form.unpack(*form.pack(x, bits))
        assert torch.equal(found > 0, x > 0) and found.isfinite().all()
    for first in (-2.9e38, -1e-38, torch.nan, torch.inf):
        row = torch.tensor([[first, 1.0]])
        found = FORMATS["exp_avg"].unpack(*FORMATS["exp_avg"].pack(row, all_[:1, :2]))
        assert found[0, 0].isfinite() == row[0, 0].isfinite()


def test_second_moments_decay() -> None:
    """Rounded to the nearest they would stay at 1 for ever."""
    place = NamedElements(1, "w.weight", (64, 64), (slice(0, 64), slice(0, 64)))
    held = {"w.weight": nn.Parameter(torch.zeros(64, 64))}
    optimizer = AdamW(held, settings(adam_beta2=0.999), places={"w.weight": place})
    second = optimizer.state_tensors()["optim.exp_avg_sq.w.weight"].local.fill_(1.0)
    assert second.mul(0.999).eq(1).all(), "the nearest number of bf16"
    for _ in range(500):
        held["w.weight"].grad = torch.zeros(64, 64)
        optimizer.step(StepRates(0.0, 0.0, 0.1))
    assert second.float().mean().item() == pytest.approx(0.999**500, rel=5e-3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("kind", chosen(["bf16", "fp8"], "fp8"))
@pytest.mark.parametrize("place", ["plain", *DEVICES])
def test_a_step_that_found_infinities_changes_no_bit(
    place: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = "cpu" if place == "plain" else run_kernels(place, monkeypatch, rounding)
    held, optimizer = trained(settings(kind, kind), {}, torch.float32, steps=1, device=device)
    before = [p.detach().clone() for p in held.values()]
    state = {n: piece.local.clone() for n, piece in optimizer.state_tensors().items()}
    for parameter in held.values():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step(StepRates(0.1, 0.1, 0.1), torch.ones((), device=device))
    assert all(torch.equal(p, was) for p, was in zip(held.values(), before, strict=True))
    for name, piece in optimizer.state_tensors().items():
        assert same_bits(piece.local, state[name])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, which interprets
@pytest.mark.parametrize("bad", chosen((torch.inf, -torch.inf, torch.nan), torch.inf))
@pytest.mark.parametrize("place", DEVICES)
def test_the_kernel_keeps_what_is_not_finite(
    place: Any, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = settings("bf16", "fp8"), []
    for fused in (False, True):
        device = run_kernels(place, monkeypatch, rounding) if fused else "cpu"
        held, optimizer = trained(config, {}, torch.float64, steps=1, device=device)
        for parameter in held.values():
            parameter.grad = torch.ones_like(parameter)
            parameter.grad.view(-1)[1] = bad
        optimizer.step(StepRates(0.01, 0.01, 0.1))
        found.append({n: piece.local.cpu() for n, piece in optimizer.state_tensors().items()})
    for name, theirs in found[0].items():
        ours, theirs = found[1][name].float(), theirs.float()
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-14, equal_nan=True)


def test_a_checkpoint_fills_wider_moments_and_not_narrower_ones(tmp_path) -> None:
    _, narrow = trained(settings(), {}, torch.float32)
    wide = {
        n: Piece(torch.ones_like(p.local, dtype=torch.float32), p.shape, p.slices)
        for n, p in narrow.state_tensors().items()
    }
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, narrow.state_tensors(), {})
    checkpointer.load(1, wide)
    for name, piece in narrow.state_tensors().items():
        assert torch.equal(wide[name].local, piece.local.float())
    checkpointer.save(2, wide, {})
    with pytest.raises(CheckpointError, match=r"exp_avg: torch\.float32, here torch\.bfloat16"):
        checkpointer.load(2, narrow.state_tensors())


def test_a_checkpoint_of_8_bits_fills_other_parts_and_no_other_type(tmp_path) -> None:
    cuts = {"a.weight": (slice(0, 37), slice(32, 96)), "experts.weight": (slice(1, 3), slice(2, 9))}
    cuts["experts.weight"] += (slice(0, 21),)
    _, saved = trained(settings("fp8", "fp8"), {}, torch.float32)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, saved.state_tensors(), {})
    _, other = trained(settings("fp8", "fp8"), cuts, torch.float32, steps=0)
    pieces = {}
    for name, piece in other.state_tensors().items():
        _, state, of = name.split(".", 2)
        part = cuts.get(of, tuple(slice(0, size) for size in SHAPES[of]))
        whole_piece = Piece(piece.local, torch.Size(SHAPES[of]), part)
        pieces[name] = state_piece(state, whole_piece, piece.local)
    checkpointer.load(1, pieces)
    for name, piece in saved.state_tensors().items():
        assert same_bits(pieces[name].local, piece.local[pieces[name].slices])
    for kind, works in (("bf16", "--exp-avg-dtype fp8"), ("fp32", "--exp-avg-dtype fp8")):
        _, wide = trained(settings(kind, "fp8"), {}, torch.float32, steps=1)
        with pytest.raises(CheckpointError, match=rf"float8_e4m3fn, here(.|\n)*{works}"):
            checkpointer.load(1, wide.state_tensors())
        checkpointer.save(2, wide.state_tensors(), {})
        with pytest.raises(CheckpointError, match=rf"here torch.float8_e4m3fn(.|\n)*{kind}"):
            checkpointer.load(2, saved.state_tensors())


def test_a_weight_and_its_remainder_are_the_master_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=generator, dtype=torch.int64)
    middle = (bits[:1000] & ~0xFFFF) | 0x8000
    master = torch.cat([bits, middle]).int().view(torch.float32)
    weight, remainder = master.bfloat16(), torch.empty(len(master), dtype=torch.int16)
    nearest = weight.clone()
    divide(master, weight, remainder)
    assert same_bits(exact(weight, remainder), master)
    finite = nearest.isfinite()
    off = (weight.float() - nearest.float())[finite]
    assert not off[:-1000].any() and off.any(), "another one only where two are as near"


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_remainders_are_masters_of_fp32_to_the_bit(gradients: str) -> None:
    masters = {n: w.bfloat16().float() for n, w in whole().items()}
    places = {
        n: NamedElements(7, n, shape, tuple(slice(0, size) for size in shape))
        for n, shape in SHAPES.items()
    }
    config = settings("fp32", "fp32", gradients)
    wide = {n: nn.Parameter(w.clone()) for n, w in masters.items()}
    narrow = {n: nn.Parameter(w.bfloat16()) for n, w in masters.items()}
    # Both by pieces, since a CPU's kernel computes the rest of a whole vector in other bits.
    ours = AdamW(narrow, replace(config, store_param_remainders=True), places=places)
    theirs = AdamW(wide, replace(config, main_grads_dtype="bf16"), places=places)
    for step in range(20):
        for name in SHAPES:
            grad = gradient(name, step, torch.float32).bfloat16()
            narrow[name].grad = grad.to(narrow[name].grad_dtype, copy=True)
            wide[name].grad = grad.clone()
        ours.step(StepRates(0.01, 0.01, 0.1))
        theirs.step(StepRates(0.01, 0.01, 0.1))
    for name, piece in ours.weights().items():
        assert same_bits(piece.local, wide[name].detach())
        assert narrow[name].dtype == torch.bfloat16
        for moment in MOMENTS:
            key = f"optim.{moment}.{name}"
            assert same_bits(ours.state_tensors()[key].local, theirs.state_tensors()[key].local)
    before = {n: p.local for n, p in ours.weights().items()}
    ours.take({n: Piece(w, w.shape, ()) for n, w in before.items()})
    assert all(same_bits(ours.weights()[n].local, w) for n, w in before.items())


def test_weights_of_bf16_without_masters_move_by_less_than_their_last_bit() -> None:
    """Rounded to the nearest they would stay where they are."""
    place = NamedElements(1, "w.weight", (64, 64), (slice(0, 64), slice(0, 64)))
    config = replace(settings("fp32", "fp32"), main_params_dtype="bf16", weight_decay=0.0)
    held = {"w.weight": nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))}
    optimizer = AdamW(held, config, places={"w.weight": place})
    for _ in range(100):
        held["w.weight"].grad = torch.ones(64, 64)
        optimizer.step(StepRates(1e-4, 1e-4, 0.0))  # 1/39 of the last bit below 1
    assert held["w.weight"].float().mean().item() == pytest.approx(1 - 100 * 1e-4, rel=1e-4)
