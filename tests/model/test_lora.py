"""Adapters alone, without a model around them."""

from dataclasses import replace

import pytest
import torch

from fivefold.config.model import ModelConfig
from fivefold.model.dropout import Dropout
from fivefold.model.lora import LORA, add_adapters
from fivefold.model.mlp import MLP

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    vocab_size=16,
    gated_linear_unit=False,
    activation_func="gelu",
    lora_rank=2,
    lora_alpha=6.0,
    use_rslora=True,
)


def _mlp(model: ModelConfig = MODEL) -> MLP:
    mlp = MLP(model, 12)
    add_adapters(mlp, model)
    generator = torch.Generator().manual_seed(1)
    for parameter in mlp.parameters():
        parameter.data.normal_(generator=generator)
    return mlp.double()


def test_an_adapter_adds_its_share() -> None:
    mlp, x_TH = _mlp(), torch.randn(5, 8, dtype=torch.float64)
    up = mlp.up_proj
    assert up.lora_A is not None and up.lora_B is not None
    merged = up.weight + 6.0 / 2**0.5 * up.lora_B.weight @ up.lora_A.weight
    (made_TF,) = mlp.project(x_TH, up)
    torch.testing.assert_close(made_TF, x_TH @ merged.t(), rtol=1e-12, atol=1e-12)
    trained = {name for name, p in mlp.named_parameters() if p.requires_grad}
    assert trained == {name for name, _ in mlp.named_parameters() if LORA in name}
    assert len(trained) == 4


def test_magnitudes_are_the_lengths_of_rows() -> None:
    """Rows of W + s B A, scaled to their magnitudes; their lengths are constants in a backward."""
    mlp = _mlp(replace(MODEL, use_dora=True))
    down, x_TF = mlp.down_proj, torch.randn(5, 12, dtype=torch.float64)
    tensors = [down.lora_A.weight, down.lora_B.weight, down.lora_magnitude_vector]  # type: ignore[union-attr]
    a, b, m = tensors
    moved = down.weight + 3 * 2**0.5 * b @ a
    scaled = (m / moved.norm(dim=1).detach())[:, None] * moved
    for made_TH in (mlp.project_back(x_TF, down), *mlp.project(x_TF, down)):
        torch.testing.assert_close(made_TH, x_TF @ scaled.t(), rtol=1e-12, atol=1e-12)
        onto = torch.randn(made_TH.shape, dtype=torch.float64)
        found = torch.autograd.grad((made_TH * onto).sum(), tensors)
        expected = torch.autograd.grad((x_TF @ scaled.t() * onto).sum(), tensors, retain_graph=True)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("magnitudes", [False, True])
def test_dropout_is_that_of_peft(magnitudes: bool) -> None:
    """With our mask in the place of its own, PEFT's layer and its gradients are ours."""
    peft = pytest.importorskip("peft")
    mlp = _mlp(replace(MODEL, use_dora=magnitudes, add_bias_linear=True))
    ours, ids_T = mlp.up_proj, torch.arange(5)
    drop = Dropout(1, 2, ids_T, ids_T, ids_T[None]).of_adapters("layers.0", ("up_proj",), 0.4)
    theirs = torch.nn.ModuleDict({"up": torch.nn.Linear(8, 12)}).double()
    named = {"r": 2, "lora_alpha": 6, "use_rslora": True, "target_modules": ["up"]}
    settings = peft.LoraConfig(**named, use_dora=magnitudes, lora_dropout=0.4)
    layer = peft.get_peft_model(theirs, settings, autocast_adapter_dtype=False).base_model.model.up
    layer.lora_dropout["default"].forward = drop["up_proj"].whole
    pairs = [
        (ours.weight, layer.base_layer.weight),
        (ours.bias, layer.base_layer.bias),
        (ours.lora_A.weight, layer.lora_A["default"].weight),  # type: ignore[union-attr]
        (ours.lora_B.weight, layer.lora_B["default"].weight),  # type: ignore[union-attr]
    ]
    if magnitudes:
        pairs.append((ours.lora_magnitude_vector, layer.lora_magnitude_vector["default"].weight))
    for mine, other in pairs:
        other.data.copy_(mine)
    x_TH = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    trained = [[x_TH, *(pair[side] for pair in pairs[2:])] for side in (0, 1)]
    onto = torch.randn(5, 12, dtype=torch.float64)
    expected = layer.train()(x_TH)
    gradients = torch.autograd.grad((expected * onto).sum(), trained[1])
    for made in (*mlp.project(x_TH, ours, drops=drop), mlp.project_back(x_TH, ours, drop)):
        torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
        found = torch.autograd.grad((made * onto).sum(), trained[0])
        torch.testing.assert_close(found, gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.exhaustive
def test_a_compiler_keeps_the_share() -> None:
    """Inductor of torch 2.13 loses `alpha` of a sum of two products."""
    mlp, x_TH = _mlp(replace(MODEL, use_dora=True)), torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(mlp)(x_TH), mlp(x_TH), rtol=1e-12, atol=1e-12)
