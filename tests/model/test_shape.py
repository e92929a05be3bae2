from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS
from fivefold.model.attention import plain_attention
from fivefold.model.shape import (
    WholeModel,
    count_parameters,
    forward_flops,
    parameter_shapes,
    training_flops,
)
from fivefold.model.transformer import Stage
from tests.model.models import FAMILIES, GPT, LLAMA, batch_of

PARTS = {
    "whole": None,
    "first": WholeModel((0, 1), head=False),
    "middle": WholeModel((1,), embedding=False, head=False),
    "last": WholeModel((2,), embedding=False),
    "ends": WholeModel(()),
}
MODELS = FAMILIES | {"tied": replace(LLAMA, untie_embeddings_and_output_weights=False)}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_are_those_of_the_modules(model: ModelConfig, parts: WholeModel | None) -> None:
    with torch.device("meta"):
        stage = Stage(model, parts)
    actual = {name: tuple(p.shape) for name, p in stage.named_parameters()}
    assert parameter_shapes(model, parts) == actual
    total = sum(p.numel() for p in stage.parameters())
    assert count_parameters(model, parts).total == total


def test_large_presets_are_counted_as_built() -> None:
    with torch.device("meta"):
        built = Stage(PRESETS["llama3-405b"])
    counted = count_parameters(PRESETS["llama3-405b"])
    assert counted.total == sum(p.numel() for p in built.parameters())


def test_padding_is_counted_once_per_vocabulary_matrix() -> None:
    padding = (128 - 100) * 32
    for model, matrices in ((LLAMA, 2), (GPT, 1)):
        padded = count_parameters(model).total
        assert padded - count_parameters(model, padded=False).total == matrices * padding


@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_flops_are_those_that_pytorch_counts(model: ModelConfig) -> None:
    stage = Stage(model)
    for parameter in stage.parameters():
        torch.nn.init.normal_(parameter)
    for layer in stage.layers.values():
        layer.self_attn.kernel = plain_attention  # two matrix products, which the counter sees
    batch = batch_of(model, [[16], [16]])
    with FlopCounterMode(display=False) as forward:
        loss = stage(None, batch)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    tokens = batch.tokens.numel()
    assert forward.get_total_flops() == tokens * forward_flops(model, 16, causal=False).total
    both = forward.get_total_flops() + backward.get_total_flops()
    assert both == tokens * training_flops(model, 16, causal=False).total


def test_flops_of_stages_add_up_and_causal_attention_is_half() -> None:
    cuts = [WholeModel((0, 1), head=False), WholeModel((2,), embedding=False)]
    whole = training_flops(LLAMA, 64)
    assert sum(training_flops(LLAMA, 64, parts).total for parts in cuts) == whole.total
    assert 2 * whole.attention == training_flops(LLAMA, 64, causal=False).attention


def test_training_flops_of_a_published_model() -> None:
    flops = training_flops(PRESETS["llama3-8b"], 8192)
    assert flops.matmul == 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert flops.attention == 32 * 3 * 8192 * 32 * 256
