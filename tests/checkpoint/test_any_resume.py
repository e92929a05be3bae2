"""Whatever goes together goes on from a checkpoint: to the bit in its layout, to 1e-12 in another.

A step's loss is of the weights that were loaded, and the next one's of the moments, too.
"""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.config import SECTIONS, Config
from fivefold.config.settings import settings_of
from fivefold.errors import ConfigError
from fivefold.mesh.slices import as_piece
from fivefold.train.engine import Engine
from fivefold.verify.shrink import prepare
from fivefold.verify.standing_in import experts_depend
from tests.engines import own_batch
from tests.pool import run
from tests.verify.any_settings import ALL, CHOICES, draw
from tests.verify.cases import chosen, config, shared_groups

pytestmark = pytest.mark.slow

SEEDS = range(100)
SAVED, LAST = 2, 4
PLACES = {each.name for name in ("parallel", "memory") for each in settings_of(SECTIONS[name])}
# By which numbers change, or which decide what is rounded together.
ROUNDS = {
    *("grad_reduce_in_bf16", "ddp_reduce_scatter_with_fp32_accumulation"),
    *("zero_quantized_weights", "zero_quantized_gradients"),
    *("zero_hpz_partition_size", "zero_qgz_partition_size"),
}
NARROW = {"main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"}
Found = tuple[list[float], dict[str, bytes]]


def _engine(rank: int, world: int, settings: Config, *, initialises: bool) -> Engine:
    layout = check(settings, world)
    return Engine(layout, rank, torch.device("cpu"), initialises=initialises)


def _train(engine: Engine, steps: range) -> list[float]:
    results = [engine.step(own_batch(engine, step)) for step in steps]
    return [number for result in results for number in (result.loss, result.grad_norm)]


def _rest(engine: Engine) -> Found:
    """What follows the save, and the bits of all that this rank would save in the end."""
    losses, bits = _train(engine, range(SAVED, LAST)), {}
    for name, stored in engine.stored_tensors().items():
        local = as_piece(stored).local.detach().contiguous()
        bits[name] = local.flatten().view(torch.uint8).numpy().tobytes()
    return losses, bits


@shared_groups()
def _undisturbed(rank: int, world: int, settings: Config, folder: Path) -> Found:
    engine = _engine(rank, world, settings, initialises=True)
    _train(engine, range(SAVED))
    Checkpointer(folder).save(SAVED, engine.written_tensors(), {})
    return _rest(engine)


@shared_groups()
def _resumed(rank: int, world: int, settings: Config, folder: Path, beyond: int) -> Found:
    """What follows where the state is loaded, after `beyond` other steps, as when rewound."""
    engine = _engine(rank, world, settings, initialises=beyond > 0)
    _train(engine, range(beyond))
    engine.model.scaling.reset()
    tensors = engine.stored_tensors()
    Checkpointer(folder).load(SAVED, tensors)
    engine.after_load(SAVED, tensors)
    return _rest(engine)


def _elsewhere(
    random: Random, name: str, ranks: int, settings: dict[str, Any], of: Config
) -> Config | None:
    """Another layout of the same training on so many ranks, if one is found."""
    kept = {key: value for key, value in settings.items() if key not in PLACES}
    kept["global_batch_size"] = of.training.global_batch_size
    free = sorted((PLACES & set(CHOICES)) - ROUNDS)
    drawn = draw(random, lambda more: check(config(ALL[name], ranks, **kept | more), ranks), free)
    try:
        other = prepare(check(config(ALL[name], ranks, **kept | drawn), ranks))[0]
    except ConfigError:
        return None
    same = replace(other.config, parallel=of.parallel, memory=of.memory)
    return other.config if same == of else None


@pytest.mark.parametrize("seed", chosen(SEEDS, 32))
def test_what_goes_together_goes_on(seed: int, tmp_path: Path) -> None:
    random = Random(seed)
    name, ranks = random.choice(sorted(ALL)), random.choice((1, 2, 2, 4, 4))
    settings = draw(random, lambda drawn: check(config(ALL[name], ranks, **drawn), ranks))
    shown = f"{name} on {ranks}: {settings}"
    try:
        of = prepare(check(config(ALL[name], ranks, **settings), ranks))[0].config
    except ConfigError as refused:  # of what rounds to 8 bits, in fp32
        assert "a last bit of fp32 decides" in str(refused), shown
        return
    whole = run(ranks, _undisturbed, of, tmp_path)
    for beyond in (0, 1):
        again = run(ranks, _resumed, of, tmp_path, beyond)
        assert again == whole, f"{shown}, {beyond} steps beyond"
    exact = of.training.precision == "fp64" and not (ROUNDS | NARROW) & set(settings)
    if not exact or of.training.fp8_format is not None or experts_depend(of):
        return
    ranks = random.choice((1, 2, 4))
    if (other := _elsewhere(random, name, ranks, settings, of)) is not None:
        found = run(ranks, _resumed, other, tmp_path, 0)
        assert found[0][0] == pytest.approx(whole[0][0], rel=1e-12), f"{shown}\n{other.parallel}"
