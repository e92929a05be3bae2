"""Steps that are no good: stopped at, skipped with their data, or rewound from, as set."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.training import TrainingConfig
from fivefold.train.engine import Engine
from fivefold.train.health.bad_steps import LEAST, MOST, BadSteps
from fivefold.train.step_result import DeviceResult, StepResult
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.verify.cases import LLAMA, config, shared_groups


def result(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult(loss, norm, 0.1, 100)


def test_a_spike_is_far_above_the_median() -> None:
    steps = BadSteps(TrainingConfig(check_for_spiky_loss=True, spiky_loss_factor=3.0))
    for step in range(1, LEAST + 1):
        assert steps.limit == float("inf")
        assert steps.look(step, result(2.0 if step % 2 else 1.0)) == ""
    assert steps.limit == 4.5
    assert "spike: 4.6, 3.07 x 1.5, the median of 20 steps" in steps.look(21, result(4.6))
    assert steps.look(21, result(4.5)) == ""
    assert len(steps.losses) == LEAST + 1  # a spike is not kept
    again = BadSteps(TrainingConfig(check_for_spiky_loss=True, spiky_loss_factor=3.0))
    again.remember(steps.losses)
    assert again.limit == steps.limit


LOSSES = st.sampled_from([0.0, 5e-324, 1e-8, 1.0, 1e300])


@given(LOSSES, st.lists(LOSSES, max_size=LEAST))
def test_any_losses_can_be_judged(first: float, losses: list[float]) -> None:
    """Also those of a text that is known by heart: no loss is a multiple of 0."""
    steps = BadSteps(TrainingConfig(check_for_spiky_loss=True))
    steps.remember([first] * LEAST)
    for step, loss in enumerate(losses, 1):
        usual, limit = median(steps.losses), steps.limit
        bad = steps.look(step, result(loss))
        assert (bad != "") == (loss > limit) == (usual > 0 and loss > 2.0 * usual)


def test_after_a_rewind_steps_are_judged_as_after_a_new_start() -> None:
    """The losses of steps that are undone say nothing of those that run in their place."""
    draw, settings = random.Random(0), TrainingConfig(check_for_spiky_loss=True)
    for _ in range(50):
        steps, state = BadSteps(settings), tuple[float, ...]()
        for step in range(1, draw.randint(2, 3 * LEAST)):
            steps.look(step, result(draw.uniform(1.0, 1.5)))
            state = draw.choice([state, steps.losses])
        new = BadSteps(settings)
        for each in (steps, new):
            each.remember(state)
        assert steps.losses == new.losses == state and steps.limit == new.limit


def test_what_is_not_looked_for_is_not_found() -> None:
    steps = BadSteps(TrainingConfig(check_for_nan_in_loss_and_grad=False))
    for step in range(2 * LEAST):
        assert steps.look(step, result(float("nan") if step % 2 else 1e9 * step)) == ""
    assert steps.losses == ()


def test_only_numbers_are_remembered() -> None:
    """A checkpoint keeps the losses as JSON, which has no others."""
    settings = TrainingConfig(check_for_spiky_loss=True, check_for_nan_in_loss_and_grad=False)
    steps = BadSteps(settings)
    for step, loss in enumerate((float("nan"), float("inf"), 1.0)):
        assert steps.look(step, result(loss)) == ""
    assert steps.losses == (1.0,)


@shared_groups()
def _judge(rank: int, world: int, checks: dict[str, bool]) -> list[str]:
    """Results that the engine takes and the judge calls bad, or the other way round."""
    settings = config(replace(LLAMA, num_layers=1), world, **checks)
    engine = Engine(check(settings, world), rank, torch.device("cpu"))
    batch = microbatches(settings, global_batch(settings, 0), slice(0, 2))
    numbers, found = (1.0, 1e6, float("nan"), float("inf")), []
    for losses, loss, norm in product(([], [1.0] * LEAST), numbers, numbers):
        steps, before = BadSteps(settings.training), engine.steps
        steps.remember(losses)
        made = engine.gradients(batch)
        for name, value in (("loss", loss), ("grad_norm", norm)):
            object.__setattr__(made, name, torch.full_like(made.loss, value))
        bad = steps.look(1, engine.apply(made, steps.limit)) != ""
        taken = [engine.steps == before + 1] + [p.grad is None for p in engine.trained.values()]
        if {*taken} != {not bad}:
            found.append(f"loss {loss}, norm {norm} after {losses}: bad is {bad}")
        engine.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("spikes", [True, False])
def test_a_step_is_taken_unless_it_is_bad(finite: bool, spikes: bool) -> None:
    """Or the run goes on as if it had been, and adds the next gradients to those of this one."""
    checks = {"check_for_nan_in_loss_and_grad": finite, "check_for_spiky_loss": spikes}
    assert run(1, _judge, checks) == [[]]


def test_leaving_out_ends() -> None:
    steps = BadSteps(TrainingConfig())
    for _ in range(MOST):
        assert "step 5 is not finite: loss nan" in steps.look(5, result(float("nan")))
        assert not steps.too_many
        steps.look(3, result(1.0))  # rewound, it runs again, but not beyond
    steps.look(5, result(float("nan")))
    assert steps.too_many
    steps.look(5, result(1.0))
    assert not steps.too_many


@contextmanager
def spoilt(samples: set[int], value: float) -> Iterator[None]:
    """The loss of the batches with these numbers is `value`, on whichever step they come."""
    original, count = Engine.gradients, [0]

    def gradients(engine: Engine, *args: Any, **settings: Any) -> DeviceResult:
        found = original(engine, *args, **settings)
        count[0] += 1
        if count[0] in samples:
            object.__setattr__(found, "loss", torch.full_like(found.loss, value))
        return found

    with patch.object(Engine, "gradients", gradients):
        yield


STEPS = 22


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    (folder / "text.txt").write_text("\n".join(f"the number {n} of many" for n in range(4000)))
    return folder


def train(folder: Path, name: str, *flags: str, steps: int = STEPS) -> int:
    words = ["train", "debug", "--train-iters", str(steps), "--seq-length", "16", "--lr", "1e-3"]
    words += ["--lr-decay-style", "constant", "--global-batch-size", "2", "--nproc", "2"]
    words += ["--num-layers", "1"]
    words += ["--data-path", str(folder / "text.txt"), "--data-cache-path", str(folder / "cache")]
    return main([*words, "--save", str(folder / name), *flags])


def records(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(losses) == len(dict(losses)), "a step is recorded twice"
    return dict(losses)


@pytest.mark.slow
def test_bad_steps_are_skipped_with_their_data(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    skip = ("--bad-step-action", "skip", "--check-for-spiky-loss")
    with spoilt({3, 4, 23}, float("nan")):
        assert train(folder, "nan", *skip) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert said.count("is not finite: loss nan") == 3 and said.count("its data is skipped") == 3
    with spoilt({3, 4}, float("nan")), spoilt({23}, 1e6):
        assert train(folder, "spike", *skip) == 0
    assert "the loss of step 21 is a spike" in " ".join(capfd.readouterr().out.split())
    found = records(folder / "nan")
    assert list(found) == [*range(1, STEPS + 1)] and found == records(folder / "spike")
    state = next((folder / "nan" / "checkpoints").glob("step-*/meta.json"))
    loader = json.loads(state.read_text())["loader"]
    assert loader["consumed_samples"] == 2 * (STEPS + 3)


@pytest.fixture(scope="module")
def elsewhere(folder: Path) -> Path:
    """Trained on other data after step 5: 8 batches are past, 5 of them counted."""
    with spoilt({6, 7, 8}, float("nan")):
        assert train(folder, "skipped", "--bad-step-action", "skip", steps=10) == 0
    return folder / "skipped"


@pytest.mark.slow
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_run_rewinds_and_goes_on_with_other_data(
    folder: Path, elsewhere: Path, where: str, capfd: pytest.CaptureFixture[str]
) -> None:
    saves = ("--save-interval", "5")
    if where == "memory":
        memory = ("--non-persistent-local-ckpt-dir", str(folder / "shm"))
        saves = ("--save-interval", "0", "--non-persistent-save-interval", "5", *memory)
    flags = ("--bad-step-action", "rewind", *saves)
    with spoilt({8}, float("nan")):
        assert train(folder, where, *flags, steps=10) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert re.search(
        r"step 8 is not finite: .*: back to the state of step 5, with the data that follows", said
    )
    found = records(folder / where)
    assert list(found) == [*range(1, 11)]
    assert found == records(elsewhere)


@pytest.mark.slow
def test_stopping_is_what_happens_unless_said(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with spoilt({21}, 1e6):
        assert train(folder, "stop", "--check-for-spiky-loss", "--nproc", "1") == 1
    errors = capfd.readouterr().err
    assert "error: the loss of step 21 is a spike: 1e+06" in errors
    assert "the step was not taken" in errors
    with spoilt({2}, float("nan")):
        assert train(folder, "nowhere", "--bad-step-action", "rewind") == 1
    assert "there is no state of the run to go back to" in capfd.readouterr().err
