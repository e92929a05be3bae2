import torch

from tests.model.models import LLAMA, batch_of


def test_boundaries_of_packed_rows() -> None:
    packing = batch_of(LLAMA, [[2, 3], [5], [1, 4]]).packing
    assert packing is not None
    assert packing.starts == (0, 2, 5, 10, 11, 15)


def test_whole_rows_are_not_packed() -> None:
    assert batch_of(LLAMA, [[5], [5]]).packing is None


def test_moving_keeps_the_boundaries_without_reading_the_device() -> None:
    moved = batch_of(LLAMA, [[2, 3]]).to("meta")  # nothing can be read from meta
    assert moved.tokens.is_meta and moved.loss_weights.is_meta
    assert moved.packing.starts == (0, 2, 5)
    assert moved.packing.ids_BS.is_meta
    assert batch_of(LLAMA, [[5]]).to("meta").packing is None


def test_boundaries_between_equal_ids_of_neighbouring_rows_count() -> None:
    batch = batch_of(LLAMA, [[2, 2], [4]])
    batch.documents[1] = torch.tensor([1, 1, 1, 1])
    assert batch.packing.starts == (0, 2, 4, 8)
