"""Runs whose batch grows: each step is that of a run which has no other batches."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.batch_sizes import BatchSizes
from fivefold.config.sources import read_config
from fivefold.optim.schedule import learning_rate
from fivefold.report.history import read_history
from fivefold.train.engine import Engine
from fivefold.train.step_result import StepResult
from tests import programs
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.verify.any_settings import ALL
from tests.verify.cases import config, flags

EXPERTS = {
    "moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"),
    "moe_aux_loss_coeff": (0.3,),
    "moe_z_loss_coeff": 0.1,
}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "experts over data": ("mixture", 4, flags(dp=4) | EXPERTS | {"expert_model_parallel_size": 2}),
    "experts on every rank": ("mixture", 2, flags(dp=2) | EXPERTS),
    "fewer microbatches than stages, sharded": (
        "llama",
        4,
        flags(pp=2, dp=2) | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
}


def _steps(
    rank: int, world: int, model: str, settings: dict[str, Any], start: int, alone: bool
) -> list[StepResult]:
    """Steps of growing batches, or the first of them alone by a run of such batches."""
    ramp = {"rampup_batch_size": (start, start, 1), "train_samples": 1000}
    each = {"micro_batch_size": 1, "global_batch_size": 3 * start} | ramp
    layout = check(config(ALL[model], world, **settings).with_values(**each), world)
    small = check(layout.config.with_batch(start), world)
    engine = Engine(small if alone else layout, rank, torch.device("cpu"))
    batches = [small] if alone else [small, layout]
    return [engine.step(microbatches_of(each, rank)) for each in batches]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_smaller_batch_is_a_whole_step(name: str) -> None:
    model, world, settings = LAYOUTS[name]
    start = world // settings.get("pipeline_model_parallel_size", 1)
    (first, second), *_ = run(world, _steps, model, settings, start, False)
    (expected,), *_ = run(world, _steps, model, settings, start, True)
    assert first.loss == expected.loss and first.grad_norm == expected.grad_norm
    assert second.tokens == 3 * first.tokens


GROWS = "--train-samples 50 --rampup-batch-size 2 2 12 --lr-warmup-samples 9 --lr-decay-samples 36"


def trained(folder: Path, flags: str) -> Path:
    words = f"train debug --num-layers 2 --seq-length 16 --fp64 --save {folder} {GROWS}"
    done = programs.run(f"{words} {flags}".split())  # the last flag holds
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in one layout, stopped, and continued in another; batches of 2 2 4 6 and then 8."""
    folder = tmp_path_factory.mktemp("grown") / "run"
    trained(folder, "--audit --train-samples 8 --nproc 2 --pp 2")
    return trained(folder, "--audit --nproc 2 --dp-shard 2")


@pytest.mark.slow
def test_layouts_train_on_the_same_batches(grown: Path, tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", "--nproc 1")
    found, expected = ([r["loss"] for r in read_history(run).steps] for run in (grown, alone))
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_a_run_has_the_sizes_and_rates_of_its_samples(grown: Path) -> None:
    steps = read_history(grown).steps
    whole = read_config(str(grown / "config.toml"))
    sizes = BatchSizes(8, 2, 2, 12)
    taken = [sizes.at(sizes.samples(n)) for n in range(len(steps))]
    assert taken == [2, 2, 4, 6, 8, 8, 8, 8] and len(steps) == whole.training.num_steps
    assert [record["tokens"] // whole.training.seq_length for record in steps] == taken
    rates = [learning_rate(n, whole.optimizer, whole.training) for n in range(len(steps))]
    assert rates[0] == 0.0 and rates[-1] == whole.optimizer.min_lr
    assert [record["lr"] for record in steps] == rates


@pytest.mark.slow
def test_its_audit_is_held_against_the_batch_of_its_step(grown: Path, capsys: Any) -> None:
    assert main(["audit", str(grown), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
