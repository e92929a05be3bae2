"""Tuning on machines whose constants are known, with layouts that fail and times that vary."""

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.check import check
from fivefold.cli import tune
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.presets import resolve_model
from fivefold.config.sources import read_config
from fivefold.layout import Layout
from fivefold.learn.constants import CONSTANTS, moved
from fivefold.learn.posterior import log_seconds
from fivefold.learn.tuning import Tried, Tuning
from fivefold.predict.cluster import Cluster, preset

MESHES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (1, 4), (4, 2))


def space() -> list[Layout]:
    found = []
    for tp, pp in MESHES:
        for strategy in ("no_shard", "optim", "optim_grads_params"):
            for micro in (1, 2):
                config = Config(resolve_model("llama3-8b")).with_values(
                    tensor_model_parallel_size=tp,
                    pipeline_model_parallel_size=pp,
                    sequence_parallel=tp > 1,
                    seq_length=2048,
                    global_batch_size=32,
                    micro_batch_size=micro,
                    data_parallel_sharding_strategy=strategy,
                )
                found.append(check(config, 16, planned=True))
    return found


def tuned(machine: Cluster, every: Sequence[Layout], seed: int, failing: int = 0) -> Tuning:
    """A tuning whose trials take what `machine` predicts, in noise; some layouts always fail."""
    random = np.random.default_rng(seed)
    times = dict(zip(every, np.exp(log_seconds(every, machine)).tolist(), strict=True))
    bad = sorted(every, key=times.__getitem__)[:failing]

    def candidates(known: Cluster) -> list[Layout]:
        order = np.argsort(log_seconds(every, known), kind="stable")[:8]
        return [every[i] for i in order.tolist()]

    def attempt(layout: Layout, steps: int) -> tuple[list[float], str]:
        if layout in bad:
            return [], "out of memory"
        return (times[layout] * np.exp(0.02 * random.normal(size=steps))).tolist(), ""

    tuning = Tuning(preset("H100", 16), candidates, attempt, 4, 1e3, 24)
    for _ in tuning.explore():
        pass
    for _ in tuning.halve():
        pass
    return tuning


@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.exhaustive), 2])
def test_the_best_is_found_in_a_fifth_of_a_sweep(failing: int) -> None:
    every, prior = space(), preset("H100", 16)
    shifts = np.random.default_rng(failing).normal(size=len(CONSTANTS))
    machine = moved(prior, (shifts * [c.doubt(prior) for c in CONSTANTS]).tolist())
    tuning = tuned(machine, every, failing, failing)
    assert tuning.best is not None
    true = dict(zip(every, np.exp(log_seconds(every, machine)).tolist(), strict=True))
    assert true[tuning.best.layout] <= 1.05 * sorted(true.values())[failing]
    assert len({*(id(t.layout) for t in tuning.tried)}) == len(tuning.tried)
    assert [t for t in tuning.tried if t.why] == [t for t in tuning.tried if not t.times]
    assert len(tuning.tried) <= len(every) / 5 + failing


def test_it_stops_where_looking_costs_more_than_it_gains() -> None:
    every = space()[:4]

    def attempt(layout: Layout, steps: int) -> tuple[list[float], str]:
        return [1.0] * steps, ""

    tuning = Tuning(preset("H100", 16), lambda _: every, attempt, 4, 1.0, 24)
    assert len([*tuning.explore()]) == 1


def test_halving_ends_with_one_and_measures_it_most() -> None:
    every = space()[:4]
    machine = preset("H100", 16)
    random = np.random.default_rng(0)

    def attempt(layout: Layout, steps: int) -> tuple[list[float], str]:
        return (1.0 + 0.01 * random.normal(size=steps) + 0.001 * every.index(layout)).tolist(), ""

    tuning = Tuning(machine, lambda _: every, attempt, 3, 1.0, 4)
    tuning.tried = [Tried(layout, 1.0, 0.1, attempt(layout, 3)[0]) for layout in every]
    assert len([*tuning.halve()]) == 4 + 2
    counts = sorted(len(t.times) for t in tuning.tried)
    assert counts == [8, 8, 19, 19]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama3-8b", "no such file or folder: data/corpus"),
        ("debug --device cuda", "2 ranks here need a GPU each"),
    ],
)
def test_what_is_missing_is_said_before_the_machine_is_measured(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(tune, "visible_gpus", lambda: 0)
    assert main(["tune", *words.split(), "--nproc", "2"]) == 2
    assert said in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_where_nothing_fits_a_flag_of_tune_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["tune", "debug", "--model", "gpt3-20b", "--nproc", "1", "--cluster", "H100"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "no layout of this model fits" in said
    assert "--nproc " in said and "--gpus" not in said


@pytest.mark.slow
def test_a_recipe_is_tuned(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    machine, out = tmp_path / "machine.toml", tmp_path / "out"
    machine.write_text(
        'name = "cores"\nnum_gpus = 2\ngpus_per_node = 2\n'
        '[gpu]\nname = "cores"\nmemory_bytes = 8e9\nmemory_bandwidth = 1e10\nmultiprocessors = 1\n'
        "[gpu.peak]\nbf16 = 1e11\nfp32 = 1e11\n[gpu.matmul]\nbf16 = 1e11\nfp32 = 1e11\n"
        "[node_link]\nbandwidth = 1e9\nlatency = 1e-4\n"
        "[network_link]\nbandwidth = 1e9\nlatency = 1e-4\n"
    )
    (tmp_path / "text.txt").write_text("\n".join(f"the number {n} of many" for n in range(3000)))
    words = ["tune", "debug", "--nproc", "2", "--cluster", str(machine), "--out", str(out)]
    words += ["--data-path", str(tmp_path / "text.txt"), "--max-trials", "2"]
    words += ["--data-cache-path", str(tmp_path / "cache"), "--device", "cpu", "--tp", "2"]
    assert main(words) == 0
    told = capfd.readouterr().out
    assert "trial 1: " in told and f"try: fivefold train {out}/recipe.toml --nproc 2" in told
    assert main(["train", str(out / "recipe.toml"), "--nproc", "2", "--dry-run"]) == 0
    assert "tensor_model_parallel_size = 2" in capfd.readouterr().out
    assert main(["plan", "debug", "--cluster", str(out / "machine.toml"), "--gpus", "2"]) == 0
    assert main([*words, "--trial-steps", "1", "--max-trials", "0"]) == 2
    error = capfd.readouterr().err
    assert "--trial-steps must be at least 2" in error and "--max-trials" in error


@pytest.mark.slow
def test_a_rank_that_fails_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from fivefold.train import trial
    from fivefold.train.corpora import open_data

    class Failing(trial.Engine):
        """One whose second rank runs out of memory in a step."""

        def step(self, *arguments: Any, **named: Any) -> Any:
            if self.model.groups.rank == 1:
                raise MemoryError("nothing is left")
            return super().step(*arguments, **named)

    (tmp_path / "text.txt").write_text("\n".join(f"the number {n} of many" for n in range(3000)))
    config = read_config(Path(str(files("fivefold.recipes") / "debug.toml")))
    config = config.with_values(
        data_path=(str(tmp_path / "text.txt"),), data_cache_path=str(tmp_path / "cache")
    )
    data, layout = open_data(config, lambda _: None), check(config, 2)
    times, why = trial.try_layout(layout, data, "cpu", 3)
    assert len(times) == 3 and not why
    monkeypatch.setattr(trial, "Engine", Failing)
    times, why = trial.try_layout(layout, data, "cpu", 3)
    assert times == [] and "nothing is left" in why
    assert "Traceback" not in capfd.readouterr().err
