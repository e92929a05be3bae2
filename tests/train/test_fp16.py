"""Runs in fp16: gradients that overflow cost their data and nothing else."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.errors import FivefoldError
from fivefold.optim.loss_scale import ScaleState
from fivefold.train.engine import Engine
from fivefold.verify.reference import run_reference
from fivefold.verify.run import rounded
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.verify.cases import LLAMA, chosen, config, flags, named, shared_groups
from tests.verify.test_layouts import passes

LARGE = 2.0**40  # with which every gradient overflows

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "gpt", {}),
    "stages": (2, "llama", flags(pp=2)),
    "ZeRO-3, tensor parallel": (
        4,
        "gpt",
        flags(tp=2, dp=2, sequence=True, strategy="optim_grads_params"),
    ),
    "ZeRO-1, sent in bf16, on the host": (
        2,
        "llama",
        named(strategy="optim", grad_reduce_in_bf16=True, optimizer_cpu_offload=True, num_layers=2),
    ),
    "experts": (2, "oss", named(ep=2)),
    "context, latent": (2, "latent", named(cp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(LAYOUTS, "ZeRO-1, sent in bf16, on the host"))
def test_layouts_are_as_close_as_one_device(name: str) -> None:
    world, model, settings = LAYOUTS[name]
    passes(world, model, settings | {"precision": "fp16"})


def test_gradients_that_no_device_can_hold_are_not_compared() -> None:
    settings = config(LLAMA, 1, precision="fp16", loss_scale=LARGE)
    with pytest.raises(FivefoldError, match="one device are not finite in fp16"):
        rounded(settings, 1, run_reference(settings, 1))


@shared_groups()
def _overflow(rank: int, world: int, settings: dict[str, Any]) -> list[tuple[bool, ...]]:
    """Of two steps that overflow and one that does not: whether it did, what it left as it was, and
    how often the scale was halved until then."""
    narrow = {"precision": "fp16", "initial_loss_scale": LARGE, "hysteresis": 1}
    layout = check(config(LLAMA, world, **settings | narrow), world)
    engine, seen = Engine(layout, rank, torch.device("cpu")), []

    def state() -> dict[str, torch.Tensor]:
        stored = engine.stored_tensors()
        return {n: getattr(t, "local", t).clone() for n, t in stored.items()}

    for trial in range(3):
        before = state()
        if trial == 2:
            engine.scaler.take(ScaleState(2.0**10))
        result = engine.step(microbatches_of(layout, rank))
        same = all(torch.equal(before[name], now) for name, now in state().items())
        seen.append((result.overflowed, same, engine.steps, result.loss_scale))
        engine.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize(
    "settings", [named(strategy="optim_grads"), named(tp=2, optimizer_cpu_offload=True)]
)
def test_what_overflows_leaves_everything_as_it_was(settings: dict[str, Any]) -> None:
    taken = [(True, True, 0, LARGE), (True, True, 0, LARGE / 2), (False, False, 1, 2.0**10)]
    assert run(2, _overflow, settings) == [taken, taken]


def train(folder: Path, name: str, *more: str) -> int:
    words = ["train", "debug", "--mock-data", "--seq-length", "16", "--global-batch-size", "2"]
    words += ["--lr-decay-style", "constant", "--num-layers", "1", "--fp16"]
    return main([*words, "--save", str(folder / name), *more])


def lines(run: Path) -> dict[int, tuple[float, float]]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: (line["loss"], line["loss_scale"]) for line in found if "loss" in line}


def test_a_scale_is_searched_and_goes_on_where_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Stopped and continued, a run has the losses of one that never stopped."""
    first = ("--initial-loss-scale", str(2.0**27), "--loss-scale-window", "3")
    assert train(tmp_path, "whole", *first, "--train-iters", "7") == 0
    whole = " ".join(capfd.readouterr().out.split())
    assert train(tmp_path, "parts", *first, "--train-iters", "3") == 0
    assert train(tmp_path, "parts", *first, "--train-iters", "7") == 0
    parts = " ".join(capfd.readouterr().out.split())
    skipped = (
        r"step (\d): gradients overflow in fp16, so its data is skipped; the loss scale, (\S+),"
    )
    tried = re.findall(skipped, whole)
    assert tried[:3] == [("1", "2^27"), ("1", "2^27"), ("1", "2^26")]
    assert re.findall(skipped, parts) == tried
    assert {step for step, _ in tried} > {"1"}, "a doubling was one too many"
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    state = json.loads(next((tmp_path / "parts").glob("checkpoints/*7/meta.json")).read_text())
    assert state["loader"]["consumed_samples"] == 2 * (7 + len(tried))


@pytest.mark.parametrize(
    "scale",
    [
        ("--loss-scale", str(LARGE)),
        ("--initial-loss-scale", str(LARGE), "--min-loss-scale", str(LARGE / 2)),
    ],
)
def test_a_scale_that_cannot_fall_ends_the_run(
    tmp_path: Path, scale: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path, "run", *scale, "--train-iters", "2") == 1
    errors = capfd.readouterr().err
    assert "error: the gradients of step 1 overflow in fp16, with the least loss scale, " in errors
    assert "Traceback" not in errors
