"""Delayed scales of 8-bit operands as a part of a run's state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import CheckpointError
from fivefold.mesh.slices import piece_of
from fivefold.model.eight_bit.rules import SCALES
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches
from tests.engines import own_batch
from tests.pool import run
from tests.verify.cases import LLAMA, MIXTURE, chosen, config, flags, named, shared_groups

LATE = {
    "precision": "bf16",
    "fp8_format": "hybrid",
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 3,
    "fp8_amax_compute_algo": "max",
}
ONE: dict[str, Any] = flags()
SPLIT = flags(tp=2, pp=2, stages="Et|ttL", sequence=True)
EXPERTS = named(ep=2, tp=2, strategy="optim")
COPIES = flags(pp=2, stages="Et|ttL") | {"pipeline_schedule": "dualpipe"}
Scales = dict[str, tuple[tuple[slice, ...], tuple[int, ...], bytes]]
Found = tuple[list[float], dict[str, bytes], Scales]


def _engine(rank: int, world: int, model: Any, settings: dict[str, Any]) -> Engine:
    layout = check(config(model, world, **LATE | settings), world)
    return Engine(layout, rank, torch.device("cpu"))


def _train(engine: Engine, steps: range) -> list[float]:
    found: list[float] = []
    for step in steps:
        result = engine.step(own_batch(engine, step))
        found += [result.loss, result.grad_norm]
    return found


def _state(engine: Engine) -> tuple[dict[str, bytes], Scales]:
    """Bits of this rank's weights; places, shapes and bits of its scales."""
    kept = engine.optimizer.weights().items()
    weights = {name: piece.local.detach().numpy().tobytes() for name, piece in kept}
    scales = engine.model.scaling.stored(copies=True)
    return weights, {
        name: (each.slices, tuple(each.local.shape), each.local.numpy().tobytes())
        for name, each in scales.items()
    }


def _scales(found: Scales, name: str) -> torch.Tensor:
    _, shape, bits = found[name]
    return torch.frombuffer(bytearray(bits), dtype=torch.float32).view(shape)


def _load(engine: Engine, folder: Path, step: int) -> None:
    engine.model.scaling.reset()
    tensors = engine.stored_tensors()
    Checkpointer(folder).load(step, tensors)
    engine.after_load(step, tensors)


@shared_groups()
def _saved(
    rank: int, world: int, model: Any, settings: dict[str, Any], folder: Path
) -> tuple[Found, Found]:
    """State at a save after two steps, and what follows in two more."""
    engine = _engine(rank, world, model, settings)
    losses = _train(engine, range(2))
    Checkpointer(folder).save(2, engine.written_tensors(), {})
    state = losses, *_state(engine)
    return state, (_train(engine, range(2, 4)), *_state(engine))


@shared_groups()
def _resumed(
    rank: int, world: int, model: Any, settings: dict[str, Any], folder: Path
) -> tuple[Found, Found]:
    engine = _engine(rank, world, model, settings)
    _train(engine, range(1))  # as when a run is rewound
    _load(engine, folder, 2)
    state = [], *_state(engine)
    return state, (_train(engine, range(2, 4)), *_state(engine))


CASES: dict[str, tuple[int, Any, dict[str, Any], int, dict[str, Any]]] = {
    "split, one rank": (4, LLAMA, SPLIT, 1, ONE),
    "one rank, two copies": (1, LLAMA, ONE, 2, COPIES),
    "two copies, split": (2, LLAMA, COPIES, 4, SPLIT),
    "experts, one rank": (4, MIXTURE, EXPERTS, 1, named()),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", chosen(CASES, "one rank, two copies"))
def test_a_run_goes_on_with_its_scales_in_any_layout(case: str, tmp_path: Path) -> None:
    world, model, settings, other, others = CASES[case]
    before = run(world, _saved, model, settings, tmp_path)
    again = run(world, _resumed, model, settings, tmp_path)
    for (state, then), (loaded, after) in zip(before, again, strict=True):
        assert state[1:] == loaded[1:] and then == after  # to the bit
    assert before[0][0][2] != before[0][1][2]
    (whole,) = run(1, _resumed, model, named() if model is MIXTURE else ONE, tmp_path)
    for found in (before, run(other, _resumed, model, others, tmp_path)):
        for state, _ in found:
            for name, (place, *_) in state[2].items():
                assert torch.equal(_scales(state[2], name), _scales(whole[0][2], name)[place])


def _trained(rank: int, world: int, settings: dict[str, Any]) -> Found:
    engine = _engine(rank, world, LLAMA, settings)
    return _train(engine, range(3)), *_state(engine)


def test_recomputation_changes_no_bit() -> None:
    plain = run(1, _trained, {})
    for again in (
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    ):
        assert run(1, _trained, again) == plain


def _left_out(rank: int, world: int) -> None:
    engine = _engine(0, 1, LLAMA, {})
    _train(engine, range(2))
    before = _state(engine)
    asked = engine.layout.config
    rows = slice(0, asked.training.global_batch_size)
    engine.step(microbatches(asked, global_batch(asked, 5), rows), limit=0.0)
    engine.optimizer.zero_grad()
    engine.evaluate([microbatches(asked, global_batch(asked, 6), rows)])
    assert _state(engine) == before
    straight = _engine(0, 1, LLAMA, {})
    _train(straight, range(2))
    assert _train(engine, range(2, 4)) == _train(straight, range(2, 4))
    assert _state(engine) == _state(straight)


def test_a_step_that_is_left_out_does_not_count() -> None:
    run(1, _left_out)


def _other_recipes(rank: int, world: int, folder: Path) -> None:
    whole = {"fp8_recipe": "tensorwise", "fp8_amax_history_len": 1}
    whole["fp8_amax_compute_algo"] = "most_recent"
    now, late = _engine(0, 1, LLAMA, whole), _engine(0, 1, LLAMA, {})
    for name, engine in (("now", now), ("late", late)):
        _train(engine, range(2))
        Checkpointer(folder / name).save(2, engine.written_tensors(), {})
    _load(late, folder / "now", 2)
    scales = _state(late)[1]
    for name in scales:
        assert (_scales(scales, name) == float(name.endswith(".scale"))).all()
    _load(now, folder / "late", 2)  # which has scales that are not asked for
    stored = {n: piece_of(p) for n, p in now.parameters.items()}
    assert not any(name.startswith(SCALES) for name in stored | now.stored_tensors())
    longer = _engine(0, 1, LLAMA, {"fp8_amax_history_len": 4})
    with pytest.raises(CheckpointError, match="--fp8-amax-history-len 3"):
        _load(longer, folder / "late", 2)


def test_scales_begin_where_a_checkpoint_has_none(tmp_path: Path) -> None:
    run(1, _other_recipes, tmp_path)


def _losses(rank: int, world: int) -> list[float]:
    engine = _engine(rank, world, LLAMA, {"lr": 3e-3, "lr_decay_style": "constant"})
    asked = engine.layout.config
    batch = microbatches(asked, global_batch(asked, 0), slice(0, asked.training.global_batch_size))
    return [engine.step(batch).loss for _ in range(12)]


def test_it_learns() -> None:
    """From scales of 1, with which small gradients vanish."""
    (losses,) = run(1, _losses)
    assert losses[-1] < 0.9 * losses[0]
