"""What `fivefold plan --emit fivefold` prints for a model with experts is trained as it is."""

import re
from pathlib import Path

import pytest
import torch

from fivefold.check import check
from fivefold.cli.main import main
from fivefold.config.config import Config
from fivefold.config.sources import read_config
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from tests.audit.layouts import microbatches_of
from tests.pool import run
from tests.search.once import searching_once

PLAN = ["plan", "debug-mixtral", "--cluster", "H100", "--gpus", "4", "--mbs", "1"]
CAPACITY = ["--moe-expert-capacity-factor", "1.5", "--moe-pad-expert-input-to-capacity"]
SPLIT = ["--expert-tensor-parallel-size", "2", "--tensor-model-parallel-size", "2"]


def _steps(rank: int, world: int, layout: Layout) -> list[float]:
    engine = Engine(layout, rank, torch.device("cpu"))
    return [engine.step(microbatches_of(layout, rank)).loss for _ in range(3)]


def trains(emitted: Path) -> Config:
    """The configuration, which four ranks have learnt with."""
    config = read_config(str(emitted))
    losses = run(4, _steps, check(config, 4))
    assert losses == [losses[0]] * 4
    assert losses[0][2] < losses[0][0]  # the rate of the first step is 0
    return config


@pytest.mark.slow
def test_it_trains_and_the_report_says_why_these_degrees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted = tmp_path / "emitted.toml"
    with searching_once():
        assert main([*PLAN, "--pp", "1", "--emit", "fivefold"]) == 0
        emitted.write_text(capsys.readouterr().out)
        assert main([*PLAN, "--pp", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"experts ep \d, etp \d, tp \d; the best with another: ep \d ", said)
    trains(emitted)


@pytest.mark.slow
def test_it_trains_with_split_experts_of_a_capacity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    emitted = tmp_path / "emitted.toml"
    assert main([*PLAN, "--emit", "fivefold", *CAPACITY, *SPLIT]) == 0
    emitted.write_text(capsys.readouterr().out)
    config = trains(emitted)
    assert config.experts.moe_expert_capacity_factor == 1.5
    assert config.experts.moe_pad_expert_input_to_capacity
    assert config.parallel.moe_token_dispatcher_type != "flex"
    assert config.parallel.expert_tensor_parallel_size == 2
