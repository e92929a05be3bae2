"""What lies beside weights on the hub goes along with them, unless it is of another tokenizer."""

import json
import shutil
from pathlib import Path

import pytest

from fivefold.config.sources import read_config, to_toml
from fivefold.data.tokenizer import Tokenizer
from fivefold.train.folder.convert import to_hub, to_run
from fivefold.train.folder.origin import Origin
from fivefold.train.folder.run_folder import CHECKPOINTS
from fivefold.train.folder.side_files import SIDE, keep_side_files
from tests.convert.test_huggingface import written

BESIDE = {
    "tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": "{{ messages }}"}),
    "generation_config.json": json.dumps({"eos_token_id": [7, 9], "temperature": 0.5}),
    "merges.txt": "a b",
    "configuration_own.py": "pass",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Hugging Face folder and a run of it."""
    folder = tmp_path_factory.mktemp("beside")
    written("llama", folder / "hub")
    Tokenizer.train(["the cat sat on the mat"], 260).save(folder / "hub" / "tokenizer.json")
    for name, text in BESIDE.items():
        (folder / "hub" / name).write_text(text)
    to_run(folder / "hub", folder / "run")
    return folder / "hub", folder / "run"


def test_all_comes_back_with_the_tokenizer_it_came_with(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    hub, run = made
    to_hub(run, tmp_path / "out", dtype="fp64")
    for name in (*BESIDE, "tokenizer.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (hub / name).read_bytes()


def test_a_run_with_another_tokenizer_gives_that_one(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    """And says which of its tokens end a text; the numbers of the old one mean others now."""
    shutil.copytree(made[1], tmp_path / "run")
    other = Tokenizer.train(["another text with other words"], 270)
    other.save(tmp_path / "run" / "tokenizer.json")
    to_hub(tmp_path / "run", tmp_path / "out")
    assert Tokenizer.load(tmp_path / "out").digest == other.digest
    assert not (tmp_path / "out" / "merges.txt").exists()
    assert (tmp_path / "out" / "configuration_own.py").exists()  # of the model
    for name in ("generation_config.json", "config.json"):
        said = json.loads((tmp_path / "out" / name).read_text())
        assert said["eos_token_id"] == other.eod_id
    assert "chat_template" not in (tmp_path / "out" / "tokenizer_config.json").read_text()


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("names_file", [False, True])
def test_a_template_beside_the_tokenizer_that_a_run_was_given_goes_along(
    made: tuple[Path, Path], tmp_path: Path, name: str, names_file: bool
) -> None:
    run, chat = tmp_path / "run", tmp_path / "chat"
    shutil.copytree(made[1], run)
    chat.mkdir()
    for folder in (run, chat):
        Tokenizer.train(["another text with other words"], 270).save(folder / "tokenizer.json")
    text = json.dumps({"bos_token": "<s>", "chat_template": "{{ messages }}"})
    (chat / name).write_text(text)
    given = chat / "tokenizer.json" if names_file else chat
    config = read_config(run / "config.toml").with_values(tokenizer_model=str(given))
    (run / "config.toml").write_text(to_toml(config))
    to_hub(run, tmp_path / "out")
    assert (tmp_path / "out" / name).read_text() == text
    assert (tmp_path / "out" / "tokenizer_config.json").is_file()


def test_a_run_that_starts_from_a_run_keeps_them(made: tuple[Path, Path], tmp_path: Path) -> None:
    """`fivefold convert HUB RUN`, `train --load RUN`, `convert` of that; and again when resumed."""
    hub, run = made
    beside = Origin(run / CHECKPOINTS, 0, weights_only=True).beside
    assert beside == run / SIDE
    keep_side_files(beside, tmp_path)
    kept = {file.name for file in (tmp_path / SIDE).iterdir()}
    assert kept == {*BESIDE, "tokenizer.json", "config.json"}
    keep_side_files(tmp_path / SIDE, tmp_path)
    assert Origin(hub, 0, weights_only=True, foreign=True).beside == hub
    assert Origin(tmp_path / "x" / CHECKPOINTS, 0, weights_only=True).beside is None
