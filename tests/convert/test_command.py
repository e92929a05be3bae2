"""`fivefold convert`: what is refused before anything is written; the docs run what works."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from fivefold.cli.main import main
from fivefold.config.huggingface import from_hf_config
from fivefold.config.huggingface.write import differences, to_hf_config
from fivefold.config.presets import PRESETS
from fivefold.config.sources import read_config, recipe_names
from fivefold.errors import CheckpointError, ConfigError
from fivefold.train.folder.convert import _finished


def test_mistakes_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["convert", str(tmp_path), str(tmp_path), "--dtype", "bf16", "--step", "3"]
    words += ["--max-shard-size", "9"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "--dtype applies to a run folder" in said and "--step applies to a run folder" in said
    assert "--max-shard-size applies to a run folder" in said
    assert "exists already" in said


def test_a_source_that_is_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "is not a run folder" in capsys.readouterr().err


@pytest.mark.parametrize("with_base", [False, True])
@pytest.mark.parametrize("verb", ["convert", "train"])
def test_an_adapter_is_not_taken_for_weights(
    verb: str, with_base: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").touch()
    if with_base:
        (tmp_path / "config.json").write_text("{}")
    out = str(tmp_path / "out")
    words = ["convert", str(tmp_path), out]
    if verb == "train":
        words = ["train", "debug", "--load", str(tmp_path), "--save", out]
    assert main(words) != 0
    said = capsys.readouterr().err
    if verb == "train":
        assert "holds an adapter of PEFT (LORA)" in said
        assert f"--load BASE --load-adapter {tmp_path}" in said
    else:
        assert "adapter_config.json needs a whole number for 'r'" in said


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_written_or_refused_with_what_differs(name: str) -> None:
    model = PRESETS[name]
    try:
        fields = to_hf_config(model)
    except ConfigError as error:
        assert "nearest: " in str(error) and ", there " in str(error)
    else:
        assert not differences(model, from_hf_config(fields))


def test_what_differs_is_told_in_words_of_settings() -> None:
    models = [*PRESETS.values()]
    lines = [line for one, two in pairwise(models) for line in differences(one, two)]
    assert len(lines) > len(models)
    assert not [line for line in lines if re.search(r"\b(None|True|False)\b", line)]


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_shipped_recipe_trains_can_be_written(name: str) -> None:
    model = read_config(name).model
    assert not differences(model, from_hf_config(to_hf_config(model)))


@pytest.mark.parametrize("name", PRESETS)
def test_a_width_that_no_layer_has_makes_no_other_model(name: str) -> None:
    model = PRESETS[name]
    wider = replace(model.spelt_out(), ffn_hidden_size=2 * model.ffn_size)
    assert bool(differences(model, wider)) == model.has_dense_layers


def test_a_target_that_cannot_be_made_is_one_message() -> None:
    said = pytest.raises(CheckpointError, match="cannot write /dev/null/x: ")
    with said, _finished(Path("/dev/null/x")):
        pass
