"""Steps that settings name: those that only consume their data, and those that end a start."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.cli.main import main
from fivefold.data.loader import Loader
from tests.train.test_run import TWO, train
from tests.verify.cases import chosen

pytestmark = pytest.mark.slow

LINE = (
    *("train", "debug", "--num-layers", "2", "--global-batch-size", "4", "--lr-warmup-iters", "0"),
    *("--lr-decay-iters", "9", "--lr", "0.01", "--hidden-dropout", "0.1", "--seq-length", "32"),
)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def numbers(folder: Path) -> list[tuple[float, ...]]:
    return [tuple(m[n] for n in ("loss", "grad_norm", "lr")) for m in metrics(folder)]


@contextmanager
def without(batches: set[int]) -> Iterator[None]:
    """The loader does not have these batches, by their place in the data."""
    original = Loader.next_batch

    def next_batch(loader: Loader) -> Any:
        while loader.consumed_samples // 4 in batches:
            original(loader)
        return original(loader)

    with patch.object(Loader, "next_batch", next_batch):
        yield


@pytest.mark.parametrize("seed", chosen(range(5), 1))
def test_a_run_that_skips_steps_is_one_without_their_data(
    seed: int, cache: Path, tmp_path: Path
) -> None:
    """Rates, dropout and moments are those of as many steps as were taken, also where the run ends
    within the steps that it skips, and goes on from there."""
    draw = random.Random(seed)
    skipped = set(draw.sample(range(9), 4))
    line = [*LINE, "--data-path", str(cache)]
    words = ["--iterations-to-skip", *map(str, draw.sample(sorted(skipped), 4))]
    for end in (min(skipped) + 1, 9):
        known = [word for word in words[1:] if int(word) < end]
        now = [*line, "--train-iters", str(end), words[0], *known]
        assert main([*now, "--save", f"{tmp_path}/skips"]) == 0
    with without(skipped):
        assert main([*line, "--train-iters", "5", "--save", f"{tmp_path}/lacks"]) == 0
    assert numbers(tmp_path / "skips") == numbers(tmp_path / "lacks")
    assert [m["step"] - 1 for m in metrics(tmp_path / "skips")] == sorted({*range(9)} - skipped)


def test_what_was_skipped_stays_so_without_the_setting(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step of a checkpoint counts what was skipped, its rates do not, and no record is lost."""
    line = [*LINE, "--data-path", str(cache), "--save", f"{tmp_path}/run"]
    assert main([*line, "--train-iters", "3", "--iterations-to-skip", "1"]) == 0
    assert main([*line, "--train-iters", "5"]) == 0
    assert "lost" not in capsys.readouterr().err
    with without({1}):
        assert main([*line[:-1], f"{tmp_path}/lacks", "--train-iters", "4"]) == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "lacks")


def test_ranks_agree_on_what_they_skip(cache: Path, tmp_path: Path) -> None:
    more = ["--train-iters", "4", "--iterations-to-skip", "1", "2", "--save-interval", "2"]
    done = train(cache, tmp_path / "run", *TWO, *more)
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in metrics(tmp_path / "run")] == [1, 4]
    assert "step 2 only consumes its data (iterations_to_skip 1)" in done.stdout
    assert Checkpointer(tmp_path / "run" / "checkpoints").steps() == [4]  # none after step 2


def test_a_start_ends_at_multiples_and_the_next_goes_on(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*LINE, "--data-path", str(cache), "--save", f"{tmp_path}/run", "--train-iters", "4"]
    for end, said in ((2, "asked to stop (exit_interval 2): saved step 2"), (4, "")):
        assert main([*line, "--exit-interval", "2"]) == 0
        out = capsys.readouterr().out
        assert said in out and ("asked to stop" in out) == bool(said)
        assert metrics(tmp_path / "run")[-1]["step"] == end
