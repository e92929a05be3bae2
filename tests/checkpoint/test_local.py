"""States in the memory of hosts: whatever single host is lost, every rank gets its own back."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint.local import LocalCheckpoints, latest_complete
from fivefold.errors import CheckpointError
from tests.pool import run

Tensors = dict[str, torch.Tensor]


def tensors(rank: int, step: int) -> Tensors:
    """Other sizes on other ranks, an empty part and several types."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {
        "weight": torch.randn(rank % 3, 5, generator=generator, dtype=torch.float64),
        "moment": torch.randn(7 * rank + 1, generator=generator).bfloat16(),
        "count": torch.tensor(step + rank),
    }


def host_of(rank: int, each: int) -> str:
    return f"host{rank // each}"


def save(rank: int, world: int, root: Path, each: int, steps: list[int]) -> None:
    local = opened(rank, root, each)
    for step in steps:
        local.save(step, tensors(rank, step), {"step": step})
    local.wait()


def opened(rank: int, root: Path, each: int) -> LocalCheckpoints:
    host = host_of(rank, each)
    return LocalCheckpoints(root / host, host)


def load(rank: int, world: int, root: Path, each: int) -> tuple[int | None, Any, Tensors]:
    local = opened(rank, root, each)
    mine = {name: torch.zeros_like(t) for name, t in tensors(rank, 0).items()}
    step = local.find(mine)
    meta = None if step is None else local.load(mine)
    return step, meta, mine


def same(a: Tensors, b: Tensors) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("world", "each"), [(4, 1), (8, 2), (8, 4)])
def test_a_lost_host_loses_nothing(tmp_path: Path, world: int, each: int) -> None:
    run(world, save, tmp_path / "whole", each, [10, 20, 30])
    for host in range(world // each):
        left = tmp_path / f"without{host}"
        shutil.copytree(tmp_path / "whole", left, ignore=shutil.ignore_patterns(f"host{host}"))
        for rank, (step, meta, found) in enumerate(run(world, load, left, each)):
            assert step == 30 and meta == {"step": 30}
            assert same(found, tensors(rank, 30))


def test_two_states_are_kept_and_an_incomplete_one_is_passed_over(tmp_path: Path) -> None:
    run(4, save, tmp_path, 4, [10, 20, 30])
    (folder,) = tmp_path.iterdir()  # one host keeps no second copies
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000030"]
    assert len([*folder.glob("step-*/*")]) == 8
    assert latest_complete(folder, 4) == 30
    next(folder.glob("step-00000030/rank-00002-*")).unlink()
    assert latest_complete(folder, 4) == 20
    for rank, (step, _, found) in enumerate(run(4, load, tmp_path, 4)):
        assert step == 20 and same(found, tensors(rank, 20))


def other_layout(rank: int, world: int, root: Path) -> int | None:
    return opened(rank, root, 2).find({"weight": torch.zeros(3)})


def removed(rank: int, world: int, root: Path) -> None:
    local = opened(rank, root, 2)
    local.save(40, tensors(rank, 40), {})
    local.remove()


def test_another_layout_takes_none_and_nothing_is_left_at_the_end(tmp_path: Path) -> None:
    run(4, save, tmp_path, 2, [10])
    assert run(4, other_layout, tmp_path) == [None] * 4
    for name in (".tmp-0-rank-00001-x.safetensors", ".tmpV5hthB"):  # of a rank that was killed
        (tmp_path / "host0" / "step-00000010" / name).touch()
    run(4, removed, tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert latest_complete(tmp_path / "host0", 4) is None


def damaged(rank: int, world: int, root: Path) -> tuple[str, bool]:
    local = opened(rank, root, 2)
    mine = {name: torch.zeros_like(t) for name, t in tensors(rank, 0).items()}
    assert local.find(mine) == 10
    try:
        local.load(mine)
    except CheckpointError as error:
        return str(error), not any(t.any() for t in mine.values())
    return "", False


def test_a_damaged_file_changes_nothing(tmp_path: Path) -> None:
    run(2, save, tmp_path, 2, [10])
    path = next(tmp_path.glob("*/*/rank-00001-*"))
    path.write_bytes(path.read_bytes()[:100])
    for message, untouched in run(2, damaged, tmp_path):
        assert f"rank 1: {path} is damaged" in message and untouched


def full(rank: int, world: int, root: Path) -> str:
    local = opened(rank, root, 1)
    if rank == 1:
        (root / "host1").write_text("no folder can be here")
    local.save(10, tensors(rank, 10), {})
    try:
        local.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_write_is_told_by_all(tmp_path: Path) -> None:
    for message in run(2, full, tmp_path):
        assert "keeping states in" in message and "rank 0: rank 1 could not keep" in message
        assert "rank 1: " in message
