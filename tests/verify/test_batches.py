"""Batches are ugly enough, and every layout reads the same one."""

import numpy as np

from fivefold.data.packing import IGNORED
from fivefold.verify.batches import global_batch, microbatches, rows_of
from tests.verify.cases import GPT, config

CONFIG = config(GPT, micro_batch_size=2)
BATCH = global_batch(CONFIG, 3)


def test_what_makes_a_batch_ugly() -> None:
    valid_B = (BATCH.labels_BS != IGNORED).sum(axis=1)
    assert valid_B.min() == 0 and len(set(valid_B.tolist())) > 4
    documents = [np.bincount(row) for row in BATCH.documents_BS]
    assert any((lengths == 1).any() for lengths in documents)
    assert all(len(lengths) > 1 for lengths in documents)
    assert BATCH.loss_weights_BS is not None and BATCH.loss_weights_BS.std() > 0.3


def test_positions_restart_with_each_document() -> None:
    begins_BS = np.diff(BATCH.documents_BS, axis=1, prepend=-1) != 0
    assert (BATCH.positions_BS[begins_BS] == 0).all()
    steps = np.diff(BATCH.positions_BS, axis=1)
    assert (steps[~begins_BS[:, 1:]] == 1).all()


def test_every_layout_reads_the_same_samples() -> None:
    for dp in (1, 2, 4):
        parts = [
            part.token_ids_BS
            for dp_rank in range(dp)
            for part in microbatches(CONFIG, BATCH, rows_of(CONFIG, dp_rank, dp))
        ]
        assert all(len(part) == 2 for part in parts)
        np.testing.assert_array_equal(np.concatenate(parts), BATCH.token_ids_BS)


def test_no_two_tokens_share_an_id() -> None:
    ids = np.concatenate([global_batch(CONFIG, n).token_ids_BS.ravel() for n in range(3)])
    assert len(set(ids.tolist())) == ids.size
