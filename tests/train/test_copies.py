"""Copies of the model, or of its embedding: one set of weights in the checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.check import check
from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.mesh.slices import local_tensor
from fivefold.train.engine import Engine
from fivefold.verify.batches import global_batch, microbatches
from tests.pool import run
from tests.verify.cases import LLAMA, config

SETTINGS: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Et|ttL",
}
Bits = dict[str, bytes]


def _engine(rank: int, world: int, schedule: str, tied: bool) -> Engine:
    settings = config(LLAMA, **SETTINGS, pipeline_schedule=schedule)
    settings = settings.with_values(untie_embeddings_and_output_weights=not tied)
    return Engine(check(settings, world), rank, torch.device("cpu"))


def _bits(engine: Engine) -> Bits:
    """Weights and optimizer state by name."""
    state = {n: piece.local for n, piece in engine.optimizer.state_tensors().items()}
    weights = {n: local_tensor(p) for n, p in engine.parameters.items()}
    return {n: t.numpy().tobytes() for n, t in {**weights, **state}.items()}


def _train_and_save(rank: int, world: int, schedule: str, tied: bool, folder: Path) -> Bits:
    engine = _engine(rank, world, schedule, tied)
    for step in range(2):
        rows = slice(0, engine.layout.config.training.global_batch_size)
        batch = global_batch(engine.layout.config, step)
        engine.step(microbatches(engine.layout.config, batch, rows))
    tensors: dict[str, Any] = engine.written_tensors()
    Checkpointer(folder).save(2, tensors, {"step": 2})
    return _bits(engine)


def _load(rank: int, world: int, schedule: str, tied: bool, folder: Path) -> Bits:
    engine = _engine(rank, world, schedule, tied)
    tensors: dict[str, Any] = engine.stored_tensors()
    Checkpointer(folder).load(2, tensors)
    engine.after_load(2, tensors)
    return _bits(engine)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "tied"),
    [
        ("dualpipe", "1f1b", True),
        ("1f1b", "dualpipe", False),
        pytest.param("dualpipe", "1f1b", False, marks=pytest.mark.exhaustive),
        pytest.param("1f1b", "dualpipe", True, marks=pytest.mark.exhaustive),
    ],
)
def test_copies_come_and_go_with_a_checkpoint(
    saved: str, loaded: str, tied: bool, tmp_path: Path
) -> None:
    before = run(2, _train_and_save, saved, tied, tmp_path)
    after = run(2, _load, loaded, tied, tmp_path)
    one = after if loaded == "1f1b" else before
    two = before if saved == "dualpipe" else after
    whole = {name: bits for held in one for name, bits in held.items()}
    assert set(whole) == set(two[0]) == set(two[1])
    assert two[0] == two[1] == whole


SCHEDULE, STAGES = "pipeline_schedule", "pipeline_model_parallel_layout"
# Where the predictions are, and with them a copy of the embedding: on the rank of the original, on
# that of a tied output layer, in the layer's own stage or not.
LAYOUTS = ("Et|ttmL", "v:Et|t|t|mL", "Et|tt|m|L", "Et|t|tm|L")


def _predicting(rank: int, world: int, layout: str, tied: bool) -> Engine:
    settings = config(LLAMA, mtp_num_layers=1, untie_embeddings_and_output_weights=not tied)
    stages = {} if world == 1 else SETTINGS | {SCHEDULE: "gpipe", STAGES: layout}
    return Engine(check(settings.with_values(**stages), world), rank, torch.device("cpu"))


def _save_predictions(rank: int, world: int, layout: str, tied: bool, folder: Path) -> Bits:
    engine = _predicting(rank, world, layout, tied)
    whole = slice(0, engine.layout.config.training.global_batch_size)
    batch = global_batch(engine.layout.config, 0)
    engine.step(microbatches(engine.layout.config, batch, whole))
    tensors: dict[str, Any] = engine.written_tensors()
    Checkpointer(folder).save(1, tensors, {"step": 1})
    return _bits(engine)


def _load_predictions(rank: int, world: int, layout: str, tied: bool, folder: Path) -> Bits:
    engine = _predicting(rank, world, layout, tied)
    tensors: dict[str, Any] = engine.stored_tensors()
    Checkpointer(folder).load(1, tensors)
    engine.after_load(1, tensors)
    return _bits(engine)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_every_copy_of_the_embedding_is_loaded(tied: bool, tmp_path: Path) -> None:
    (whole,) = run(1, _save_predictions, "", tied, tmp_path)
    names = ("mtp_embed_tokens.weight", "embed_tokens.weight", *["lm_head.weight"] * tied)
    for layout in LAYOUTS:
        for held in run(2, _load_predictions, layout, tied, tmp_path):
            for name, bits in held.items():
                copy = next((copy for copy in names if name.endswith(copy)), "")
                stored = name.removesuffix(copy) + ("embed_tokens.weight" if copy else "")
                assert bits == whole[stored], (layout, name)
