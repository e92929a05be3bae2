"""Adapters alone, without a model around them."""

import torch

from fivefold.config.model import ModelConfig
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


def _mlp() -> MLP:
    mlp = MLP(MODEL, 12)
    add_adapters(mlp, MODEL)
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


def test_a_compiler_keeps_the_share() -> None:
    """Inductor of torch 2.13 loses `alpha` of a sum of two products."""
    mlp, x_TH = _mlp(), torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(mlp)(x_TH), mlp(x_TH), rtol=1e-12, atol=1e-12)
