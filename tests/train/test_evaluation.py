"""Losses of validation sets: those of the plain model by every layout, and where a run has them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.sources import read_config, to_toml
from fivefold.data.packing import IGNORED
from fivefold.data.validation import validation_sets
from fivefold.model.init import initialise
from fivefold.report.charts import charts_of
from fivefold.report.facts import facts
from fivefold.report.story import read_story
from fivefold.train.corpora import open_data
from fivefold.train.engine import Engine
from fivefold.train.evaluation import evaluations
from fivefold.verify.reference import batches_of, plain_model
from tests.pool import run

pytestmark = pytest.mark.slow

LENGTH = 32
SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (1, "debug", {}),
    (4, "debug", {"data_parallel_sharding_strategy": "optim_grads_params"}),
    (4, "debug", {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
    (4, "debug", {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
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
    values |= {"precision": "fp64", "eval_interval": 1, "eval_iters": 1}
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
        count = each.end or each.batches * config.training.global_batch_size
        samples = [each.dataset.microbatch([n]) for n in range(count)]
        with torch.no_grad():
            losses = [model(None, batch, None).sum() for batch in batches_of(config, samples, 0)]
        tokens = sum(int((sample.labels_BS != IGNORED).sum()) for sample in samples)
        found.append((each.name, float(sum(losses)) / tokens, tokens))
    return found


@pytest.mark.parametrize(("world", "recipe", "settings"), LAYOUTS)
@pytest.mark.parametrize("whole", [{"full_validation": True, "eval_iters": 4}, {}])
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


def test_a_run_shows_the_losses_of_each_set(
    corpora: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    config = _config("debug", corpora, train_iters=3, eval_interval=2, full_validation=True)
    config = config.with_values(save=str(folder), eval_iters=4, lr_warmup_iters=0)
    (tmp_path / "run.toml").write_text(to_toml(config))
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    said = capsys.readouterr().out
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {key: each for each in records for key in each if key.startswith("eval_loss")}
    assert [*found] == ["eval_loss", "eval_loss_odd", "eval_loss_one"]
    assert all(each["step"] == 2 for each in found.values())
    for key, each in found.items():
        of = key.removeprefix("eval_loss").replace("_", " of ")
        assert f"step 2: validation loss{of} {each[key]:.4f}" in said
    story = read_story(folder)
    names = {line.name for chart in charts_of([story]) for line in chart.lines}
    assert {"validation", "validation odd", "validation one"} <= names
    rows = {row[0] for row in facts([story])}
    assert {"lowest validation loss odd", "lowest validation loss one"} <= rows
