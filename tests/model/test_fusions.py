"""Fused elementwise kernels against their plain twins: interpreted, and compiled on a GPU."""

import importlib
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.model import ModelConfig
from fivefold.config.training import TrainingConfig
from fivefold.errors import ConfigError
from fivefold.memory.offload import Host, install_offload
from fivefold.memory.recompute import install_recompute
from fivefold.model import activation, dropout, layer, norms, rope
from fivefold.model.batch import on_device
from fivefold.model.fusion_rules import joins_norm
from fivefold.model.fusions import install_fusions
from fivefold.model.norms import RMSNorm, rms_norm
from fivefold.model.transformer import Stage
from tests.kernels import DEVICES, run_kernels
from tests.model.models import FAMILIES, LLAMA, batch_of, build
from tests.verify.cases import chosen

TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
TYPES = pytest.mark.parametrize("dtype", TOLERANCE)
SMALL = {
    "dropout": {"ROWS": 4, "COLUMNS": 16},
    "gates": {"AT_A_TIME": 16},
    "norms": {"PROGRAMS": 3},
    "rotary": {"HEADS": 2},
}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Where the kernels run, in small programs, so that a tensor takes several."""
    device = run_kernels(request.param, monkeypatch, activation, dropout, layer, norms, rope)
    for name, sizes in SMALL.items():
        module = importlib.import_module(f"fivefold.model.kernels.{name}")
        for constant, value in sizes.items():
            monkeypatch.setattr(module, constant, value)
    return device


def close(found: Tensor | None, true: Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None and true is not None
    limit = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), true.double(), rtol=limit, atol=limit)


@TYPES
@pytest.mark.parametrize("adds", [False, True])
def test_dropout_by_a_kernel_drops_the_same(adds: bool, dtype: torch.dtype, device: str) -> None:
    """Of features of tokens, all or from one on, and of probabilities between those of two rows."""
    far, key = 2**40, torch.full((), -(2**61) + 12345, device=device)
    ids_BL = torch.arange(far, far + 22, device=device).view(2, 11)
    for shape, ids_Bq, ids_Bk, heads in (
        ((7, 37), torch.arange(5, 12, device=device)[None], None, (0, 1)),
        ((7, 37), torch.arange(5, 12, device=device)[None], None, (0, 1, 74, 0.3)),
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
    if name == "relu":
        return x.clamp(min=0)
    if name == "squared_relu":
        return x.clamp(min=0) ** 2
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


GATES = (
    ("silu", None, 0.0),
    ("silu", 0.7, 1.0),
    ("quick_gelu", None, 1.0),
    ("gelu", None, 0.0),
    ("gelu_tanh", None, 0.0),
    ("relu", None, 0.0),
    ("squared_relu", None, 0.0),
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
        inner = (3 * torch.randn(1 + paired, 3, 40, device=device)).to(dtype)
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
    x = torch.randn(2, 2, 3, 12, device=device).to(dtype)
    strided = torch.randn(2, 3, 2, 12, device=device).to(dtype).transpose(1, 2)
    for (features, first), given in (((12, 0), x), ((6, 6), strided), ((10, 1), strided)):
        angles = torch.randn(2, 2, 1, features // 2, device=device)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for pairs, both in ((False, cos.repeat(1, 1, 1, 2)), (True, cos.repeat_interleave(2, -1))):
            found = []
            for fused in (False, True):
                input_BSND = given.detach().clone().requires_grad_()
                y = rope.RotaryTables(both, sin, fused, pairs).rotate(input_BSND, first)
                y.backward(strided)
                found.append([y, input_BSND.grad])
            for one, other in zip(*found, strict=True):
                close(other, one, dtype)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((5, 1), torch.float64),
        ((4, 3), torch.bfloat16),
        pytest.param((4, 3), torch.float64, marks=pytest.mark.exhaustive),
        pytest.param((5, 1), torch.bfloat16, marks=pytest.mark.exhaustive),
    ],
)
def test_queries_and_keys_are_turned_by_one_kernel(
    heads: tuple[int, int], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any numbers of heads and any strides, one of which may get no gradient."""
    kernels = importlib.import_module("fivefold.model.kernels.rotary")
    launched: list[Tensor] = []
    real = kernels.launch

    def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, /, *rest: Any, **how: Any) -> None:
        launched.append(x)
        real(kernel, grid, x, *rest, **how)

    monkeypatch.setattr(kernels, "launch", launch)
    q, k = (torch.randn(2, n, 2, 12, device=device).to(dtype) for n in heads)
    angles = torch.randn(2, 2, 1, 6, device=device)
    tables = angles.cos().to(dtype).repeat(1, 1, 1, 2), angles.sin().to(dtype)
    for frozen in (None, 0, 1):
        found = []
        for fused in (False, True):
            own = [
                x.transpose(1, 2).detach().requires_grad_(n != frozen) for n, x in ((0, q), (1, k))
            ]
            turned = rope.RotaryTables(*tables, fused).rotate_both(*own)
            torch.autograd.backward(turned, [q.transpose(1, 2), k.transpose(1, 2)])
            found.append([*turned, *(x.grad for x in own if x.requires_grad)])
        for one, other in zip(*found, strict=True):
            close(other, one, dtype)
    assert len(launched) == 6


MODELS = {
    "llama": replace(LLAMA, num_layers=1, hidden_dropout=0.2, attention_dropout=0.1),
    "geglu": replace(LLAMA, num_layers=1, hidden_dropout=0.1, activation_func="gelu_tanh"),
    "sinks": replace(FAMILIES["sinks"], num_layers=1, hidden_dropout=0.2),
    "latent": replace(FAMILIES["latent"], num_layers=1, attention_dropout=0.2),
    "no dropout": replace(LLAMA, num_layers=2),
}


@pytest.mark.parametrize("name", chosen(MODELS, *(set(MODELS) - {"llama"})))
def test_a_fused_model_is_the_model(name: str, device: str) -> None:
    """In fp64, with every fusion: the same loss and gradients."""
    model = MODELS[name]
    (batch,) = on_device([batch_of(model, [[3, 2], [5]])], torch.device(device))
    plain, fused = (build(model).to(device, torch.float64).train() for _ in range(2))
    joins = not model.hidden_dropout
    install_fusions(fused, TrainingConfig(fused_residual_rmsnorm=joins))
    losses = [stage(None, batch) for stage in (plain, fused)]
    for loss in losses:
        loss.backward()
    close(*losses, torch.float64)
    assert switched(fused) == {"gate", "rope", "dropout"} | (
        {"norm"} if joins else set()
    ) and not switched(plain)
    for one, other in zip(fused.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad, torch.float64)


def switched(stage: Stage) -> set[str]:
    """What a stage fuses."""
    found = {"rope"} if stage.fuses_rope else set()
    found |= {"norm"} if any(each.fuses_norm for each in stage.transformer_layers) else set()
    found |= {"dropout"} if stage.fuses_dropout else set()
    return found | {"gate" for module in stage.modules() if getattr(module, "fuses_gate", False)}


@TYPES
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_sum_and_its_norm_by_a_kernel_are_both(
    offset: float, dtype: torch.dtype, device: str
) -> None:
    """Of more rows than there are programs; with and without a gradient of the sum itself."""
    norm = RMSNorm(37, 1e-5, offset).to(device, dtype)
    norm.weight.data.copy_(torch.randn(37))
    x, onto, *grads = torch.randn(4, 7, 37, device=device).to(dtype)
    for both, scale in ((True, 1.0), (False, 1.0), (True, 0.25)):
        found = []
        for fused in (False, True):
            given = [each.clone().requires_grad_() for each in (x, onto)]
            norm.weight.grad = None
            total = torch.add(given[1], given[0], alpha=scale)
            total, y = norm.of_sum(*given, scale) if fused else (total, norm(total))
            outputs = [total, y] if both else [y]
            strided = [each.t().contiguous().t() for each in grads]
            torch.autograd.backward(outputs, strided[: len(outputs)])
            found.append([total, y, *(each.grad for each in given), norm.weight.grad])
        if dtype == torch.float64:  # the interpreter cuts bf16 instead of rounding it
            assert torch.equal(found[0][0], found[1][0])  # type: ignore[arg-type]
        for one, other in zip(*found, strict=True):
            assert one is not None and other is not None
            off = (one - other).double().norm()
            assert off <= (1e-12 if dtype == torch.float64 else 0.01) * one.double().norm()
    empty = torch.empty(0, 37, device=device, dtype=dtype, requires_grad=True)
    norm.of_sum(empty, empty, 1.0)[1].sum().backward()


@TYPES
def test_a_norm_by_a_kernel_adds_one_to_its_weight_if_any(dtype: torch.dtype, device: str) -> None:
    """Of single heads, more rows than there are programs, in any order in memory."""
    kernels = importlib.import_module("fivefold.model.kernels.norms")
    weight = torch.randn(37, device=device).to(dtype).requires_grad_()
    x = torch.randn(5, 37, 3, device=device).to(dtype).transpose(1, 2).requires_grad_()
    upstream, found = torch.randn(5, 3, 37, device=device).to(dtype), []
    for norm, by in product((rms_norm, kernels.norm), (weight, None)):
        y = norm(x, by, 1e-5, 1.0)
        of = (x,) if by is None else (x, by)
        found.append([y, *torch.autograd.grad(y, of, upstream)])
    pairs = zip(found[0] + found[1], found[2] + found[3], strict=True)
    for one, other in pairs:
        assert one.shape == other.shape and one.dtype == other.dtype
        off = (one - other).double().norm()
        assert off <= (1e-12 if dtype == torch.float64 else 0.01) * one.double().norm()
    empty = torch.empty(0, 37, device=device, dtype=dtype, requires_grad=True)
    kernels.norm(empty, weight, 1e-5, 1.0).sum().backward()


@pytest.mark.parametrize("function", ["silu", "gelu"])
def test_each_flag_switches_its_own(function: str) -> None:
    gate = "bias_gelu_fusion" if function == "gelu" else "bias_swiglu_fusion"
    every = {gate: "gate", "rope_fusion": "rope", "bias_dropout_fusion": "dropout"}
    every["fused_residual_rmsnorm"] = "norm"
    training = TrainingConfig(fused_residual_rmsnorm=True)
    others = {"bias_swiglu_fusion": "", "bias_gelu_fusion": ""} | every
    for name, what in others.items():
        stage = Stage(replace(LLAMA, activation_func=function))
        install_fusions(stage, replace(training, **{name: False}))
        assert switched(stage) == {*every.values()} - {what}


def test_a_norm_that_follows_no_plain_sum_is_refused() -> None:
    for name, value, said in (
        ("hidden_dropout", 0.1, "works: --no-fused-residual-rmsnorm | --hidden-dropout 0"),
        ("normalization", "LayerNorm", "normalization LayerNorm"),
        ("parallel_residual", True, "reads no sum"),
    ):
        config = Config(replace(LLAMA, **{name: value}))
        with pytest.raises(ConfigError, match="fused_residual_rmsnorm") as caught:
            check(config.with_values(fused_residual_rmsnorm=True), 1)
        assert said in str(caught.value)


def test_a_norm_that_is_made_again_or_moved_is_left_alone(device: str) -> None:
    """Where the planner takes it to be apart, and nowhere else."""
    model = replace(LLAMA, num_layers=1)
    moves = {"fine_grained_activation_offloading": True, "offload_modules": ("mlp_norm",)}
    for settings in ({}, {"recompute_granularity": "selective"}, moves):
        config = Config(model).with_values(fused_residual_rmsnorm=True, **settings)
        stage = build(model).to(device)
        if config.memory.recompute_granularity is not None:
            install_recompute(stage, config.memory)
        install_fusions(stage, config.training)
        if config.memory.fine_grained_activation_offloading:
            install_offload(stage, config.memory, Host(torch.device(device), 0))
        seen: list[int] = []
        norm = stage.layers["0"].post_attention_layernorm
        norm.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        (batch,) = on_device([batch_of(model, [[5, 4]])], torch.device(device))
        stage(None, batch)
        assert joins_norm(config) == (not seen)
