"""Test batches for verification, made irregular so that a wrong reduction shows."""

from dataclasses import fields

import numpy as np

from fivefold.config.config import Config
from fivefold.config.data import IGNORED
from fivefold.data.packing import Microbatch

EVALUATION = 1_000_000  # index of the global batch used for evaluation


def global_batch(config: Config, index: int) -> Microbatch:
    """All samples of global batch `index`, the same for every layout.

    Rows hold several documents, some of one token. Rows differ in their number of valid tokens, and
    one row has none. Every token's loss has its own weight, since a constant upstream gradient
    hides errors. If the configuration lets documents attend to each other, they do.
    """
    rows, length = config.training.global_batch_size, config.training.seq_length
    generator = np.random.default_rng((config.training.seed, index))
    tokens_BS = generator.integers(0, config.model.vocab_size, (rows, length))
    begins_BS = generator.random((rows, length)) < 0.2
    begins_BS[:, :1] = False
    place_S = np.arange(length)
    ignored_B1 = generator.random((rows, 1)) * 0.8
    ignored_B1[rows // 2] = 1.0 if rows > 1 else ignored_B1[0]
    ignored_BS = generator.random((rows, length)) < ignored_B1
    labels_BS = generator.integers(0, config.model.vocab_size, (rows, length))
    samples = index * rows + np.arange(rows)
    starts_BS = np.maximum.accumulate(np.where(begins_BS, place_S, 0), axis=1)
    if not config.data.reset_position_ids:
        starts_BS[:] = 0
    if not config.data.reset_attention_mask:
        begins_BS[:] = False
    return Microbatch(
        tokens_BS=tokens_BS,
        labels_BS=np.where(ignored_BS, IGNORED, labels_BS),
        positions_BS=place_S - starts_BS,
        documents_BS=np.cumsum(begins_BS, axis=1),
        token_ids_BS=samples[:, None] * length + place_S,
        loss_weights_BS=generator.uniform(0.25, 1.75, (rows, length)),
    )


def take_rows(batch: Microbatch, rows: slice) -> Microbatch:
    """Some of the samples of a `global_batch`."""
    arrays = [getattr(batch, field.name) for field in fields(batch)]
    return Microbatch(*(np.ascontiguousarray(array[rows]) for array in arrays))


def rows_of(config: Config, dp_rank: int, dp: int) -> slice:
    """The samples of a global batch that one of `dp` data-parallel ranks reads."""
    each = config.training.global_batch_size // dp
    return slice(dp_rank * each, (dp_rank + 1) * each)


def microbatches(config: Config, batch: Microbatch, rows: slice | None = None) -> list[Microbatch]:
    """These samples, or all of a step, as the microbatches of a step."""
    rows = rows or slice(0, config.training.global_batch_size)
    size = config.training.micro_batch_size
    starts = range(rows.start, rows.stop, size)
    return [take_rows(batch, slice(start, start + size)) for start in starts]
