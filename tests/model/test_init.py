from dataclasses import replace

import pytest
import torch

from fivefold.description.shape import parameter_shapes
from fivefold.model.init import init_slice, initialise
from fivefold.model.transformer import Stage
from tests.model.models import GPT, LLAMA

WHOLE = (slice(None), slice(None))


@pytest.mark.parametrize(
    "part",
    [
        (slice(0, 100), slice(None)),
        (slice(200, 600), slice(8, 24)),
        (slice(256, 512), slice(0, 1)),
        (slice(599, 600), slice(None)),
        (slice(300, 300), slice(None)),
    ],
)
def test_a_slice_equals_the_slice_of_the_whole(part: tuple[slice, slice]) -> None:
    name = "layers.2.mlp.up_proj.weight"
    whole = init_slice(name, (600, 32), WHOLE, LLAMA, seed=3)
    assert torch.equal(init_slice(name, (600, 32), part, LLAMA, seed=3), whole[part])


def test_names_seeds_and_blocks_differ() -> None:
    def make(name: str, seed: int) -> torch.Tensor:
        return init_slice(name, (512, 32), WHOLE, LLAMA, seed)

    values = make("layers.0.mlp.up_proj.weight", 1)
    assert not torch.equal(values, make("layers.1.mlp.up_proj.weight", 1))
    assert not torch.equal(values, make("layers.0.mlp.up_proj.weight", 2))
    assert not torch.equal(values[:256], values[256:])


def test_spread_of_weights_and_constants() -> None:
    def std(name: str) -> float:
        return init_slice(name, (512, 128), WHOLE, LLAMA, seed=1).std().item()

    expected = LLAMA.init_method_std
    assert std("layers.0.self_attn.q_proj.weight") == pytest.approx(expected, rel=0.02)
    scaled = expected / (2 * LLAMA.num_layers) ** 0.5
    assert std("layers.0.self_attn.o_proj.weight") == pytest.approx(scaled, rel=0.02)
    assert std("layers.2.mlp.down_proj.weight") == pytest.approx(scaled, rel=0.02)
    part = (slice(2, 6),)
    assert init_slice("norm.weight", (8,), part, LLAMA, 1).tolist() == [1.0] * 4
    assert init_slice("layers.0.self_attn.q_norm.weight", (8,), part, LLAMA, 1).tolist() == [1] * 4
    assert init_slice("norm.bias", (8,), part, LLAMA, 1).tolist() == [0.0] * 4


@pytest.mark.parametrize("untied", [False, True])
def test_embeddings_may_spread_otherwise(untied: bool) -> None:
    """Those of tokens, with every copy, and of positions; an output layer of its own does not."""
    plain = replace(LLAMA, untie_embeddings_and_output_weights=untied)
    model = replace(plain, embedding_init_method_std=64 * LLAMA.init_method_std)
    wide = {"embed_tokens.weight", "mtp_embed_tokens.weight", "embed_positions.weight"}
    wide |= set() if untied else {"lm_head.weight"}
    for name in wide | {"lm_head.weight", "layers.0.mlp.up_proj.weight"}:
        found, before = (init_slice(name, (512, 32), WHOLE, of, 1) for of in (model, plain))
        assert torch.equal(found, before * (64 if name in wide else 1))


def test_a_tied_output_weight_starts_as_the_embedding() -> None:
    shape = (128, 32)
    head = init_slice("lm_head.weight", shape, WHOLE, GPT, 1)
    assert torch.equal(head, init_slice("embed_tokens.weight", shape, WHOLE, GPT, 1))
    own = init_slice("lm_head.weight", shape, WHOLE, LLAMA, 1)
    assert not torch.equal(own, init_slice("embed_tokens.weight", shape, WHOLE, LLAMA, 1))


def test_the_type_is_a_cast_of_the_same_numbers() -> None:
    name = "layers.0.self_attn.q_proj.weight"
    wide = init_slice(name, (64, 32), WHOLE, LLAMA, 1, torch.float64)
    assert torch.equal(wide, init_slice(name, (64, 32), WHOLE, LLAMA, 1).double())
    narrow = init_slice(name, (64, 32), WHOLE, LLAMA, 1, torch.bfloat16)
    assert torch.equal(narrow, wide.bfloat16())


def test_initialise_gives_every_parameter_its_slice() -> None:
    stage = Stage(GPT)
    initialise(stage, seed=9)
    shapes = parameter_shapes(GPT)
    assert {name for name, _ in stage.named_parameters()} == set(shapes)
    for name, parameter in stage.named_parameters():
        whole = [slice(None)] * parameter.dim()
        assert torch.equal(parameter, init_slice(name, shapes[name], whole, GPT, 9))
