"""Triton's passes over logits against the plain ones: interpreted, and compiled where a GPU is."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fivefold.audit.work import Multiplications
from fivefold.memory import cross_entropy as fused
from fivefold.model.batch import on_device
from fivefold.model.loss import LossRule
from fivefold.tensor.vocabulary import Entries
from tests.kernels import DEVICES, run_kernels
from tests.memory.test_cross_entropy import (
    CASES,
    NAMES,
    T,
    Z,
    _batch,
    _fuse,
    _hidden,
    _model,
)
from tests.model.models import build
from tests.verify.cases import chosen

RANGES = {
    "whole, padded": Entries(0, LossRule(99, 0.0)),
    "second of two": Entries(52, LossRule(99, 0.1, Z)),
    "padding only": Entries(104, LossRule(99, 0.1)),
    "shorter than a program": Entries(0, LossRule(7, 0.1)),
}


@pytest.fixture(params=DEVICES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device, and the kernels: of small programs, so that a row takes several."""
    device = run_kernels(request.param, monkeypatch)
    module: ModuleType = importlib.import_module("fivefold.memory.loss_kernels")
    monkeypatch.setattr(module, "AT_A_TIME", 32)
    return device, module


@pytest.mark.filterwarnings("ignore:divide by zero")  # the logarithm of an empty sum
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", RANGES.values(), ids=RANGES)
def test_kernels_are_the_plain_passes(entries: Entries, dtype: torch.dtype, kernels: Any) -> None:
    device, module = kernels
    generator = torch.Generator().manual_seed(1)
    storage = 5 * torch.randn(T, 60, generator=generator)
    logits = storage.to(device, dtype)[:, :52]  # rows that are not adjacent
    labels = torch.randint(99, (T,), generator=generator)
    labels[3], labels[5] = -100, entries.first
    scale = torch.rand(T, generator=generator).masked_fill(labels == -100, 0.0)
    lse = 10 + torch.randn(T, generator=generator)
    wide, there = logits.double().cpu(), (labels.to(device),)
    ours = module.statistics(entries, logits, *there)
    torch.testing.assert_close(
        ours.double().cpu(), entries.statistics(wide, labels), rtol=1e-5, atol=1e-5
    )
    found = module.overwrite(entries, logits, *there, lse.to(device), scale.to(device))
    assert found is logits
    true = entries.gradient(wide, labels, lse.double(), scale.double())
    torch.testing.assert_close(
        found.double().cpu(), true, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


@pytest.mark.parametrize("case", chosen(CASES, *CASES[::3]), ids=NAMES)
def test_losses_by_kernels_are_the_loss(
    case: tuple[str, float, bool], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    impl, smoothing, weighted = case
    device, _ = kernels
    used = []
    monkeypatch.setattr(fused, "runs_kernels", lambda _: used.append(1) or True)
    results = []
    for stage, kind in (
        (build(_model(smoothing), label_smoothing=smoothing, z_loss_coeff=Z), torch.float64),
        (
            _fuse(build(_model(smoothing), label_smoothing=smoothing, z_loss_coeff=Z), impl),
            torch.float32,
        ),
    ):
        stage.to(device, kind)
        x = _hidden().detach().to(device, kind).requires_grad_()
        (batch,) = on_device([_batch(weighted)], torch.device(device))
        loss = stage.loss([stage.norm(x)], batch)
        (loss * 0.37).backward()
        assert stage.lm_head is not None and x.grad is not None
        results.append((loss.detach(), x.grad, stage.lm_head.weight.grad))
    assert used
    for true, ours in zip(*results, strict=True):
        assert true is not None and ours is not None
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    torch.__version__ < (2, 12), reason="torch 2.11 works out its shape as another operation's"
)
def test_a_sum_in_the_products_kernel_is_counted() -> None:
    """`add_product` on CUDA, by shapes alone."""
    left, right = (torch.empty(*shape, device="meta").bfloat16() for shape in ((3, 4), (4, 5)))
    total = torch.empty(3, 5, device="meta")
    with Multiplications() as work:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    assert work.flops == 2 * 3 * 4 * 5
