"""What no device reports: a bit that changed in one replica, or a loss that one replica computes
otherwise, is found in every layout, and nothing is found where nothing is wrong."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.check import check
from fivefold.config.config import Config
from fivefold.data.packing import Microbatch
from fivefold.errors import ConfigError
from fivefold.mesh.grid import EXPERT_AXES
from fivefold.mesh.slices import local_tensor
from fivefold.optim.adamw import STATES, state_name
from fivefold.optim.rounding import MASTER, REMAINDER
from fivefold.train.engine import Engine
from fivefold.train.health.silent_errors import SilentErrors, fingerprint, odd_ones
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.verify.cases import LLAMA, MODELS, chosen, config, named, shared_groups

STAGES = {"pipeline_model_parallel_layout": "Et|ttL"}
AWARE = {"use_precision_aware_optimizer": True}
TWO = {"num_distributed_optimizer_instances": 2}
SHORT = {"num_layers": 2}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "bf16": (2, "llama", named(precision="bf16", **SHORT)),
    "bf16 and remainders": (
        2,
        "llama",
        named(precision="bf16", store_param_remainders=True, **AWARE, **SHORT),
    ),
    "masters on the host": (
        2,
        "llama",
        named(precision="bf16", optimizer_cpu_offload=True, **SHORT),
    ),
    "moments in 8 bits": (
        2,
        "llama",
        named(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8", **AWARE, **SHORT),
    ),
    "tp": (4, "llama", named(tp=2, **SHORT)),
    "sp, cp": (8, "llama", named(tp=2, cp=2, sequence_parallel=True)),
    "pp, tied": (4, "llama tied", named(pp=2, **STAGES)),
    "replicas of shards": (4, "llama", named(strategy="optim_grads_params", **TWO, **SHORT)),
    "replicas of states": (8, "llama tied", named(tp=2, strategy="optim", **TWO)),
    "two copies": (4, "llama tied", named(pp=2, pipeline_schedule="dualpipe", **STAGES)),
    "experts": (4, "oss", named(ep=2, **SHORT)),
    "replicas of expert shards": (8, "oss", named(ep=2, strategy="optim_grads", **TWO)),
}


class Batches:
    """Stands for the loader: the batch of each data-parallel rank."""

    def __init__(self, settings: Config, dp: int) -> None:
        self._settings, self._dp = settings, dp

    def batch_of(self, dp_rank: int) -> list[Microbatch]:
        size = self._settings.training.global_batch_size // self._dp
        rows = slice(dp_rank * size, (dp_rank + 1) * size)
        return microbatches(self._settings, global_batch(self._settings, 0), rows)


def trained(rank: int, world: int, model: str, values: dict[str, Any]) -> Engine:
    settings = config(MODELS[model], world, **values)
    weights = "check_weight_hash_across_dp_replicas_interval"
    settings = settings.with_values(**{weights: 1})
    engine = Engine(check(settings, world), rank, torch.device("cpu"))
    grid = engine.layout.grid
    engine.step(Batches(engine.layout.config, grid.dp).batch_of(grid.dp_rank(rank)))
    return engine


def compare_weights(rank: int, world: int, model: str, values: dict[str, Any]) -> list[Any]:
    """What is found after a step, and then with a bit changed on each rank in turn."""
    with shared_groups():
        engine = trained(rank, world, model, values)
        errors = SilentErrors(engine, None)  # type: ignore[arg-type]
        found = [("", errors.look(1, saving=False))]
        for step, wrong in zip(range(2, 5 * world, 5), range(world), strict=False):
            names = [n for n, p in engine.parameters.items() if local_tensor(p).numel()]
            name = names[step % len(names)]
            told, changed = name, local_tensor(engine.parameters[name])
            if step % 2 and name in engine.optimizer.host:
                told, changed = f"{MASTER}.{name}", engine.optimizer.host.masters()[name].local
            elif step % 2:
                state = engine.optimizer.device._state[name]
                changed = state.get(MASTER, state.get(REMAINDER, changed))
            bits = changed.view(torch.int16).flatten()
            if rank == wrong:
                bits[-1] ^= 1
            found.append((told, errors.look(step, saving=bool(step % 2))))
            if rank == wrong:
                bits[-1] ^= 1
            kept = engine.optimizer.state_tensors()
            moments = [moment for kind in STATES if (moment := state_name(kind, name)) in kept]
            moment = moments[step % len(moments)]
            bits = kept[moment].local.view(torch.uint8).flatten()
            if rank == wrong:
                bits[0] ^= 1
            found.append((moment, errors.look(step + 1, saving=True)))
            if rank == wrong:
                bits[0] ^= 1
        return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    chosen(
        LAYOUTS,
        *("bf16", "bf16 and remainders", "masters on the host", "moments in 8 bits"),
        *("pp, tied", "replicas of shards", "two copies", "experts"),
    ),
)
def test_a_changed_bit_is_found_and_named(layout: str) -> None:
    world, model, values = LAYOUTS[layout]
    grid = check(config(MODELS[model], world, **values), world).grid
    found = run(world, compare_weights, model, values)
    assert [looks[0] for looks in found] == [("", [])] * world
    for number in range(1, 2 * world + 1):
        wrong = (number - 1) // 2
        lines = {tuple(looks[number][1]) for looks in found}
        ((line,),) = lines  # one line, the same on every rank
        assert f"rank {wrong} {grid.name(wrong)}" in line
        assert line.endswith(" is not that of its replicas")
        changed = found[wrong][number][0].removeprefix("optim.")
        told = line.split(" of rank")[0].replace(" of ", ".")
        # Copies of an embedding and of a model go by the name of the first.
        assert told in (changed, re.sub(r"output_layer|lm_head", "embed_tokens", changed))


WHOLE = "layers.1.input_layernorm.weight"


def compare_over_tp(rank: int, world: int) -> list[str]:
    """What is found where both data-parallel replicas have the same wrong bit, of a whole weight"""
    with shared_groups():
        engine = trained(rank, world, *LAYOUTS["tp"][1:])
        errors = SilentErrors(engine, None)  # type: ignore[arg-type]
        assert errors.look(1, saving=False) == []
        if engine.layout.grid.coordinates(rank)["tp"]:
            local_tensor(engine.parameters[WHOLE]).view(torch.int64)[-1] ^= 1
        return errors.look(2, saving=False)


@pytest.mark.slow
def test_ranks_of_tensor_parallelism_have_the_same_whole_weights() -> None:
    (line,) = {tuple(found) for found in run(4, compare_over_tp)}
    assert len(line) == 1 and line[0].startswith(f"{WHOLE} of rank 0"), line


def compare_losses(rank: int, world: int, values: dict[str, Any], wrong: int) -> list[str]:
    with shared_groups():
        settings = config(LLAMA, world, **values)
        settings = settings.with_values(check_loss_across_dp_replicas_interval=2)
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        errors = SilentErrors(engine, Batches(engine.layout.config, engine.layout.grid.dp))  # type: ignore[arg-type]
        assert errors.look(1, saving=False) == errors.look(2, saving=True) == []
        with spoilt(engine) if rank == wrong else patch.object(engine, "device", engine.device):
            found = errors.look(2, saving=False)
        assert all(stage.training for stage in engine.model.stages.values())
        return found


@contextmanager
def spoilt(engine: Engine) -> Iterator[None]:
    """The least error of this rank's loss that there is."""
    original = engine._loss

    def other(batch: list[Microbatch]) -> torch.Tensor:
        loss = original(batch)
        return torch.nextafter(loss, torch.full_like(loss, torch.inf))

    with patch.object(engine, "_loss", other):
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "values", "wrong"),
    [
        (2, named(attention_dropout=0.1, hidden_dropout=0.1, **SHORT), 1),
        (4, named(strategy="optim_grads_params", **SHORT), 2),
        pytest.param(4, named(cp=2, **SHORT), 3, marks=pytest.mark.exhaustive),
        pytest.param(
            8, named(tp=2, pp=2, strategy="optim", **STAGES), 5, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_loss_that_one_replica_computes_otherwise_is_found(
    world: int, values: dict[str, Any], wrong: int
) -> None:
    grid = check(config(LLAMA, world, **values), world).grid
    assert run(world, compare_losses, values, -1) == [[]] * world
    ((line,),) = {tuple(found) for found in run(world, compare_losses, values, wrong)}
    assert f"rank {wrong} {grid.name(wrong)}" in line
    assert " computed a loss of " in line and " from the same microbatches" in line
    replicas = grid.group_of(wrong, ("dp_replicate", "dp_shard"))
    others = [r for r in replicas if r != wrong and f"rank {r} " in line]
    assert others == ([] if len(replicas) > 2 else [r for r in replicas if r != wrong])


ALONE = {
    "experts": (2, named(**SHORT)),
    "divided within tp": (4, named(tp=2, ep=2, **SHORT)),
    "split within cp": (4, named(cp=2, etp=2, **SHORT)),
}


def compare_experts(rank: int, world: int, values: dict[str, Any]) -> list[str]:
    with shared_groups():
        settings = config(MODELS["oss"], world, **values)
        settings = settings.with_values(check_loss_across_dp_replicas_interval=1)
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        batches = Batches(engine.layout.config, engine.layout.grid.dp)
        engine.step(batches.batch_of(engine.layout.grid.dp_rank(rank)))
        return SilentErrors(engine, batches).look(1, saving=False)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(ALONE, "divided within tp"))
def test_experts_that_each_replica_has_are_compared(case: str) -> None:
    world, values = ALONE[case]
    assert run(world, compare_experts, values) == [[]] * world


@pytest.mark.parametrize(("tp", "cp"), product((1, 2), repeat=2))
@pytest.mark.parametrize(("ep", "etp"), product((1, 2, 4), (1, 2)))
def test_replicas_that_compute_experts_together_are_not_compared(
    tp: int, cp: int, ep: int, etp: int
) -> None:
    """Each has other tokens of its own in the same message, so that healthy ones would differ."""
    world, losses = 2 * tp * cp, {"check_loss_across_dp_replicas_interval": 1}
    if world % (ep * etp):
        pytest.skip("no such layout")
    settings = config(MODELS["oss"], world, **named(tp=tp, cp=cp, ep=ep, etp=etp))
    grid = check(settings, world).grid
    together = grid.groups(("ep", "etp"), EXPERT_AXES)
    if all(len({grid.dp_rank(rank) for rank in ranks}) == 1 for ranks in together):
        check(settings.with_values(**losses), world)
        return
    with pytest.raises(ConfigError, match="experts are divided among them"):
        check(settings.with_values(**losses), world)


def compare_gradients(rank: int, world: int, values: dict[str, Any], wrong: int) -> list[str]:
    """What is found where the backward of a rank goes wrong in its last layer, and the loss of the
    step after that; -1: nothing is looked for."""
    with shared_groups():
        settings = config(LLAMA, world, **values)
        settings = settings.with_values(check_loss_across_dp_replicas_interval=2)
        engine = Engine(check(settings, world), rank, torch.device("cpu"))
        batches = Batches(engine.layout.config, engine.layout.grid.dp)
        errors = SilentErrors(engine, batches)  # type: ignore[arg-type]
        own = batches.batch_of(engine.layout.grid.dp_rank(rank))
        engine.step(own)
        layer = [*engine.model.stages[max(engine.model.stages)].layers.values()][-1].mlp
        forward = layer.forward

        def spoilt_forward(*inputs: Any) -> torch.Tensor:
            out = forward(*inputs)
            if out.requires_grad and rank == wrong:
                out.register_hook(lambda grad: torch.nextafter(grad, grad.new_tensor(torch.inf)))
            return out

        found = []
        if wrong >= 0:
            with patch.object(layer, "forward", spoilt_forward):
                found = errors.look(2, saving=False)
            assert errors.look(4, saving=False) == []
        return [*found, engine.step(own).loss.hex()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "values"),
    [
        (2, named(attention_dropout=0.1, hidden_dropout=0.1, **SHORT)),
        pytest.param(4, named(strategy="optim_grads_params"), marks=pytest.mark.exhaustive),
        (4, named(strategy="optim_grads", cp=2, **SHORT)),
        pytest.param(
            8, named(tp=2, pp=2, strategy="optim", **STAGES), marks=pytest.mark.exhaustive
        ),
        (4, named(pp=2, pipeline_schedule="zb_h1", **STAGES)),
        pytest.param(4, named(strategy="optim", **TWO), marks=pytest.mark.exhaustive),
    ],
)
def test_a_gradient_that_one_replica_computes_otherwise_is_found(
    world: int, values: dict[str, Any]
) -> None:
    """An error in a backward alone, which the loss does not show; the run is not changed by it."""
    layout = check(config(LLAMA, world, **values), world)
    grid, layers, wrong = layout.grid, layout.config.model.num_layers, world - 1
    *lines, left = zip(*run(world, compare_gradients, values, wrong), strict=True)
    assert {*left} == {run(world, compare_gradients, values, -1)[0][-1]}
    assert len(lines) >= 1 and all(len({*line}) == 1 for line in lines)
    said = [line[0] for line in lines]
    assert f"gradient of layers.{layers - 1}.mlp." in said[0], said
    assert all(" from the same microbatches than " in line for line in said)
    assert any(f"rank {wrong} {grid.name(wrong)}" in line for line in said), said


@given(
    size=st.integers(1, 5000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]),
    data=st.data(),
)
def test_any_bit_changes_the_fingerprint(
    size: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(size)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    place = data.draw(st.integers(0, raw.numel() - 1))
    bit = data.draw(st.integers(0, 7))
    with patch(
        "fivefold.train.health.silent_errors._PIECE", data.draw(st.sampled_from([7, 1000, 1 << 20]))
    ):
        before = fingerprint(raw.view(dtype))
        raw[place] ^= 1 << bit
        assert int(before) != int(fingerprint(raw.view(dtype)))


def test_the_odd_ones_are_those_that_differ_from_most() -> None:
    assert odd_ones({3: "a", 5: "a", 7: "a"}) == []
    assert odd_ones({3: "a", 5: "b", 7: "a"}) == [5]
    assert odd_ones({3: "a", 5: "b"}) == [3, 5]
    assert odd_ones({0: "a", 1: "a", 2: "b", 3: "b"}) == [0, 1, 2, 3]
