"""Rotary features that are paired otherwise in a file come in the model's order."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fivefold.config.huggingface.family import Tensors
from fivefold.config.huggingface.read import from_hf_config
from fivefold.config.huggingface.write import to_hf_config
from fivefold.convert.stored import stored_tensors
from fivefold.model.transformer import Stage
from tests.model.models import LLAMA, NEOX, QWEN, batch_of, build

WAYS: dict[str, dict[str, Any]] = {
    "three linears": {},
    "neighbours in files": {"pairs": True},
    "one, in turn": {"joint_qkv": "in_turn"},
    "one, by heads": {"joint_qkv": "by_head"},
}
MODELS = {
    "norms of heads": QWEN,
    "norms of all heads": replace(QWEN, qk_layernorm_type="all_heads"),
    "a share, biases": replace(NEOX, num_query_groups=2),
    "gates": replace(QWEN, attention_output_gate=True),
}


# No family has gates in a joint projection.
CASES = [
    (way, name)
    for way, tensors in WAYS.items()
    for name, model in MODELS.items()
    if not ("joint_qkv" in tensors and model.attention_output_gate)
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_either_order_of_rotary_features_is_read_from_any_file(name: str, way: str) -> None:
    """What one model would write, another reads, and computes the same."""
    halves, neighbours = (replace(MODELS[name], rotary_interleaved=each) for each in (False, True))
    one, other = build(halves), build(neighbours)
    theirs: dict[tuple[str, ...], torch.Tensor] = {}
    where = [stored_tensors(Tensors(**WAYS[way]), model) for model in (halves, neighbours)]
    values = dict(one.named_parameters())
    for our, place in where[0].items():
        value = values[our].detach()[: None if place.rows is None else len(place.rows)]
        held = theirs.setdefault(place.names, torch.zeros(place.their_shape).to(value))
        held[slice(None) if place.rows is None else place.rows] = value
    for our, parameter in other.named_parameters():
        place = where[1][our]
        read = theirs[place.names]
        own = parameter.data if place.rows is None else parameter.data[: len(place.rows)]
        own.copy_(read if place.rows is None else read[place.rows])
    losses = [_loss(stage) for stage in (one, other)]
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0)
    assert abs(_loss(_as(one, neighbours)) - losses[0]) > 1e-6


def _loss(stage: Stage) -> torch.Tensor:
    with torch.no_grad():
        return stage(None, batch_of(stage.model, [[5, 7], [12]]))


def _as(stage: Stage, model: Any) -> Stage:
    """The same weights, whose features are paired otherwise."""
    found = build(model)
    found.load_state_dict(stage.state_dict())
    return found


def test_a_model_of_neighbours_is_one_of_hugging_faces_whose_files_have_them_in_order() -> None:
    neighbours = replace(LLAMA, rotary_interleaved=True)
    fields = to_hf_config(neighbours)
    assert fields == to_hf_config(LLAMA)
    assert not from_hf_config(fields).rotary_interleaved
