from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.model.activations import Running, saved_activations, total
from fivefold.model.shape import WholeModel
from fivefold.model.transformer import Stage, TransformerLayer
from tests.model.models import FAMILIES, LLAMA, batch_of


def kept(model: ModelConfig, running: Running, layer: int = 0) -> float:
    return total(saved_activations(model, layer, running)).kept


@pytest.mark.parametrize(
    "model", [LLAMA, FAMILIES["qwen"], replace(LLAMA, hidden_dropout=0.1)], ids=["l", "q", "drop"]
)
def test_activation_bytes_are_what_a_layer_saves(model: ModelConfig) -> None:
    stage = Stage(model)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter)
    batch = batch_of(model, [[64]])
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def spy(layer: TransformerLayer, arguments: tuple) -> None:
        known.update(t.untyped_storage().data_ptr() for t in vars(arguments[1].rotary).values())

    known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
    for layer in stage.layers.values():
        layer.register_forward_pre_hook(spy)
    x = torch.randn(64, model.hidden_size, requires_grad=True)
    middle = Stage(model, WholeModel((0,), embedding=False, head=False))
    middle.layers["0"] = stage.layers["0"]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        middle(x, batch)
    measured = sum(
        t.untyped_storage().nbytes() for pointer, t in saved.items() if pointer not in known
    )
    predicted = 64 * kept(model, Running(64, element_bytes=4, input_bytes=4))
    scales_of_norms = 64 * 4 * (2 + (6 if model.qk_layernorm else 0))
    assert measured == predicted + scales_of_norms


def test_activation_bytes_follow_the_published_formula() -> None:
    model = PRESETS["llama3-8b"]
    h, a, k, d, f, t = 4096, 32, 8, 128, 14336, 8
    inside = 4 * d * (a + k) + 4 * a + 6 * f
    assert kept(model, Running(8192)) == 8 * h + inside
    assert kept(model, Running(8192, tensor_parallel=t)) == 8 * h + inside / t
    with_sp = Running(8192, tensor_parallel=t, sequence_parallel=True)
    assert kept(model, with_sp) == (8 * h + inside) / t
