"""An optimizer in host memory does what the one on the device does, to the bit."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config import memory
from fivefold.config.config import Config
from fivefold.counts.shards import ShardPlace
from fivefold.counts.state import model_state
from fivefold.data_parallel.offloaded_shards import OffloadedShards
from fivefold.errors import FivefoldError
from fivefold.memory.parameters import OffloadedParameters
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from tests.engines import own_batch
from tests.pool import Pool
from tests.verify import cases
from tests.verify.cases import MODELS, STAGES, chosen, config, named

STEPS = 2
AWAY = {"optimizer_cpu_offload": True}
VISITING = {"optimizer_cpu_offload": False, "offload_optimizer_states": True}
HERE = {
    "optimizer_cpu_offload": False,
    "offload_optimizer_states": False,
    "optimizer_offload_fraction": 1.0,
    "optimizer_offload_path": None,
    "param_cpu_offload": False,
    "param_offload_path": None,
}
ROUNDED = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16"}
ROUNDED |= {"exp_avg_sq_dtype": "bf16"}
EIGHT = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"}
LLAMA, TIED, GPT = (replace(MODELS[name], num_layers=2) for name in ("llama", "llama tied", "gpt"))
MIXTURE = replace(cases.MIXTURE, num_layers=2, moe_layer_freq="[0,1]")
LONG_ROWS = replace(LLAMA, ffn_hidden_size=160)  # a block with a scale, and a part of one
BUCKET = 800  # elements, so that several buckets share a room and matrices are cut
GATHERED = {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_param_gather": True}
OFF = {"strategy": "optim_grads_params", "param_cpu_offload": True}


def _engine(settings: Config, rank: int, world: int) -> Engine:
    return Engine(check(settings, world), rank, torch.device("cpu"))


def _step(engine: Engine, step: int) -> tuple[float, float]:
    result = engine.step(own_batch(engine, step))
    return result.loss, result.grad_norm


def _state(engine: Engine) -> dict[str, Tensor]:
    """Weights that are updated, moments, and those with which the device computes."""
    kept = engine.optimizer.weights() | engine.optimizer.state_tensors()
    found = {name: piece.local.clone() for name, piece in kept.items()}
    return found | {f"to compute with: {n}": engine.weight(n) for n in engine.parameters}


def _unforeseen(held: OffloadedParameters, block: OffloadedShards) -> None:
    raise AssertionError(f"{block.names[0]} is not of the block that the program reads next")


@patch.object(OffloadedParameters, "_skip_to", _unforeseen)
def _every_way(rank: int, world: int, settings: Config) -> None:
    """Trains with all state on the device, and off it with updates on the host and the device."""
    plain = _engine(settings.with_values(**HERE), rank, world)
    with patch.object(memory, "UPDATE_BUCKET", BUCKET):
        others = [_engine(settings.with_values(**way), rank, world) for way in (AWAY, VISITING)]
    for step in range(STEPS):
        wanted = _step(plain, step)
        assert [_step(away, step) for away in others] == [wanted, wanted]
        true = _state(plain)
        for away in others:
            held = _state(away)
            for name, tensor in true.items():
                narrow = min(tensor.dtype, held[name].dtype, key=lambda dtype: dtype.itemsize)
                assert torch.equal(tensor.to(narrow), held[name].to(narrow)), (step, name)
    for away in others:
        assert plain.steps == away.steps == STEPS
        moved = [n for n in away.parameters if n in away.optimizer.host]
        assert moved and not any(away.parameters[name].grad is not None for name in moved)
        assert len(away.optimizer.host.state.buckets) > memory.NUM_UPDATE_BUFFERS
        if settings.memory.param_cpu_offload:
            kept = [away.parameters[name].to_local().untyped_storage().nbytes() for name in moved]
            assert not any(kept) and away.model.offloaded is not None


ZERO1, ZERO2, ZERO3 = "optim", "optim_grads", "optim_grads_params"
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "one rank": (1, GPT, {"strategy": "optim"}),
    "one rank, whole, fp32": (1, GPT, {"precision": "fp32"}),
    # Recomputed: else rows of tables are added up in fp32, and by FSDP2, which moves them, in bf16.
    "replicated, recomputed": (
        2,
        LLAMA,
        {"optimizer_offload_fraction": 0.5, "recompute_granularity": "full"},
    ),
    "replicated, fp32": (2, LLAMA, {"precision": "fp32"}),
    "ZeRO-1, half": (2, LLAMA, {"strategy": ZERO1, "optimizer_offload_fraction": 0.5}),
    "ZeRO-2, tp, tied": (
        4,
        TIED,
        {"strategy": ZERO2, "tp": 2, "clip_grad": 0.01, **ROUNDED},
    ),
    "ZeRO-3, one microbatch": (2, LLAMA, {"strategy": ZERO3, "global_batch_size": 2}),
    "ZeRO-3, replicas, after the backward": (
        4,
        LLAMA,
        {"strategy": ZERO3, "replicas": 2, "overlap_grad_reduce": False},
    ),
    "ZeRO-3, cp, fp64": (4, LLAMA, {"strategy": ZERO3, "cp": 2, "precision": "fp64"}),
    "deferred weights, tied over stages": (
        4,
        MODELS["gpt"],
        {
            "strategy": ZERO2,
            "pp": 2,
            "pipeline_model_parallel_layout": STAGES[2, 1],
            "pipeline_schedule": "zb_h1",
        },
    ),
    "two copies of the model": (
        4,
        MODELS["llama tied"],
        {
            "strategy": ZERO1,
            "pp": 2,
            "pipeline_model_parallel_layout": STAGES[2, 1],
            "pipeline_schedule": "dualpipe",
        },
    ),
    "experts on two meshes, half": (
        4,
        MIXTURE,
        {"strategy": ZERO3, "ep": 2, "tp": 2, "optimizer_offload_fraction": 0.4},
    ),
    "moments in 8 bits, ZeRO-3": (2, LONG_ROWS, {"strategy": ZERO3, **EIGHT}),
    "one moment in 8 bits, half": (
        2,
        GPT,
        {"optimizer_offload_fraction": 0.5, **EIGHT, "exp_avg_dtype": "bf16", "strategy": "optim"},
    ),
    "moments in 8 bits, experts": (
        4,
        MIXTURE,
        OFF | {"ep": 2, "optimizer_offload_fraction": 0.6, **EIGHT, "main_grads_dtype": "bf16"},
    ),
    "moments in 8 bits, one layer": (
        2,
        LONG_ROWS,
        {"strategy": ZERO1, "optimizer_offload_fraction": 0.01, **EIGHT},
    ),
    "weights off the device, one rank": (1, GPT, OFF),
    "weights off the device, replicas, fp64": (
        4,
        LLAMA,
        OFF | {"replicas": 2, "precision": "fp64"},
    ),
    "weights off the device, tp, tied, recomputed": (
        4,
        TIED,
        OFF | {"tp": 2, "recompute_granularity": "full", "zero_quantized_weights": True},
    ),
    "weights off the device, experts, half": (
        4,
        MIXTURE,
        OFF | {"ep": 2, "optimizer_offload_fraction": 0.4, "overlap_param_gather": False},
    ),
    "weights off the device, interleaved": (
        4,
        MODELS["gpt"],
        OFF | {"pp": 2, "pipeline_model_parallel_layout": STAGES[2, 2], "micro_batch_size": 1},
    ),
    "weights off the device, whole stages, deferred": (
        4,
        MODELS["llama tied"],
        OFF
        | {
            "pp": 2,
            "pipeline_model_parallel_layout": STAGES[2, 2],
            "pipeline_schedule": "zb_v",
            "pipeline_max_unsharded_stages": 1,
        },
    ),
    "weights off the device, two copies of the model": (
        4,
        MODELS["llama tied"],
        OFF
        | {
            "pp": 2,
            "pipeline_model_parallel_layout": STAGES[2, 1],
            "pipeline_schedule": "dualpipe",
        },
    ),
    "gathered in 8 bits, ZeRO-1, half": (
        2,
        LLAMA,
        {"strategy": ZERO1, "optimizer_offload_fraction": 0.5, **GATHERED},
    ),
    "gathered in 8 bits, experts, uneven shards": (
        4,
        MIXTURE,
        {"strategy": ZERO3, "ep": 2, **GATHERED, "fp8_recipe": "delayed"},
    ),
}


@pytest.mark.parametrize(
    "case",
    chosen(
        CASES,
        "one rank",
        "ZeRO-1, half",
        "moments in 8 bits, ZeRO-3",
        "weights off the device, one rank",
        "gathered in 8 bits, ZeRO-1, half",
    ),
)
def test_every_layout_trains_to_the_same_bits(pool: Pool, case: str, tmp_path: Path) -> None:
    ranks, model, values = CASES[case]
    settings = config(model, ranks, **({"precision": "bf16"} | named(**values) | AWAY))
    on_disk = [*CASES].index(case) % 4 == 0  # some of the gate's
    settings = settings.with_values(optimizer_offload_path=str(tmp_path) if on_disk else None)
    if settings.memory.param_cpu_offload and [*CASES].index(case) % 4 < 2:
        settings = settings.with_values(param_offload_path=str(tmp_path))
    pool.run(ranks, _every_way, settings)


def _refused_saved_and_loaded(
    rank: int, world: int, settings: Config, other: dict[str, Any], folder: Path, rounds_alike: bool
) -> bool:
    """Whether all was compared: not where a way that rounds otherwise met what lies halfway."""
    here, away = settings.with_values(**other), settings
    first = _engine(away, rank, world)
    _step(first, 0)
    before = _state(first)
    found = first.gradients(own_batch(first, 1))
    result = first.apply(replace(found, grad_norm=found.grad_norm * torch.nan))
    assert not result.finite and first.steps == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in _state(first).items())
    assert first.optimizer.gradient(next(iter(first.trained))).isfinite().all()
    first.optimizer.zero_grad()

    second, third = _engine(here, rank, world), _engine(away, rank, world)
    for number, (giver, taker) in enumerate(((first, second), (second, third))):
        files = Checkpointer(folder / str(number))
        files.save(giver.steps, giver.written_tensors(), {})
        tensors = taker.stored_tensors()
        files.load(None, tensors)
        taker.after_load(giver.steps, tensors)
        if not rounds_alike and _halfway(_state(giver), _state(taker)):
            return False
        assert _step(giver, giver.steps) == _step(taker, taker.steps)
        true, held = _state(giver), _state(taker)
        if not rounds_alike and _halfway(true, held):
            return False
        for name, tensor in true.items():
            assert torch.equal(tensor.to(held[name].dtype), held[name].to(tensor.dtype)), name
    return True


def _halfway(*states: dict[str, Tensor]) -> bool:
    """Whether a weight of any rank lies halfway between two numbers of bf16, the lower one even.
    To compute with, it goes up beside remainders, since 32,768 is none, and down from fp32.
    """
    kept = (x for state in states for name, x in state.items() if "exp_avg" not in name)
    wide = (x.view(torch.int32) for x in kept if x.dtype == torch.float32)
    found = torch.tensor(any(bool((x & 0x1FFFF == 0x8000).any()) for x in wide))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(AWAY, id="host"),
        pytest.param(VISITING, id="device", marks=pytest.mark.exhaustive),
        pytest.param(
            AWAY | GATHERED | {"fp8_recipe": "delayed", "param_cpu_offload": False},
            id="host, gathered in 8 bits",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_refused_step_changes_no_bit_and_checkpoints_know_no_place(
    pool: Pool, tmp_path: Path, way: dict[str, Any]
) -> None:
    values = named(strategy=ZERO3, precision="bf16", optimizer_offload_fraction=0.7)
    values |= {"optimizer_offload_path": str(tmp_path / "away"), "param_cpu_offload": True} | way
    if values["param_cpu_offload"]:
        values |= {"param_offload_path": str(tmp_path / "away")}
    # Several types in one file, of which the narrow ones come last, and scales of blocks.
    values |= EIGHT | {"exp_avg_dtype": "bf16"}
    settings = config(TIED, 2, **values)
    pool.run(2, _refused_saved_and_loaded, settings, HERE, tmp_path, True)


def test_a_checkpoint_of_remainders_is_one_of_fp32_masters(pool: Pool, tmp_path: Path) -> None:
    # With gradients in bf16 both update piece by piece, and CPUs compute the same bits.
    aware = {"use_precision_aware_optimizer": True, "main_grads_dtype": "bf16"}
    aware["store_param_remainders"] = True
    layout = named(pp=2, pipeline_model_parallel_layout="Et|tL", precision="bf16")
    # Few weights, of which none may lie halfway between two numbers of bf16.
    settings = config(GPT, 2, **layout, **aware)
    fp32 = {"store_param_remainders": False}
    seeds = ((settings.with_values(seed=seed), tmp_path / str(seed)) for seed in range(8))
    runs = (pool.run(2, _refused_saved_and_loaded, s, fp32, folder, False) for s, folder in seeds)
    assert any(all(run) for run in runs), "every seed met a number halfway between two of bf16"


HELD = (
    "two copies of the model",
    "experts on two meshes, half",
    "moments in 8 bits, experts",
    "moments in 8 bits, ZeRO-3",
    "replicated, recomputed",
    "weights off the device, experts, half",
)


def _held(rank: int, world: int, settings: Config) -> tuple[float, ...]:
    """Bytes of weights, moments and host memory on this rank, and what theory says."""
    with patch.object(memory, "UPDATE_BUCKET", BUCKET):
        return _counted(_engine(settings, rank, world), rank)


def _counted(engine: Engine, rank: int) -> tuple[float, ...]:
    layout, optimizer = engine.layout, engine.optimizer
    pp_rank = layout.grid.coordinates(rank)["pp"]
    state = model_state(layout, pp_rank, ShardPlace.of(layout, rank))
    away = engine.model.offloaded or ()
    held = (local_tensor(p) for name, p in engine.parameters.items() if name not in away)
    weights = sum(weight.nbytes for weight in held)
    moments = sum(piece.local.nbytes for piece in optimizer.device.state_tensors().values())
    host = sum(tensor.nbytes for tensor in optimizer.host.tensors())
    buffers = sum(tensor.nbytes for tensor in optimizer.host.update_buffers())
    measured = weights, moments, host, optimizer.host.disk_bytes(), buffers
    return *measured, state.masters, state.optimizer, state.host, state.disk, state.update_buffers


@pytest.mark.parametrize(
    "where",
    chosen(
        [*product(HELD, (None, "away"))],
        *((case, [None, "away"][n % 2]) for n, case in enumerate(HELD)),
    ),
    ids=str,
)
def test_bytes_here_and_on_the_host_are_what_the_formula_says(
    pool: Pool, tmp_path: Path, where: tuple[str, str | None]
) -> None:
    case, folder = where
    ranks, model, values = CASES[case]
    settings = config(model, ranks, **({"precision": "bf16"} | named(**values) | AWAY))
    path = folder and str(tmp_path / folder)
    settings = settings.with_values(optimizer_offload_path=path)
    if settings.memory.param_cpu_offload:
        settings = settings.with_values(param_offload_path=path)
    for way in (AWAY, VISITING):
        for found in pool.run(ranks, _held, settings.with_values(**way)):
            measured, expected = found[:5], found[5:]
            assert measured == expected
            assert measured[2] and bool(measured[3]) == bool(folder)
            assert bool(measured[4]) == (way is VISITING)


def _spoilt(rank: int, world: int, settings: Config) -> str:
    engine = _engine(settings, rank, world)
    _step(engine, 0)
    engine.weight("layers.1.mlp.up_proj.weight").view(torch.int16)[3, 1] ^= 1  # in the file
    with pytest.raises(FivefoldError) as caught:
        _step(engine, 1)
    return str(caught.value)


def test_weights_that_come_back_from_a_disk_with_other_bytes_stop_the_run(
    pool: Pool, tmp_path: Path
) -> None:
    values = named(**OFF, **AWAY, precision="bf16", param_offload_path=str(tmp_path))
    (told,) = pool.run(1, _spoilt, config(LLAMA, 1, **values))
    assert "the block of layers.1." in told and "another --param-offload-path" in told
