"""Evaluates validation sets on a rank; each data-parallel rank reads its part of them."""

import time
from collections.abc import Iterable, Iterator

from fivefold.config.batch_sizes import BatchSizes
from fivefold.data.dataset import Dataset
from fivefold.data.loader import Loader
from fivefold.data.validation import ValidationSet
from fivefold.layout import Layout
from fivefold.train.engine import Engine
from fivefold.train.metrics import EvalMetrics


def rank_loader(
    layout: Layout,
    rank: int,
    dataset: Dataset,
    sizes: BatchSizes | None = None,
    *,
    prefetch: bool = True,
    end: int | None = None,
) -> Loader:
    """A rank's batches, of `sizes`, or whole batches only; `prefetch` and `end` as in `Loader`."""
    training = layout.config.training
    return Loader(
        dataset,
        batch_sizes=sizes or BatchSizes(training.global_batch_size),
        micro_batch_size=training.micro_batch_size,
        dp_rank=layout.grid.dp_rank(rank),
        dp_size=layout.grid.dp,
        prefetch=prefetch,
        end=end,
    )


def evaluations(engine: Engine, sets: Iterable[ValidationSet], step: int) -> Iterator[EvalMetrics]:
    """Evaluate each set from its first sample; collective over all ranks of the run."""
    for each in sets:
        began = time.perf_counter()
        rank = engine.groups.rank
        loader = rank_loader(engine.layout, rank, each.dataset, prefetch=False, end=each.samples)
        loss, tokens = engine.evaluate(loader.next_batch() for _ in range(each.batches))
        yield EvalMetrics(step, loss, tokens, time.perf_counter() - began, each.name)
