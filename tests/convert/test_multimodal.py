"""Folders of multimodal models: their text models are read, and written as models of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.huggingface.write import text_model_fields
from fivefold.convert.hub import HubFolder
from fivefold.convert.load import model_in
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import CheckpointError
from fivefold.train.folder.convert import to_hub, to_run
from fivefold.train.folder.origin import find_origin
from tests.config.multimodal import TINY, multimodal
from tests.config.oracle import LENGTH, InFp64, oracle_logits
from tests.convert.test_huggingface import both_logits
from tests.verify.cases import chosen

_NAMES_OF_5 = (
    ("language_model.model.blocks.", "model.language_model.layers."),
    ("language_model.model.", "model.language_model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model.language_model."),  # Qwen3-VL has no others
    ("model.visual.", "model.visual."),
    *((f"model.{part}.",) * 2 for part in ("text_model", "vision_model", "connector")),  # SmolVLM
    *((f"model.{part}.",) * 2 for part in ("vision_tower", "embed_vision", "vision_embedder")),
    ("model.mm_projector.", "model.mm_projector."),  # Kimi K2.5
    ("model.", "model.language_model."),  # of Qwen2-VL
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
    ("visual.", "model.visual."),
    ("image_newline", "model.image_newline"),
)


def written(kind: str, folder: Path, **text: Any) -> Any:
    """transformers' model, saved as it saves models; returns the model."""
    fields = {"model_type": kind} | TINY[kind]
    model = multimodal(fields | {"text_config": fields["text_config"] | text})
    model.save_pretrained(folder)
    return model


def renamed(source: Path, target: Path) -> None:
    """The same folder with the names that the parts have in transformers 5."""
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    found = {}
    for name, tensor in tensors.items():
        pairs = (pair for pair in _NAMES_OF_5 if name.startswith(pair[0]))
        old, new = next(pairs, ("", ""))
        found[new + name.removeprefix(old)] = tensor
    save_file(found, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


@pytest.mark.parametrize("kind", TINY)
def test_logits_are_those_of_the_whole_model_in_either_spelling(kind: str, tmp_path: Path) -> None:
    theirs = written(kind, tmp_path / "old")
    renamed(tmp_path / "old", tmp_path / "new")
    for folder in (tmp_path / "old", tmp_path / "new"):
        torch.testing.assert_close(*both_logits(folder, theirs), rtol=1e-12, atol=1e-12)


def test_experts_are_read_as_published_and_as_transformers_5_saves_them(tmp_path: Path) -> None:
    """Qwen3-VL's are published transposed; where a matrix has one size twice, others tell."""
    for inner in (24, 16, 32):
        theirs = written("qwen3_vl_moe", tmp_path / f"new-{inner}", moe_intermediate_size=inner)
        tensors = load_file(tmp_path / f"new-{inner}" / "model.safetensors")
        for name, tensor in tensors.items():
            if ".experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()
        (tmp_path / f"old-{inner}").mkdir()
        save_file(tensors, tmp_path / f"old-{inner}" / "model.safetensors", {"format": "pt"})
        fields = (tmp_path / f"new-{inner}" / "config.json").read_bytes()
        (tmp_path / f"old-{inner}" / "config.json").write_bytes(fields)
        for age in ("new", "old"):
            both = both_logits(tmp_path / f"{age}-{inner}", theirs)
            torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)


# tests/config/test_multimodal.py has the config.json of all, and test_huggingface.py the tables by
# which weights are written.
@pytest.mark.parametrize("kind", chosen(TINY, *[*TINY][::3]))
def test_the_text_model_is_written_as_a_model_of_its_own(kind: str, tmp_path: Path) -> None:
    """With the settings of its own family, of which transformers makes the same model."""
    from transformers import AutoModelForCausalLM

    theirs = written(kind, tmp_path / "hub").eval()
    to_run(tmp_path / "hub", tmp_path / "run")
    to_hub(tmp_path / "run", tmp_path / "out", dtype="fp64")
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = text_model_fields(json.loads((tmp_path / "hub" / "config.json").read_text()))
    assert {**fields, "dtype": None} == {**expected, "dtype": None}
    with InFp64():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    again.config._experts_implementation = "eager"
    tokens = torch.arange(LENGTH)[None] % 90
    torch.testing.assert_close(
        oracle_logits(again, tokens), oracle_logits(theirs, tokens), rtol=1e-12, atol=1e-12
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Gemma 3 with a tokenizer."""
    folder = tmp_path_factory.mktemp("gemma3") / "hub"
    written("gemma3", folder, vocab_size=300)
    Tokenizer.train(["the cat sat on the mat"], 260).save(folder / "tokenizer.json")
    return folder


LEFT_OUT = (
    "multi_modal_projector (2 tensors, 528 parameters), vision_tower (37 tensors, 6,576 parameters)"
)


def test_commands_say_what_is_left_out(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub, run, out = str(made), str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["convert", hub, run]) == 0
    assert f"the text model of {hub}; left out: {LEFT_OUT}" in capsys.readouterr().out
    assert main(["sample", run, "the cat", "--max-tokens", "2"]) == 0
    assert main(["convert", run, out]) == 0
    said = capsys.readouterr().out
    assert "the text model alone of the gemma3 model that the run began with" in said
    asked = ["--global-batch-size", "8", "--seq-length", "32"]
    assert main(["plan", hub, "--gpus", "1", *asked]) == 0
    noted = f"{hub} is a gemma3 model, of which the text model (gemma3_text) is read"
    assert noted in capsys.readouterr().err
    train = ["train", "debug", "--model", hub, "--load", hub, *asked, "--train-iters", "1"]
    tokenizer, save = str(made / "tokenizer.json"), str(tmp_path / "trained")
    train += ["--lr-warmup-iters", "0", "--tokenizer-model", tokenizer, "--save", save]
    assert main(train) == 0
    said = capsys.readouterr()
    assert f"left out of {hub}: {LEFT_OUT}" in said.out and noted in said.err
    assert main(["convert", save, str(tmp_path / "again")]) == 0
    one, two = (Path(at) / "config.json" for at in (out, tmp_path / "again"))
    first, second = (json.loads(file.read_text()) for file in (one, two))
    assert first | {"dtype": None} == second | {"dtype": None}


def test_a_run_of_a_run_knows_where_its_weights_come_from(made: Path, tmp_path: Path) -> None:
    to_run(made, tmp_path / "run")
    kept = tmp_path / "run" / "huggingface"
    assert json.loads((kept / "multimodal_config.json").read_text())["model_type"] == "gemma3"
    assert json.loads((kept / "config.json").read_text())["model_type"] == "gemma3_text"
    to_hub(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / "multimodal_config.json").exists()


def test_no_tensor_is_left_out_that_is_of_no_known_part(made: Path, tmp_path: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    extra = {"speech_tower.norm.weight": torch.ones(3)}
    twice = {"model.language_model.norm.weight": torch.ones(32, dtype=torch.float64)}
    for message, more in {"the model has not": extra, "norm.weight twice": twice}.items():
        folder = tmp_path / message.replace(" ", "-")
        folder.mkdir()
        save_file(tensors | more, folder / "model.safetensors")
        (folder / "config.json").write_bytes((made / "config.json").read_bytes())
        with pytest.raises(CheckpointError, match=message):
            to_run(folder, tmp_path / "never")
        with pytest.raises(CheckpointError, match=message):
            find_origin(
                Config(model_in(HubFolder(made))).with_values(load=str(folder)), tmp_path / "run"
            )


@pytest.mark.parametrize("kind", ["mistral3", "gemma3"])
def test_a_tie_that_the_weights_do_not_bear_out_is_named(kind: str, tmp_path: Path) -> None:
    """Of which versions 4 and 5 of transformers ask the text model and the whole one."""
    written(kind, tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    fields = json.loads(file.read_text())
    tied = bool(fields["tie_word_embeddings"])
    file.write_text(json.dumps(fields | {"tie_word_embeddings": not tied}))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        to_run(tmp_path / "hub", tmp_path / "run")
