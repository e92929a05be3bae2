"""Moments of few bits: right on average, and the same numbers wherever an element lies."""

import pytest
import torch
from torch import Tensor, nn

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.training import OptimizerConfig
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import Piece
from fivefold.optim import rounding
from fivefold.optim.adamw import AdamW
from fivefold.optim.rounding import MOMENTS, NamedElements, rounded

SHAPES = {"a.weight": (37, 129), "experts.weight": (4, 9, 21), "a.bias": (70,), "b.weight": (1, 5)}


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
    config: OptimizerConfig, cuts: dict[str, tuple[slice, ...]], dtype: torch.dtype, steps: int = 5
) -> tuple[dict[str, nn.Parameter], AdamW]:
    """Parts of all parameters after some steps."""
    places = {
        name: NamedElements(7, name, shape, cuts.get(name, tuple(slice(0, size) for size in shape)))
        for name, shape in SHAPES.items()
    }
    held = {n: nn.Parameter(w[places[n].slices].clone()) for n, w in whole(dtype).items()}
    optimizer = AdamW(held, config, places=places)
    for step in range(steps):
        for name, parameter in held.items():
            grad = gradient(name, step, dtype)[places[name].slices]
            parameter.grad = grad.to(parameter.grad_dtype, copy=True)
        optimizer.step(lr=0.01)
    return held, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "types",
    [
        ("bf16", "bf16", "fp32"),
        ("fp32", "bf16", "fp32"),
        ("bf16", "fp32", "bf16"),
        ("fp32", "fp32", "bf16"),
    ],
)
def test_every_part_has_the_bits_of_the_whole(
    types: tuple[str, str, str], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, moments = settings(*types), types[:2]
    straight, reference = trained(config, {}, dtype)
    monkeypatch.setattr(rounding, "AT_A_TIME", {"cpu": 50})
    random = torch.Generator().manual_seed(3)
    for _ in range(4):
        cuts = {}
        for name, shape in SHAPES.items():
            ends = [sorted(torch.randint(0, n + 1, (2,), generator=random).tolist()) for n in shape]
            cuts[name] = tuple(slice(*pair) for pair in ends)
        held, optimizer = trained(config, cuts, dtype)
        for name, part in cuts.items():
            assert torch.equal(held[name], straight[name][part])
            for moment, kind in zip(MOMENTS, moments, strict=True):
                key = f"optim.{moment}.{name}"
                own = optimizer.state_tensors()[key].local
                assert own.dtype == (torch.bfloat16 if kind == "bf16" else dtype)
                assert torch.equal(own, reference.state_tensors()[key].local[part])


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
        optimizer.step(lr=0.01)
    for name, parameter in wide.items():
        torch.testing.assert_close(held[name], parameter, rtol=1e-6, atol=1e-7)


def test_second_moments_decay() -> None:
    """Rounded to the nearest they would stay at 1 for ever."""
    place = NamedElements(1, "w.weight", (64, 64), (slice(0, 64), slice(0, 64)))
    held = {"w.weight": nn.Parameter(torch.zeros(64, 64))}
    optimizer = AdamW(held, settings(adam_beta2=0.999), places={"w.weight": place})
    second = optimizer.state_tensors()["optim.exp_avg_sq.w.weight"].local.fill_(1.0)
    assert second.mul(0.999).eq(1).all(), "the nearest number of bf16"
    for _ in range(500):
        held["w.weight"].grad = torch.zeros(64, 64)
        optimizer.step(lr=0.0)
    assert second.float().mean().item() == pytest.approx(0.999**500, rel=5e-3)


def test_a_step_that_found_infinities_changes_no_bit() -> None:
    held, optimizer = trained(settings(), {}, torch.float32)
    before = [p.detach().clone() for p in held.values()]
    state = {n: piece.local.clone() for n, piece in optimizer.state_tensors().items()}
    for parameter in held.values():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step(0.1, torch.ones(()))
    assert all(torch.equal(p, was) for p, was in zip(held.values(), before, strict=True))
    for name, piece in optimizer.state_tensors().items():
        assert torch.equal(piece.local, state[name])


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
