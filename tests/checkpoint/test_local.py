"""States in the memory of hosts: whatever single host is lost, every rank gets its own back."""

import resource
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.checkpoint.local import LocalCheckpoints, latest_complete
from fivefold.checkpoint.state_file import fill_from_state, read_state, state_damage, write_state
from fivefold.errors import CheckpointError
from fivefold.files import caused_by_full_disk
from fivefold.mesh.slices import as_piece
from tests.pool import run
from tests.verify.cases import chosen

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


@pytest.mark.parametrize("ranks", chosen([(4, 1), (4, 2), (8, 2), (8, 4)], (4, 1), (4, 2)), ids=str)
def test_a_lost_host_loses_nothing(tmp_path: Path, ranks: tuple[int, int]) -> None:
    world, each = ranks
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


def load_damaged(rank: int, world: int, root: Path, each: int) -> tuple[int | None, str, Tensors]:
    local = opened(rank, root, each)
    mine = {name: torch.zeros_like(t) for name, t in tensors(rank, 0).items()}
    step = local.find(mine)
    if step is not None:
        local.load(mine)
    return step, local.damage, mine


@pytest.mark.parametrize("bit", [3, 700, -2, None])
def test_a_damaged_state_is_named_and_the_one_before_is_taken(
    tmp_path: Path, bit: int | None
) -> None:
    """A bit in the length of the header, in the header, in a tensor; or half a file."""
    run(2, save, tmp_path, 2, [10, 20])
    path = next(tmp_path.glob("*/step-00000020/rank-00001-*"))
    data = bytearray(path.read_bytes())
    if bit is not None:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data if bit is not None else data[:100])
    for rank, (step, damage, found) in enumerate(run(2, load_damaged, tmp_path, 2)):
        assert f"{path} is damaged: " in damage and "step 10 is the latest" in damage
        assert step == 10 and same(found, tensors(rank, 10))


@pytest.mark.parametrize("other", ["step-00000010/rank-00001", "step-00000020/rank-00000"])
def test_a_whole_state_of_another_step_or_rank_is_noticed(tmp_path: Path, other: str) -> None:
    """Its checksum is right, and of replicas its tensors fit, too."""
    run(2, save, tmp_path, 2, [10, 20])
    path = next(tmp_path.glob("*/step-00000020/rank-00001-*"))
    (source,) = tmp_path.glob(f"*/{other}-*")
    shutil.copyfile(source, path)
    for rank, (step, damage, found) in enumerate(run(2, load_damaged, tmp_path, 2)):
        assert f"{path} is damaged: it was written as {other}-" in damage
        assert step == 10 and same(found, tensors(rank, 10))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_bit_of_a_state_is_noticed(data: st.DataObject) -> None:
    """Unless it changes nothing that is read from it."""
    kept = tensors(2, 5)
    with TemporaryDirectory() as folder:
        path = Path(folder, "state.safetensors")
        write_state(path, {name: as_piece(t) for name, t in kept.items()}, '{"step": 5}')
        assert state_damage(path) == ""
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, 8 * len(content) - 1))
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        if not state_damage(path):
            into = {name: as_piece(torch.zeros_like(t)) for name, t in kept.items()}
            assert read_state(path, into) == {"step": 5}
            fill_from_state(path, into)
            assert same({name: piece.local for name, piece in into.items()}, kept)


def test_a_damaged_state_is_taken_from_the_copy_on_another_host(tmp_path: Path) -> None:
    run(2, save, tmp_path, 1, [10, 20])
    path = next(tmp_path.glob("host1/step-00000020/rank-00001-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    for rank, (step, damage, found) in enumerate(run(2, load_damaged, tmp_path, 1)):
        assert f"{path} is damaged: expected CRC-32" in damage
        assert step == 20 and same(found, tensors(rank, 20))


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


def test_a_full_memory_is_named_as_such(tmp_path: Path) -> None:
    """As a system without room says it (ENOSPC); here by the limit of a file's size."""
    pieces = {"weight": as_piece(torch.zeros(10_000))}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_state(tmp_path / "state.safetensors", pieces, "{}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caused_by_full_disk(caught.value) is not None
    assert [*tmp_path.iterdir()] == []


def test_a_rank_that_cannot_write_is_told_by_all(tmp_path: Path) -> None:
    for message in run(2, full, tmp_path):
        assert "keeping states in" in message and "rank 0: rank 1 could not keep" in message
        assert "rank 1: " in message
