"""Fused elementwise kernels against their plain twins: interpreted, and compiled on a GPU."""

import importlib
import os
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.model import activation, dropout, rope
from fivefold.model.batch import on_device
from fivefold.model.fusions import install_fusions
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, LLAMA, batch_of, build

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)
SMALL = {"dropout_kernels": {"ROWS": 4, "COLUMNS": 16}, "gate_kernels": {"AT_A_TIME": 16}}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the kernels run, in small programs, so that a tensor takes several."""
    pytest.importorskip("triton")
    if request.param == "cpu":
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("a process either interprets kernels or compiles them")
        for user in (activation, dropout, rope):
            monkeypatch.setattr(user, "runs_triton", lambda _: True)
    for name, sizes in SMALL.items():
        module = importlib.import_module(f"fivefold.model.{name}")
        for constant, value in sizes.items():
            monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(importlib.import_module("fivefold.model.rotary_kernels"), "HEADS", 2)
    return request.param


def close(found: Tensor | None, true: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None and true is not None
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), true.double(), rtol=limit, atol=limit)


@TYPES
@pytest.mark.parametrize("adds", [False, True])
def test_dropout_by_a_kernel_drops_the_same(adds: bool, dtype: torch.dtype, device: str) -> None:
    """Of features of tokens, and of probabilities between the tokens of two rows."""
    far, key = 2**40, torch.full((), -(2**61) + 12345, device=device)
    ids_BL = torch.arange(far, far + 22, device=device).view(2, 11)
    for shape, ids_Bq, ids_Bk, heads in (
        ((7, 37), torch.arange(5, 12, device=device)[None], None, (0, 1)),
        ((2, 3, 6, 11), ids_BL[:, 5:], ids_BL, (1, 5)),
    ):
        x, onto, grad = torch.randn(3, *shape, device=device).to(dtype)
        found: list[list[Tensor | None]] = []
        for fused in (False, True):
            mask = dropout.Mask(ids_Bq, ids_Bk, 0.3, key, fused, *heads)
            given = x.clone().requires_grad_(), onto.clone().requires_grad_() if adds else None
            y = mask.drop(*given)
            # Strided gradients, as attention and views give them.
            y.backward(grad.transpose(-2, -1).contiguous().transpose(-2, -1))
            found.append([y, *(None if each is None else each.grad for each in given)])
        assert torch.equal(found[0][1] == 0, found[1][1] == 0)  # the gradient is 0 where it drops
        assert 0.1 < (found[1][1] == 0).double().mean() < 0.5
        for one, other in zip(*found, strict=True):
            if one is not None:
                close(other, one, dtype)


def curve(name: str, x: Tensor) -> Tensor:
    """An activation by its definition."""
    if name in ("silu", "quick_gelu"):
        return x / (1 + torch.exp(-x * (1.0 if name == "silu" else 1.702)))
    if name == "gelu":
        return x * torch.special.ndtr(x)
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


GATES = (
    ("silu", None, 0.0),
    ("silu", 0.7, 1.0),
    ("quick_gelu", None, 1.0),
    ("gelu", None, 0.0),
    ("gelu_tanh", None, 0.0),
)


def activations(model: ModelConfig, weighted: bool, inner: Tensor) -> list[list[Tensor | None]]:
    """Results and gradients: by definition in fp64, plain, and by a kernel."""
    dtype, found = inner.dtype, []
    grad, weights_T = torch.randn_like(inner[0]), torch.rand_like(inner[0, :, 0]).double()
    weights_T = weights_T.to(torch.promote_types(dtype, torch.float32))
    bound, offset = model.activation_func_clamp_value, model.glu_linear_offset
    for fused in (None, False, True):
        leaves = [x.clone().to(x.dtype if fused is not None else torch.float64) for x in inner]
        weights = weights_T.clone().requires_grad_() if weighted else None
        given = [x.requires_grad_() for x in leaves]
        if fused is None:
            gate, *up = given if bound is None else (x.clamp(max=bound) for x in given)
            y = curve(model.activation_func, gate)
            for u in up:
                y = y * ((u if bound is None else u.clamp(min=-bound)) + offset)
            y = y if weights is None else y * weights[:, None]
        else:
            y = activation.activated(model, given, weights, fused=fused)
            assert y.dtype == dtype
        y.backward(grad.to(y.dtype))
        each = [y, *(x.grad for x in leaves), *([] if weights is None else [weights.grad])]
        found.append(each)
    return found


@TYPES
def test_an_activation_by_a_kernel_is_the_activation(dtype: torch.dtype, device: str) -> None:
    for (name, bound, offset), weighted, paired in product(GATES, (False, True), (False, True)):
        if bound is not None and not paired:
            continue
        values = {"activation_func_clamp_value": bound, "glu_linear_offset": offset}
        model = replace(LLAMA, activation_func=name, gated_linear_unit=paired, **values)
        inner = (3 * torch.randn(1 + paired, 5, 40, device=device)).to(dtype)
        true, *ours = activations(model, weighted, inner)
        for each in ours:
            for found, expected in zip(each, true, strict=True):
                assert found is not None and expected is not None
                if dtype != torch.bfloat16:
                    close(found, expected, dtype)
                else:  # rounded more than once
                    off = (found.double() - expected.double()).norm()
                    assert off < 0.02 * expected.double().norm()
    nothing = torch.empty(0, 40, device=device, dtype=dtype)
    assert activation.activated(LLAMA, (nothing, nothing), fused=True).shape == (0, 40)


@TYPES
def test_positions_by_a_kernel_are_the_positions(dtype: torch.dtype, device: str) -> None:
    """Of all features, the first, the last and those in between; of strided heads, too."""
    x = torch.randn(2, 5, 3, 12, device=device).to(dtype)
    strided = torch.randn(2, 3, 5, 12, device=device).to(dtype).transpose(1, 2)
    for (features, first), given in (((12, 0), x), ((6, 6), strided), ((10, 1), strided)):
        angles = torch.randn(2, 5, 1, features // 2, device=device)
        tables = angles.cos().to(dtype).repeat(1, 1, 1, 2), angles.sin().to(dtype)
        found = []
        for fused in (False, True):
            input_BSND = given.detach().clone().requires_grad_()
            y = rope.RotaryTables(*tables, fused).rotate(input_BSND, first)
            y.backward(strided)
            found.append([y, input_BSND.grad])
        for one, other in zip(*found, strict=True):
            close(other, one, dtype)


MODELS = {
    "llama": replace(LLAMA, num_layers=1, hidden_dropout=0.2, attention_dropout=0.1),
    "geglu": replace(LLAMA, num_layers=1, hidden_dropout=0.1, activation_func="gelu_tanh"),
    "sinks": replace(FAMILIES["sinks"], num_layers=1, hidden_dropout=0.2),
    "latent": replace(FAMILIES["latent"], num_layers=1, attention_dropout=0.2),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_fused_model_is_the_model(name: str, device: str) -> None:
    """In fp64, with every fusion: the same loss and gradients."""
    model = MODELS[name]
    (batch,) = on_device([batch_of(model, [[5, 4], [9]])], torch.device(device))
    plain, fused = (build(model).to(device, torch.float64).train() for _ in range(2))
    install_fusions(fused, TrainingConfig())
    losses = [stage(None, batch) for stage in (plain, fused)]
    for loss in losses:
        loss.backward()
    close(*losses, torch.float64)
    assert switched(fused) == {"gate", "rope", "dropout"} and not switched(plain)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad, torch.float64)


def switched(stage: Stage) -> set[str]:
    """What a stage fuses."""
    found = {"rope"} if stage.fuses_rope else set()
    found |= {"dropout"} if stage.fuses_dropout else set()
    return found | {"gate" for module in stage.modules() if getattr(module, "fuses_gate", False)}


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_each_flag_switches_its_own(function: str) -> None:
    gate = "bias_gelu_fusion" if function == "gelu" else "bias_swiglu_fusion"
    every = {gate: "gate", "rope_fusion": "rope", "bias_dropout_fusion": "dropout"}
    others = {"bias_swiglu_fusion": "", "bias_gelu_fusion": ""} | every
    for name, what in others.items():
        stage = Stage(replace(LLAMA, activation_func=function))
        install_fusions(stage, replace(TrainingConfig(), **{name: False}))
        assert switched(stage) == {*every.values()} - {what}
