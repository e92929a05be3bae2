from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.config.training import OptimizerConfig
from fivefold.mesh.slices import Piece, piece_of
from fivefold.optim.adamw import AdamW
from fivefold.optim.schedule import StepRates
from tests.mesh.layouts import LAYOUTS, content, parameters, world_size
from tests.pool import run
from tests.verify.cases import shared_groups

pytestmark = pytest.mark.slow

WORLDS = sorted({world_size(layout) for layout in LAYOUTS})
SOME, ALL = 2, len(LAYOUTS)


def state(layout: str) -> tuple[dict[str, nn.Parameter], dict[str, Tensor | Piece]]:
    """Parameters, and all that a checkpoint holds of them."""
    held = parameters(layout)
    optimizer = AdamW(held, OptimizerConfig())
    return held, {**held, **optimizer.state_tensors()}


def piece(tensor: Tensor | Piece) -> Piece:
    return tensor if isinstance(tensor, Piece) else piece_of(tensor)


@shared_groups()
def _save(rank: int, world: int, root: Path) -> None:
    for layout in (name for name in LAYOUTS if world_size(name) == world):
        _, tensors = state(layout)
        for name, held in tensors.items():
            piece(held).local.copy_(content(name, piece(held).shape)[piece(held).slices])
        Checkpointer(root / layout).save(3, tensors, {"layout": layout})


@shared_groups()
def _load(rank: int, world: int, root: Path, number: int) -> int:
    compared = 0
    for place, layout in enumerate(LAYOUTS):
        if world_size(layout) != world:
            continue
        _, tensors = state(layout)
        for source in sources(place, number):
            for held in tensors.values():
                piece(held).local.zero_()
            meta = Checkpointer(root / source).load(None, tensors)
            assert meta == {"layout": source}
            for name, held in tensors.items():
                part = piece(held)
                expected = content(name, part.shape)[part.slices]
                assert torch.equal(part.local, expected), (source, layout, name)
                compared += part.local.numel()
    return compared


def sources(place: int, number: int) -> list[str]:
    """So many layouts that the layout at this place loads: each is loaded as often as the others,
    and by layouts that differ from it most."""
    names, step = [*LAYOUTS], ALL // number
    return [names[(place + step * n + step // 2) % ALL] for n in range(number)]


@pytest.mark.parametrize("number", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)])
def test_every_layout_loads_into_others_bitwise(tmp_path: Path, number: int) -> None:
    for world in WORLDS:
        run(world, _save, tmp_path)
    sizes = {layout: written(tmp_path / layout) for layout in LAYOUTS}
    assert sizes["ddp2"] == sizes["plain"], "replicas are written once"
    assert sizes["hsdp 2x2"] == sizes["pp2 fsdp2"] < sizes["fsdp4"], "replicas are written once"
    elements = 3 * sum(parameter.numel() for parameter in parameters("plain").values())
    for world in WORLDS:
        compared = run(world, _load, tmp_path, number)
        layouts = sum(world_size(layout) == world for layout in LAYOUTS)
        assert sum(compared) >= layouts * number * elements


def written(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("step-*/*.distcp"))


@shared_groups()
def _train_then_compare(rank: int, world: int, root: Path, layout: str) -> None:
    """Two steps, save, load into a fresh optimizer, and one more step."""
    straight, tensors = state(layout)
    optimizer = AdamW(straight, OptimizerConfig())
    checkpointer = Checkpointer(root)
    resumed = parameters(layout)
    for step in range(3):
        if step == 2:
            tensors = {**straight, **optimizer.state_tensors()}
            checkpointer.save(step, tensors, {"steps": optimizer.steps})
            again = AdamW(resumed, OptimizerConfig())
            meta = checkpointer.load(step, {**resumed, **again.state_tensors()})
            again.steps = meta["steps"]
            apply(again, resumed, step)
        apply(optimizer, straight, step)
    for name, parameter in straight.items():
        assert torch.equal(piece_of(parameter).local, piece_of(resumed[name]).local)


def apply(optimizer: AdamW, held: dict[str, nn.Parameter], step: int) -> None:
    for name, parameter in held.items():
        grad = torch.zeros_like(parameter)
        part = piece_of(grad)
        part.local.copy_(content(f"{name} grad {step}", part.shape)[part.slices])
        parameter.grad = grad
    optimizer.step(StepRates(0.1, 0.1, 0.1))


@pytest.mark.parametrize("layout", ["tp2", "fsdp2 tp2"])
def test_training_continues_bitwise(tmp_path: Path, layout: str) -> None:
    run(world_size(layout), _train_then_compare, tmp_path, layout)
