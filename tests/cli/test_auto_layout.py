"""`train --layout auto` runs what the planner finds best, and keeps what was given."""

import json
import random
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.cli import auto_layout
from fivefold.cli.main import main
from fivefold.config.sources import read_config
from fivefold.search import search
from tests.search.once import once

MODELS = ("debug", "debug-mixtral", "gpt2", "llama3-8b")


def dry_run(*words: str) -> int:
    return main(["train", *words, "--layout", "auto", "--dry-run"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_it_is_the_best_layout_of_the_plan(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(seed)
    model, ranks = rng.choice(MODELS), rng.choice((1, 2, 3, 4, 6, 8, 16))
    config = read_config(model).training
    batch, length = config.global_batch_size, config.seq_length
    given = rng.choice(
        ([], ["--pp", "1"], ["--dp-shard", "1"], ["--recompute-granularity", "full"])
    )
    found = once(search.search)  # asked the same, both are answered the same
    with patch.object(search, "search", found), patch.object(auto_layout, "search", found):
        status = dry_run(model, "--nproc", str(ranks), *given)
        told = capsys.readouterr().err.splitlines()[0]
        sizes = ["--gbs", str(batch), "--seq-length", str(length)]
        question = [model, "--cluster", "H100", "--gpus", str(ranks), *sizes, *given, "--json"]
        assert main(["plan", *question]) == status
    if status:
        assert told == capsys.readouterr().err.splitlines()[0]
        return
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert told == f"note: layout: {layouts[0]['layout']}"


@pytest.mark.slow
def test_it_trains_and_says_what_was_given(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = ["debug", "--nproc", "2", "--tp", "2", "--layout", "auto", "--save", str(run)]
    assert main(["train", *words, "--train-iters", "2", "--lr-warmup-iters", "0"]) == 0
    assert "given by flags: tensor_model_parallel_size = 2" in capfd.readouterr().err
    assert read_config(str(run / "config.toml")).parallel.tensor_model_parallel_size == 2


def test_what_was_given_is_said_as_it_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--sequence-parallel", "--recompute-modules", "mlp", "layernorm"]
    assert dry_run("debug", "--nproc", "2", "--recompute-granularity", "selective", *given) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "sequence_parallel = true" in told
    assert "recompute_modules = mlp layernorm" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama3-8b", "--nproc", "1"), "| --nproc 2"),
        (("debug", "--nproc", "2", "--memory-budget", "lots"), "must be a size above 0"),
        (("debug", "--nproc", "2", "--cluster", "H1000"), "H100"),
        (("debug", "--nproc", "3", "--tp", "2"), "is legal on 3 GPUs"),
    ],
)
def test_what_cannot_be_planned_is_said(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dry_run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_alone_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "debug", "--cluster", "H100", "--dry-run"]) == 2
    assert "works: --layout auto | --memory-budget auto" in capsys.readouterr().err
