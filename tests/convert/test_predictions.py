"""Further predictions of a hybrid model, in the files in which Nemotron 3 is published."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fivefold.config.huggingface import from_hf_config
from fivefold.convert.hub import HubFolder
from fivefold.convert.load import model_in
from fivefold.train.folder.convert import to_hub, to_run
from tests.convert.test_huggingface import our_stage, tensors_of, written

OF_MIXERS = {"*": 4, "E": 2}
"""Layers of the tiny model with these mixers, whose shapes those of predictions have."""


def published(folder: Path, predictions: int) -> dict[str, Tensor]:
    """A tiny model with predictions of an attention and experts each; what is of these."""
    written("nemotron_h", folder, torch.bfloat16)
    tensors = tensors_of(folder)
    hidden = len(tensors["backbone.norm_f.weight"])
    drawn = torch.Generator().manual_seed(3)
    shapes: dict[str, torch.Size] = {}
    for prediction in range(predictions):
        first, last = (f"mtp.layers.{2 * prediction + place}." for place in (0, 1))
        for before, mixer in ((first, "*"), (last, "E")):
            start = f"backbone.layers.{OF_MIXERS[mixer]}."
            own = {name: each.shape for name, each in tensors.items() if name.startswith(start)}
            shapes |= {before + name.removeprefix(start): each for name, each in own.items()}
        shapes |= {f"{first}{norm}.weight": torch.Size([hidden]) for norm in ("enorm", "hnorm")}
        shapes[f"{first}eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
        shapes[f"{last}final_layernorm.weight"] = torch.Size([hidden])
    further = {
        name: torch.randn(shape, generator=drawn).to(
            torch.float32 if "score_correction" in name else torch.bfloat16
        )
        for name, shape in shapes.items()
    }
    save_file(tensors | further, folder / "model.safetensors")
    file = folder / "config.json"
    fields = json.loads(file.read_text()) | {"num_nextn_predict_layers": predictions}
    file.write_text(json.dumps(fields | {"mtp_layers_block_type": ["full_attention", "moe"]}))
    return further


@pytest.mark.parametrize("predictions", [1, 2])
def test_predictions_come_in_and_go_out_to_the_byte(predictions: int, tmp_path: Path) -> None:
    further = published(tmp_path / "hub", predictions)
    assert from_hf_config(tmp_path / "hub").mtp_hybrid_override_pattern == "*E"
    _, stage = our_stage(tmp_path / "hub")
    own = dict(stage.named_parameters()) | dict(stage.named_buffers())
    last = f"mtp.layers.{2 * predictions - 1}."
    there = {
        f"mtp.{predictions - 1}.norm.weight": f"{last}final_layernorm.weight",
        "mtp.0.enorm.weight": "mtp.layers.0.enorm.weight",
        "mtp.0.hnorm.weight": "mtp.layers.0.hnorm.weight",
        "mtp.0.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
        "mtp.0.layer.0.input_layernorm.weight": "mtp.layers.0.norm.weight",
        "mtp.0.layer.0.self_attn.q_proj.weight": "mtp.layers.0.mixer.q_proj.weight",
        "mtp.0.layer.1.post_attention_layernorm.weight": "mtp.layers.1.norm.weight",
        "mtp.0.layer.1.mlp.router.weight": "mtp.layers.1.mixer.gate.weight",
        f"mtp.{predictions - 1}.layer.1.mlp.router.expert_bias": (
            f"{last}mixer.gate.e_score_correction_bias"
        ),
    }
    for ours, theirs in there.items():
        assert torch.equal(own[ours], further[theirs].double()), ours
    experts = own["mtp.0.layer.1.mlp.experts.up_proj.weight"]
    assert torch.equal(experts[1], further["mtp.layers.1.mixer.experts.1.up_proj.weight"].double())
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "again")
    before, after = tensors_of(tmp_path / "hub"), tensors_of(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_folder_without_them_makes_no_predictions(tmp_path: Path) -> None:
    """transformers loads and saves none of them, and its config.json goes on promising them."""
    published(tmp_path, 1)
    tensors = {n: each for n, each in tensors_of(tmp_path).items() if not n.startswith("mtp.")}
    save_file(tensors, tmp_path / "model.safetensors")
    assert from_hf_config(tmp_path).mtp_num_layers == 1
    assert model_in(HubFolder(tmp_path)) == from_hf_config(tmp_path).without_predictions
