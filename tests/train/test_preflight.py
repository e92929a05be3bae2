"""What is checked and settled before anything starts."""

import json

import pytest

from fivefold.cli.main import main
from fivefold.config.config import SETTINGS, Config
from fivefold.config.huggingface.write import to_hf_config
from fivefold.config.presets import PRESETS
from fivefold.config.settings import flag_of
from fivefold.errors import ConfigError
from fivefold.train.folder.homes import with_home_folders
from fivefold.train.folder.preflight import check_start

OPENED_BY_DATA = ("data_path", "data_cache_path", "tokenizer_model")
FOLDERS = [name for name, each in SETTINGS.items() if each.kind is str and "folder" in each.help]


@pytest.mark.parametrize("name", sorted({*FOLDERS} - {*OPENED_BY_DATA}))
def test_a_folder_may_begin_at_home(name, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    for given, found in (
        ("~/x y", "/home/ada/x y"),
        ("~", "/home/ada"),
        ("x/~/y", "x/~/y"),
        ("", ""),
    ):
        config = with_home_folders(Config(PRESETS["debug-llama"]).with_values(**{name: given}))
        settled = vars(config.checkpoint) | vars(config.memory)
        assert settled[name] == found
    nobody = Config(PRESETS["debug-llama"]).with_values(**{name: "~nobody-of-this-name/x"})
    with pytest.raises(ConfigError, match="knows no home ~nobody-of-this-name"):
        with_home_folders(nobody)


@pytest.mark.parametrize("name", sorted({*FOLDERS} - {*OPENED_BY_DATA, "load", "load_adapter"}))
def test_a_folder_that_will_be_written_is_looked_at_before_anything_starts(name, tmp_path):
    (tmp_path / "file").touch()
    values = {"non_persistent_save_interval": 5, "non_persistent_local_ckpt_dir": str(tmp_path)}
    values |= {name: str(tmp_path / "file" / "x")}
    why = rf"^{name} = \S+: \S+file is not a folder\n  try:   another {flag_of(name)}$"
    with pytest.raises(ConfigError, match=why):
        check_start(Config(PRESETS["debug-llama"]).with_values(**values))


def test_a_recipe_may_name_home(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    fields = to_hf_config(PRESETS["debug-llama"])
    (tmp_path / "hf/config.json").write_text(json.dumps(fields))
    text = '[model]\npreset = "~/hf"\n[checkpoint]\nsave = "~/runs/mine"\nload = "~/hf"\n'
    (tmp_path / "mine.toml").write_text(text)
    for argv in (["~/mine.toml"], ["mine.toml", "--save=~/runs/mine"]):
        assert main(["train", *argv, "--dry-run"]) == 0
        said = capsys.readouterr().out
        assert f'save = "{tmp_path}/runs/mine"' in said
        assert f'load = "{tmp_path}/hf"' in said


def test_a_run_that_goes_on_cannot_go_back(tmp_path, monkeypatch, capsys):
    """It would go on from its latest checkpoint, as after a failure, whatever is asked for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    steps = ["--train-iters", "9", "--save-interval", "3", "--keep-latest-k", "none", "--mock-data"]
    small = ["--num-layers", "1", "--global-batch-size", "2", "--seq-length", "16"]
    again = ["train", "debug", *steps, *small]
    (tmp_path / "link").symlink_to("run")
    assert main([*again, "--save", "run", "--train-iters", "6"]) == 0
    before = sorted((tmp_path / "run").rglob("*"))
    for load in ("run", "run/", "./run/checkpoints", "~/run", "link"):
        back = [*again, f"--load={load}", "--ckpt-step", "3"]
        capsys.readouterr()
        assert main([*back, "--save", "run"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ckpt_step 3 has no effect: run goes on from its own latest")
        for offer in said.partition("works: ")[2].strip().split(" | "):
            assert main([*back, "--save", "run", *offer.split(), "--dry-run"]) == 0
        assert sorted((tmp_path / "run").rglob("*")) == before
    first, second = said.partition("works: ")[2].strip().split(" | ")
    assert main([*back, "--save", "run", *first.split()]) == 0
    metrics = (tmp_path / "run-step-3" / "metrics.jsonl").read_text()
    assert metrics.startswith('{"step": 4,')
    assert main([*back, "--save", "run", *first.split()]) == 0, "the same command goes on there"
    assert main([*back, "--save", "run", *second.split()]) == 0
