"""A plan agrees with itself: however it is told, fixed by flags, emitted as a recipe, or asked for.

Questions are random, and searches small: what they find matters less than that all say the same.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import SETTINGS, Config
from fivefold.config.sources import read_config
from fivefold.errors import ConfigError
from fivefold.search import branch_and_bound, search
from fivefold.search.candidate import Candidate
from fivefold.search.request import FIXABLE, Request
from fivefold.units import human_bytes, human_seconds
from tests.search.once import searching_once
from tests.search.test_any_question import asked, line_of

pytestmark = pytest.mark.slow

SEEDS = (7, 38, 90, pytest.param(62, marks=pytest.mark.exhaustive))
MESH = {
    "tensor_model_parallel_size": "tp",
    "context_parallel_size": "cp",
    "pipeline_model_parallel_size": "pp",
    "expert_model_parallel_size": "ep",
}
Run = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that ends well, and returns what it prints."""

    def printed(*argv: str) -> str:
        status = main(argv)
        said = capsys.readouterr()
        assert status == 0, f"{shlex.join(argv)}\n{said.err}"
        return said.out

    return printed


@pytest.fixture(autouse=True)
def _little_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "WORK", 40_000)
    monkeypatch.setattr(branch_and_bound, "TO_IMPROVE", 20_000)
    monkeypatch.setattr(branch_and_bound, "TO_TRADE", 4_000)


@pytest.fixture(scope="module", autouse=True)
def _searched_once() -> Iterator[None]:
    with searching_once():
        yield


@cache
def planned(seed: int) -> tuple[list[str], Request, Candidate]:
    line = line_of(seed)
    return ["plan", *shlex.split(line)], asked(line), search.search(asked(line)).best


def chosen(config: Config) -> Iterator[tuple[str, Any]]:
    """Every layout setting that has a value."""
    for _, section in config.sections():
        for name, value in vars(section).items():
            if name in FIXABLE and value not in (None, ()):
                yield name, value


@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_chosen_is_chosen_again_if_it_is_fixed(seed: int, run: Run) -> None:
    argv, _, best = planned(seed)
    config = best.layout.config
    words = argv[: argv.index("--gbs")]  # the model and the cluster
    for name in ("global_batch_size", "seq_length", "precision", "fp8_format"):
        words += shlex.split(SETTINGS[name].typed(config.value(name)))
    for name, value in chosen(config):
        words += shlex.split(SETTINGS[name].typed(value))
    found = json.loads(run(*words, "--json"))["layouts"][0]
    assert best.prediction is not None
    assert found["step_seconds"] == best.seconds
    assert found["memory_bytes"] == best.memory.device_total
    assert found["parts"] == {part.name: part.seconds for part in best.prediction.parts}


@pytest.mark.parametrize("seed", SEEDS)
def test_its_recipe_is_its_layout(
    seed: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, request, best = planned(seed)
    monkeypatch.chdir(tmp_path)
    Path("planned.toml").write_text(run(*argv, "--emit", "fivefold"))
    assert read_config("planned.toml") == best.layout.config
    try:
        check(best.layout.config, request.world)
    except ConfigError:  # a plan may have what the trainer lacks, and says so
        return
    run("train", "planned.toml", "--nproc", str(request.world), "--dry-run")


@pytest.mark.parametrize("seed", SEEDS)
def test_asked_why_its_own_mesh_or_settings_it_is_the_best(seed: int, run: Run) -> None:
    argv, request, best = planned(seed)
    values = {n: v for n, v in chosen(best.layout.config) if n not in request.given}
    mesh = " ".join(f"{short}={values[name]}" for name, short in MESH.items() if name in values)
    every = " ".join(
        name if value is True else f"no_{name}" if value is False else f"{name}={_words(value)}"
        for name, value in values.items()
    )
    for words in filter(None, (mesh, every)):
        assert f"{words}: that is the best layout" in run(*argv, f"--why={words}")


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("seed", (*SEEDS[:2], SEEDS[-1]))
def test_text_json_and_page_have_the_same_figures(
    seed: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, _, _ = planned(seed)
    monkeypatch.chdir(tmp_path)
    found = json.loads(run(*argv, "--json"))["layouts"][0]
    text = " ".join(run(*argv, "--verbose", "--html", "plan.html").split())
    page = Path("plan.html").read_text(encoding="utf-8")
    page = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    low, high = found["interval_80"]
    step = found["step_seconds"]
    assert low < step < high
    told = [f"{human_seconds(step)} (80 % between {human_seconds(low)} and {human_seconds(high)})"]
    told += [f"{found['mfu']:.1%}", human_bytes(found["memory_bytes"])]
    told += [f"{found['tokens_per_second_per_gpu']:,.0f} tokens/s a GPU"]
    for name, seconds in found["parts"].items():
        if abs(seconds) >= 5e-4 * step:
            told.append(f"{name} {human_seconds(seconds)} {seconds / step:.1%}")
    ranks = found["memory_by_rank"]
    for rank in ranks:
        peak = rank.pop("peak")
        assert sum(rank.values()) == pytest.approx(peak)
        assert peak <= found["memory_bytes"]
        told += [human_bytes(peak)]
    for words in told:
        assert words in text and words in page, words
