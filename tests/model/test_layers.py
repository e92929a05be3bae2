import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.model.activation import swiglu
from fivefold.model.norms import RMSNorm


def norm(dtype: torch.dtype, offset: float = 0.0) -> RMSNorm:
    layer = RMSNorm(8, 1e-5, offset)
    torch.nn.init.normal_(layer.weight)
    return layer.to(dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_equals_pytorch_in_fp64_with_its_gradients(offset: float) -> None:
    layer = norm(torch.float64, offset)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    outputs = layer(x), F.rms_norm(x, (8,), offset + layer.weight, 1e-5)
    gradients = [torch.autograd.grad(y, (x, layer.weight), upstream) for y in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(*gradients, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_of_bf16_rounds_once(offset: float) -> None:
    layer = norm(torch.bfloat16, offset)
    x = torch.randn(64, 8).bfloat16().requires_grad_()
    exact = F.rms_norm(x.double(), (8,), offset + layer.weight.double(), 1e-5)
    y = layer(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(y, exact.bfloat16()) or (y - exact).abs().max() < 2**-8 * exact.abs().max()


def test_swiglu_saves_its_inputs_only_and_differentiates() -> None:
    gate, up = torch.randn(2, 5, 7, dtype=torch.float64).requires_grad_()
    torch.autograd.gradcheck(swiglu, (gate, up))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y = swiglu(gate, up)
    assert {t.data_ptr() for t in saved} == {gate.data_ptr(), up.data_ptr()}
    assert torch.equal(y, F.silu(gate) * up)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 4, 8)])
def test_rms_norm_gradcheck(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(norm(torch.float64, 1.0), (x,))
