"""A profiled step leaves the timeline of its pipeline, and takes as long as it is simulated."""

from pathlib import Path

import pytest
import torch

from benchmarks.timeline import explained_makespan
from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.errors import ConfigError
from fivefold.pipeline.costs.measured import FILE, measured_program, read_measured
from fivefold.train.engine import Engine
from fivefold.train.folder.run_folder import RunFolder
from fivefold.train.profile import profiled
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.verify.cases import shared_groups

pytestmark = pytest.mark.slow

TRIES = 15  # of which one must not be disturbed by what else runs
CLOSE = 0.1


def settings(schedule: str) -> Config:
    return Config(PRESETS["debug-llama"]).with_values(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=4,
        ffn_hidden_size=512,
        vocab_size=256,
        seq_length=128,
        micro_batch_size=2,
        global_batch_size=16,
        precision="fp32",
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        profile=True,
        profile_step_start=1,
        profile_step_end=2,
    )


def _profile(rank: int, world: int, schedule: str, folder: Path) -> None:
    config = settings(schedule)
    with shared_groups():
        engine = Engine(check(config, world), rank, torch.device("cpu"))
        batch = global_batch(config, 0)
        rows = microbatches(config, batch, slice(0, config.training.global_batch_size))
        engine.step(rows)  # what happens once only
        for attempt in range(TRIES):
            (folder / str(attempt)).mkdir(exist_ok=True)
            with profiled(engine, folder / str(attempt)):
                engine.step(rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_measured_step_takes_as_long_as_simulated(schedule: str, tmp_path: Path) -> None:
    run(2, _profile, schedule, tmp_path)
    ratios = []
    for attempt in range(TRIES):
        acts = read_measured(tmp_path / str(attempt))
        program, measured = measured_program(acts)
        planned = check(settings(schedule), 2).program()
        assert program.num_microbatches == planned.num_microbatches
        assert sum(map(len, program.ranks)) == sum(
            act.kind in ("F", "B", "W", "BW") for acts in planned.ranks for act in acts
        )
        ratios.append(measured.makespan / explained_makespan(program, measured))
    # A machine that does other things, too, disturbs some of the steps.
    assert min(abs(ratio - 1) for ratio in ratios) < CLOSE, ratios


def _where(rank: int, world: int, folder: Path) -> list[str]:
    config = settings("1f1b").with_values(profile_ranks=(1,), global_batch_size=4)
    with shared_groups():
        engine = Engine(check(config, world), rank, torch.device("cpu"))
        rows = microbatches(config, global_batch(config, 0), slice(0, 2))
        with profiled(engine, folder):
            engine.step(rows)
    return sorted(path.name for path in folder.iterdir())


def test_only_the_pipelines_asked_for_are_written(tmp_path: Path) -> None:
    run(4, _where, tmp_path)
    there = RunFolder(tmp_path).profile
    assert {*tmp_path.iterdir()} == {tmp_path / FILE, there}
    assert [*there.iterdir()] == [RunFolder(there).config_file]
    assert {act.rank for act in read_measured(tmp_path)} == {0, 1}


def test_steps_and_ranks_to_profile_must_exist() -> None:
    config = settings("1f1b").with_values(profile_ranks=(7,), profile_step_start=200)
    with pytest.raises(ConfigError) as caught:
        check(config, 2)
    assert "name no step" in str(caught.value) and "names rank 7 of 2" in str(caught.value)
