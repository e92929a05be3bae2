"""The formulae against what ranks really hold."""

from dataclasses import replace

import pytest
import torch

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.derived import as_table, describe, model_state
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from tests.pool import Pool


def config(model: str, **values: object) -> Config:
    changed = replace(PRESETS[model], attention_dropout=0.0, hidden_dropout=0.0)
    return Config(changed).with_values(seq_length=16, precision="fp32", **values)


def _held(rank: int, world: int, settings: Config) -> tuple[int, int]:
    """Bytes of the master weights and of the moments on this rank."""
    engine = Engine(check(settings, world), rank, torch.device("cpu"))
    weights = sum(local_tensor(p).nbytes for p in engine.parameters.values())
    moments = sum(piece.local.nbytes for piece in engine.optimizer.state_tensors().values())
    return weights, moments


@pytest.mark.parametrize(
    ("model", "values"),
    [
        ("debug-llama", {"tensor_model_parallel_size": 4}),
        ("debug-llama", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        ("debug-gpt", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
        (
            "debug-gpt",
            {"pipeline_model_parallel_size": 2, "data_parallel_sharding_strategy": "optim"},
        ),
        ("debug-llama", {"data_parallel_sharding_strategy": "optim_grads_params"}),
    ],
)
def test_weights_and_moments_are_what_the_formula_says(
    pool: Pool, model: str, values: dict
) -> None:
    settings = config(model, **values)
    layout = check(settings, 4)
    strategy = layout.config.parallel.data_parallel_sharding_strategy
    shards = 1 if strategy == "no_shard" else layout.grid.dp_shard
    held = pool.run(4, _held, settings)
    for rank, (weights, moments) in enumerate(held):
        state = model_state(layout, layout.grid.coordinates(rank)["pp"])
        padding = 0.02 if shards > 1 else 0  # shards are padded to whole rows
        assert moments == pytest.approx(state.optimizer, rel=padding, abs=0)
        assert weights == pytest.approx(4 * state.parameters / shards, rel=padding, abs=0)


@pytest.mark.parametrize(
    ("strategy", "precision", "per_parameter"),
    [
        ("no_shard", "bf16", 18),
        ("no_shard", "fp32", 16),
        ("no_shard", "fp64", 32),
        ("optim", "bf16", 6 + 12 / 4),
        ("optim_grads", "bf16", 2 + 16 / 4),
        ("optim_grads_params", "bf16", 16 / 4),
    ],
)
def test_bytes_per_parameter(strategy: str, precision: str, per_parameter: float) -> None:
    values = {"data_parallel_sharding_strategy": strategy, "precision": precision}
    state = model_state(check(config("debug-llama").with_values(**values), 4), 0)
    assert state.total - state.gathered == per_parameter * state.parameters


def test_every_number_comes_with_its_product() -> None:
    values = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout = check(config("debug-llama", global_batch_size=16, **values), 8)
    told = {name: (value, why) for name, value, why in describe(layout)}
    assert told["world"] == ("8", "pp 2 x dp 2 x cp 1 x tp 2")
    assert told["microbatches"] == ("8", "global batch 16 / (micro batch 1 x dp 2)")
    assert told["tokens per step"] == ("256", "global batch 16 x sequence 16")
    assert told["padded vocabulary"] == ("512", "512 rounded up to a multiple of 128")
    assert told["parameters"][0] == "263 K"
    assert told["largest stage"] == ("131 K", "of 131 K + 131 K")


def test_the_table_is_aligned() -> None:
    assert as_table([("a", "1", "x"), ("long", "22", "")]) == "a      1  x\nlong  22"
