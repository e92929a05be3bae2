"""Losses of validation sets: those of the plain model by every layout, and where a run has them."""

import json
import math
import re
import shutil
import subprocess
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.export_cases import changed
from fivefold.check import check
from fivefold.cli import eval as command
from fivefold.cli.eval import run as evaluate
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.settings import settings_of
from fivefold.config.sources import read_config, to_toml
from fivefold.config.training import TrainingConfig
from fivefold.data.packing import IGNORED
from fivefold.data.tokenizer import Tokenizer
from fivefold.data.validation import validation_sets
from fivefold.errors import CheckpointError, ConfigError
from fivefold.files import parse_json
from fivefold.inference.eval import evaluate_rank
from fivefold.model.init import initialise
from fivefold.report.charts import charts_of
from fivefold.report.facts import facts
from fivefold.report.history import read_history
from fivefold.train.corpora import open_data
from fivefold.train.engine import Engine
from fivefold.train.evaluation import evaluations
from fivefold.train.folder.run_folder import CHECKPOINTS
from fivefold.train.metrics import EvalMetrics
from fivefold.verify.reference import batches_of, plain_model
from tests import programs
from tests.pool import run

pytestmark = pytest.mark.slow

LENGTH = 32
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "debug", {}),
    (2, "debug", {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (2, "debug", {"context_parallel_size": 2}),
    (2, "debug", {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
    (4, "debug-mixtral", {"expert_model_parallel_size": 2, **SPLIT}),
]
"""The last of 3 batches of the set of 17 samples holds one, so that most ranks only fill it."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of data: documents of uneven length, some of a single word."""
    folder = tmp_path_factory.mktemp("sets")
    words = [f"line {n} says {n * n % 97}. " * (1 + n * 7 % 23) for n in range(120)]
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{w}"}}\n' for w in words))
    (folder / "odd.jsonl").write_text("".join(f'{{"text": "{w[:9]}"}}\n' for w in words))
    (folder / "one.txt").write_text("one document that says a little more than others do. " * 9)
    return {
        "data_path": (f"{folder}/text.jsonl",),
        "valid_data_path": (f"odd={folder}/odd.jsonl", f"one={folder}/one.txt"),
        "data_cache_path": f"{folder}/cache",
        "tokenizer_vocab_size": 300,
        "split": "9,1",
    }


def _config(recipe: str, corpora: dict[str, Any], **settings: Any) -> Config:
    values = {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": LENGTH}
    values |= {"precision": "fp64", "eval_interval": 1, "eval_iters": 1, "num_layers": 2}
    return read_config(recipe, **values | corpora | settings)


def _measured(rank: int, world: int, config: Config) -> list[tuple[str, float, int]]:
    engine = Engine(check(config, world), rank, torch.device("cpu"))
    sets = validation_sets(config.training, open_data(config, lambda _: None))
    return [(each.name, each.loss, each.tokens) for each in evaluations(engine, sets, 0)]


def _expected(config: Config) -> list[tuple[str, float, int]]:
    """Each sample alone through the plain model."""
    model = plain_model(config, torch.float64).eval()
    initialise(model, config.training.seed)
    found = []
    for each in validation_sets(config.training, open_data(config, lambda _: None)):
        samples = [each.dataset.microbatch([n]) for n in range(each.samples)]
        with torch.no_grad():
            losses = [model(None, batch, None).sum() for batch in batches_of(config, samples, 0)]
        tokens = sum(int((sample.labels_BS != IGNORED).sum()) for sample in samples)
        found.append((each.name, float(sum(losses)) / tokens, tokens))
    return found


# Parameters and stages that are split have here the losses that one device has, see below.
@pytest.mark.parametrize(
    ("world", "recipe", "settings"),
    [
        pytest.param(*of, marks=pytest.mark.exhaustive) if of in (LAYOUTS[1], LAYOUTS[3]) else of
        for of in LAYOUTS
    ],
)
@pytest.mark.parametrize(
    "whole",
    [
        {"full_validation": True, "eval_iters": 4},
        pytest.param({}, marks=pytest.mark.exhaustive),
    ],
)
def test_every_layout_has_the_losses_of_the_plain_model(
    world: int, recipe: str, settings: dict[str, Any], whole: Any, corpora: dict[str, Any]
) -> None:
    config = _config(recipe, corpora, **settings | whole)
    if not whole:
        config = config.with_values(valid_data_path=corpora["valid_data_path"][:1])
    expected = _expected(config)
    assert [name for name, *_ in expected] == ["", "odd", "one"][: len(expected)]
    for measured in run(world, _measured, config):
        for (name, loss, tokens), (its, its_loss, its_tokens) in zip(
            measured, expected, strict=True
        ):
            assert (name, tokens) == (its, its_tokens)
            assert loss == pytest.approx(its_loss, rel=1e-12)


@pytest.fixture(scope="module")
def trained(corpora: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run with three sets, one of which is read in part, and what it said."""
    folder = tmp_path_factory.mktemp("runs")
    config = _config("debug", corpora, train_iters=2, eval_interval=2, lr_warmup_iters=0)
    config = config.with_values(save=f"{folder}/run", full_validation=True, eval_iters=4)
    (folder / "run.toml").write_text(to_toml(config))
    with redirect_stdout(StringIO()) as out:
        assert main(["train", f"{folder}/run.toml"]) == 0
    return folder / "run", out.getvalue()


def _losses(run: Path) -> dict[str, float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {key: r[key] for r in records for key in r if key.startswith("eval_loss")}


def test_a_run_shows_the_losses_of_each_set(trained: tuple[Path, str]) -> None:
    folder, said = trained
    found = _losses(folder)
    assert [*found] == ["eval_loss", "eval_loss_odd", "eval_loss_one"]
    for key, loss in found.items():
        of = key.removeprefix("eval_loss").replace("_", " of ")
        assert f"step 2: validation loss{of} {loss:.4f}" in said
    history = read_history(folder)
    names = {line.name for chart in charts_of([history]) for line in chart.lines}
    assert {"validation", "validation odd", "validation one"} <= names
    rows = {row[0] for row in facts([history])}
    assert {"lowest validation loss odd", "lowest validation loss one"} <= rows


def _loaded(rank: int, world: int, config: Config, run: Path) -> list[float]:
    engine = Engine(check(config, world), rank, torch.device("cpu"), initialises=False)
    sets = validation_sets(config.training, open_data(config, lambda _: None))
    return [found.loss for found in evaluate_rank(engine, (run / CHECKPOINTS, 2), sets)]


@pytest.mark.parametrize(("world", "recipe", "settings"), LAYOUTS[:2] + LAYOUTS[3:4])
def test_a_checkpoint_has_in_every_layout_the_losses_that_its_run_had(
    world: int, recipe: str, settings: dict[str, Any], trained: tuple[Path, str]
) -> None:
    config = read_config(trained[0] / "config.toml", data_parallel_shard_size=-1, **settings)
    exact = 0.0 if world == 1 else 1e-12
    for losses in run(world, _loaded, config, trained[0]):
        assert losses == pytest.approx([*_losses(trained[0]).values()], rel=exact, abs=0.0)


def _fivefold(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, from which ranks can be forked."""
    return programs.run(words)


def test_eval_says_losses_first_and_the_next_command_last(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    """On two ranks, with sets of its own and no corpus of the run in sight."""
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    text = "A document \u00e9 \u4e16\u754c of its own says 1 and 2.\n" * 40
    (tmp_path / "new.txt").write_text(text)
    settings = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(
        re.sub("(?m)^data_path.*", 'data_path = ["gone"]', settings)
    )
    words = ["eval", str(folder), "--valid-data-path", f"new={tmp_path}/new.txt", "--split", "1"]
    found = _fivefold(*words, "--nproc", "2", "--tp", "2", "--json")
    assert found.returncode == 0, found.stderr
    (new,) = json.loads(found.stdout)["sets"]
    assert new["name"] == "new" and new["perplexity"] == pytest.approx(math.exp(new["loss"]))
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    tokens = [*tokenizer.encode_batch([text])[0], tokenizer.eod_id]
    read = tokens[1 : new["samples"] * LENGTH + 1]  # what is predicted
    assert new["tokens"] == len(read) and len(tokens) - len(read) <= LENGTH
    told = len(tokenizer.decode(n for n in read if n != tokenizer.eod_id).encode())
    assert new["bytes"] == told
    bits = new["loss"] * new["tokens"] / math.log(2)
    assert new["bits_per_byte"] == pytest.approx(bits / told)

    said = _fivefold(*words)
    first, *_, last = said.stdout.splitlines()
    assert first.split()[:3] == ["new", "loss", f"{new['loss']:.4f}"]
    assert last == f"  next: fivefold sample {folder} PROMPT"


def _diverged(run: str) -> int:
    found = [EvalMetrics(2, loss, 9, 1.0, name) for loss, name in zip(NOT_TOLD, SETS, strict=True)]
    with patch("fivefold.inference.eval.evaluate_rank", lambda *_: found):
        return main(["eval", run, "--json"])


SETS, NOT_TOLD = ("", "odd", "one"), (math.nan, math.inf, 1e4)


def test_losses_that_are_no_numbers_are_told(trained: tuple[Path, str]) -> None:
    process = programs.Program(_diverged, str(trained[0]))
    out, errors = process.communicate(100)
    assert process.returncode == 0, errors
    sets = parse_json(out, dict[str, Any], "what it said")["sets"]  # whose NaN is no JSON
    assert [each["name"] for each in sets] == [None, "odd", "one"]
    assert [each["loss"] for each in sets] == [None, None, 1e4]
    assert {each["perplexity"] for each in sets} == {None}


def test_samples_that_are_read_again_are_said(trained: tuple[Path, str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained[0], folder)
    settings = re.sub(
        "(?m)^valid_data_path.*", "valid_data_path = []", (folder / "config.toml").read_text()
    )
    (folder / "config.toml").write_text(settings)
    part = "--step 2 --no-full-validation --eval-iters 3 --gbs 16"
    said = [_fivefold("eval", str(folder), *f.split()) for f in ("--full-validation", part)]
    assert ["some of them again" in each.stderr for each in said] == [False, True]
    last = said[1].stdout.splitlines()[-1]  # of the same checkpoint and batches
    whole = "--step 2 --global-batch-size 16 --full-validation"
    assert last == f"  next: fivefold eval {folder} {whole}"


def test_a_launcher_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1" if "RANK" in name else "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1234")
    with pytest.raises(ConfigError, match="torchrun has started ranks"):
        evaluate(["anything"])


def test_label_smoothing_is_left_out_and_said(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (trained[0] / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(
        text.replace("label_smoothing = 0.0", "label_smoothing = 0.1")
    )
    assert main(["eval", str(tmp_path), "--nproc", "3"]) == 2
    assert "label_smoothing of the run is left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--step 7", "works: --step 2"),
        ("--eval-iters 0 --no-full-validation", "works: --eval-iters 4 | --full-validation"),
        ("--eval-iters -1 --no-full-validation", "eval_iters = -1 evaluates nothing"),
        ("--nproc 3", "works: --global-batch-size 6 | --global-batch-size 9"),
        ("--lr 1", "unknown flag --lr"),
        ("--limit 2", "--limit has no effect: it is for tasks"),
        ("--tasks x --tp 2", "--tensor-model-parallel-size has no effect with --tasks"),
        ("--tasks x --limit 0", "limit must be at least 1, not 0"),
    ],
)
def test_what_cannot_be_evaluated_is_told_before_a_process_starts(
    flags: str, said: str, trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(trained[0]), *flags.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--global-batch-size", "4"], ["--nproc", "8"]])
def test_a_batch_that_grew_in_training_is_none_of_an_evaluation(
    flags: list[str], tmp_path: Path
) -> None:
    grown = {"train_samples": 400, "rampup_batch_size": (4, 4, 100), "global_batch_size": 8}
    grown |= {"train_iters": TrainingConfig.train_iters, "lr_warmup_iters": 0}
    config = check(read_config("debug", **grown), 1).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    with pytest.raises(CheckpointError, match="there is no checkpoint"):  # all else is right
        evaluate([str(tmp_path), *flags])


@pytest.mark.parametrize("name", ["optimizer", *(s.name for s in settings_of(TrainingConfig))])
def test_one_device_evaluates_what_was_trained_with_any_setting(name: str, tmp_path: Path) -> None:
    trained = changed(name)[1].config
    with patch("fivefold.cli.eval.run_config", lambda _: trained):
        evaluated = command._config(command.Options(run=str(tmp_path)))
    assert check(evaluated, 1, planned=True).config.model == trained.model


def test_text_that_is_where_the_run_was_started_is_found_from_there(
    trained: tuple[Path, str],
    corpora: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (text,), folder = corpora["data_path"], tmp_path / "where it began"
    shutil.copytree(trained[0], folder / "run")
    shutil.copy(text, folder)
    config, starts = folder / "run/config.toml", folder / "run/environment.json"
    config.write_text(config.read_text().replace(f'"{text}"', f'"{Path(text).name}"'))
    starts.write_text(
        json.dumps([entry | {"folder": str(folder)} for entry in json.loads(starts.read_text())])
    )
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / Path(text).name).write_text('{"text": "of the same name"}\n' * 50)
    monkeypatch.chdir(elsewhere)
    command = ["eval", "../where it began/run"]
    assert main(command) == 0
    out, said = capsys.readouterr()
    assert "next: fivefold" in out and "the text is not" not in said
    with (folder / "text.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    assert main(command) == 0
    assert "the text is not what it was when the run was trained" in capsys.readouterr().err
    (folder / "text.jsonl").unlink()
    assert main(command) == 0  # what a copied run has beside it
    assert "the text is not what it was when the run was trained" in capsys.readouterr().err
    (elsewhere / "text.jsonl").unlink()
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "no such file or folder: text.jsonl" in said and "--data-path" not in said


def test_numbers_without_an_end_are_not_to_be_read_whole(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (trained[0] / "config.toml").read_text()
    for name in ("data_path", "valid_data_path"):
        text = re.sub(rf"^{name} = .*$", "", text, flags=re.M)
    text = text.replace("[data]", '[data]\ndata_path = ["mock"]')
    (tmp_path / "config.toml").write_text(text.replace("full_validation = true", ""))
    assert main(["eval", str(tmp_path), "--eval-iters", "0"]) == 2
    assert capsys.readouterr().err.endswith("works: --eval-iters 4\n")


def test_a_run_without_a_tokenizer_says_what_it_lacks(
    trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained[0], run)
    (run / "tokenizer.json").unlink()
    for words in (["eval", str(run)], ["sample", str(run), "text"]):
        assert main(words) == 2
        said = capsys.readouterr().err
        assert "has no tokenizer.json, which turns text into tokens" in said
        assert "--tokenizer-model" not in said  # which neither command has
