"""What ranks really hold, against the count."""

from dataclasses import replace
from math import prod

import pytest
import torch

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.config.presets import PRESETS
from fivefold.config.training import ELEMENT_BYTES
from fivefold.counts.parameters import parameter_records
from fivefold.counts.policy import checkpoint_bytes
from fivefold.counts.shards import ShardPlace
from fivefold.counts.state import model_state
from fivefold.counts.units import unit_of, units_on_host
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from tests.pool import Pool

SECOND = {"use_precision_aware_optimizer": True, "exp_avg_sq_dtype": "bf16"}
FEW = {**SECOND, "exp_avg_dtype": "bf16"}
EIGHT = {**FEW, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
REMAINDERS = {"use_precision_aware_optimizer": True, "store_param_remainders": True}
NO_MASTERS = {"use_precision_aware_optimizer": True, "main_params_dtype": "bf16"}
GRADIENTS = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}


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
        ("debug-llama", {"data_parallel_sharding_strategy": "optim", **FEW}),
        ("debug-llama", {"data_parallel_sharding_strategy": "no_shard", **SECOND}),
        ("debug-llama", {"tensor_model_parallel_size": 2, **EIGHT}),
        ("debug-gpt", {"data_parallel_sharding_strategy": "optim_grads", **EIGHT}),
        ("debug-mixtral", {"data_parallel_sharding_strategy": "optim_grads_params", **EIGHT}),
    ],
)
def test_weights_and_moments_are_what_the_formula_says(
    pool: Pool, model: str, values: dict
) -> None:
    settings = config(model, **values)
    layout = check(settings, 4)
    held = pool.run(4, _held, settings)
    for rank, (weights, moments) in enumerate(held):
        pp_rank = layout.grid.coordinates(rank)["pp"]
        state = model_state(layout, pp_rank, ShardPlace.of(layout, rank))
        assert (weights, moments) == (state.masters, state.optimizer)


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


@pytest.mark.parametrize(
    ("strategy", "precision", "per_parameter", "on_host"),
    [
        ("no_shard", "bf16", 2 + 2 + 4, 16),
        ("no_shard", "fp32", 4 + 4, 16),
        ("optim", "bf16", 2 + 4 + 2 / 4, 16 / 4),
        ("optim_grads", "bf16", 2 + 2 / 4, 16 / 4),
        ("optim_grads_params", "bf16", 2 / 4, 16 / 4),
        ("optim_grads_params", "fp64", 8 / 4, 32 / 4),
    ],
)
def test_bytes_per_parameter_with_the_optimizer_on_the_host(
    strategy: str, precision: str, per_parameter: float, on_host: float
) -> None:
    values = {"data_parallel_sharding_strategy": strategy, "precision": precision}
    settings = config("debug-llama").with_values(**values, optimizer_cpu_offload=True)
    state = model_state(check(settings, 4), 0)
    assert state.total - state.gathered == per_parameter * state.parameters
    assert state.host == on_host * state.parameters


@pytest.mark.parametrize("adapters", [None, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_checkpoint_holds_what_its_ranks_write(adapters: int | None, precision: str) -> None:
    """Masters and moments of what is trained, and frozen weights as they compute."""
    settings = {"global_batch_size": 4, "precision": precision, "tensor_model_parallel_size": 2}
    config = Config(replace(PRESETS["debug-llama"], lora_rank=adapters)).with_values(**settings)
    layout = check(config, 4, planned=True)
    written = 0.0
    for rank in range(2):  # which have all parts, of two replicas
        for record in parameter_records(layout, rank):
            split = record.split_dim is not None
            own = prod(record.shape) * (record.written and (split or rank == 0))
            written += own * (12 if record.trained else ELEMENT_BYTES[precision])
    assert checkpoint_bytes(config) == written


def test_a_share_is_of_whole_layers_the_last_first_and_the_ends_after_them() -> None:
    settings = config("debug-llama", pipeline_model_parallel_size=2, optimizer_cpu_offload=True)

    def away(share: float, pp_rank: int) -> list[str]:
        asked = settings.with_values(optimizer_offload_fraction=share)
        return [unit for _, unit in units_on_host(check(asked, 2), pp_rank)]

    assert away(0.01, 1) == away(0.3, 1) == ["layers.3"]
    assert away(0.4, 0) == ["layers.1", "layers.0"]
    assert away(1, 1) == ["layers.3", "layers.2", ""]
    assert unit_of("layers.12.mlp.experts.w") == "layers.12" and unit_of("norm.weight") == ""
    assert unit_of("mtp.0.layer.mlp.up_proj.weight") == "mtp.0"


@pytest.mark.parametrize(
    ("few", "strategy", "per_parameter"),
    [
        (SECOND, "no_shard", 16),
        (FEW, "no_shard", 14),
        (FEW, "optim", 6 + 8 / 4),
        (FEW, "optim_grads_params", 12 / 4),
        (GRADIENTS, "no_shard", 16),
        (GRADIENTS, "optim", 4 + 12 / 4),
        (GRADIENTS, "optim_grads", 2 + 14 / 4),
        (GRADIENTS, "optim_grads_params", 14 / 4),
        ({**FEW, **GRADIENTS}, "no_shard", 12),
        (REMAINDERS, "no_shard", 16),
        ({**FEW, **REMAINDERS, **GRADIENTS}, "no_shard", 10),
        ({**FEW, **GRADIENTS, **NO_MASTERS}, "no_shard", 8),
        ({**FEW, **GRADIENTS, **NO_MASTERS}, "optim", 4 + 6 / 4),
        ({**FEW, **GRADIENTS, **NO_MASTERS}, "optim_grads_params", 8 / 4),
        ({**FEW, **GRADIENTS}, "optim_grads_params", 10 / 4),
    ],
)
def test_bytes_per_parameter_with_few_bits(few: dict, strategy: str, per_parameter: float) -> None:
    values = {"data_parallel_sharding_strategy": strategy, "precision": "bf16", **few}
    state = model_state(check(config("debug-llama").with_values(**values), 4), 0)
    assert state.total - state.gathered == per_parameter * state.parameters
