from dataclasses import fields

import pytest
import torch

from fivefold.model.batch import on_device
from tests.model.models import LLAMA, batch_of


def test_boundaries_of_packed_rows() -> None:
    packing = batch_of(LLAMA, [[2, 3], [5], [1, 4]]).packing
    assert packing is not None
    assert packing.starts == (0, 2, 5, 10, 11, 15)


def test_whole_rows_are_not_packed() -> None:
    assert batch_of(LLAMA, [[5], [5]]).packing is None


def test_moving_keeps_the_boundaries_without_reading_the_device() -> None:
    meta = torch.device("meta")  # nothing can be read from it
    moved, whole = on_device([batch_of(LLAMA, [[2, 3]]), batch_of(LLAMA, [[5]])], meta)
    assert moved.tokens.is_meta and moved.loss_weights.is_meta
    assert moved.packing.starts == (0, 2, 5)
    assert moved.packing.device == meta
    assert whole.packing is None


def test_each_tensor_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [batch_of(LLAMA, [[2, 3], [5]]), batch_of(LLAMA, [[1, 4]])]
    wide = torch.float64  # a "device" whose values can be read

    def to(x: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        copies.append(x.dtype)
        return x.clone()

    copies: list[torch.dtype] = []
    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = on_device(batches, torch.device("meta"))
    assert sorted(map(str, copies)) == sorted(map(str, {torch.int64, wide}))
    for before, after in zip(batches, moved, strict=True):
        for field in fields(before):
            mine, its = getattr(before, field.name), getattr(after, field.name)
            assert torch.equal(mine, its) if isinstance(mine, torch.Tensor) else mine == its


def test_boundaries_between_equal_ids_of_neighbouring_rows_count() -> None:
    batch = batch_of(LLAMA, [[2, 2], [4]])
    batch.documents[1] = torch.tensor([1, 1, 1, 1])
    assert batch.packing.starts == (0, 2, 4, 8)
