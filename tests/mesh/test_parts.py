"""All-gather and reduce-scatter in parts: the same results, and messages that need not wait."""

from collections.abc import Callable
from datetime import timedelta
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import all_gather, reduce_scatter
from fivefold.mesh.parts import Arriving, start_sum_of_parts
from tests.pool import run

PATIENCE = timedelta(seconds=20)


def _group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _values(seed: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator)


def _same_bits(rank: int, world: int, rows: int) -> None:
    x, group = _values(rank, rows), _group()
    arriving = Arriving(x, group)
    order = [part.start // rows for part in arriving]
    assert order == [(rank - step) % world for step in range(world)]
    assert torch.equal(arriving.whole, all_gather(x, group))
    summands = _values(world + rank, world * rows)
    made: list[slice] = []

    def make(part: slice) -> Tensor:
        made.append(part)
        return summands[part]

    summed = start_sum_of_parts(make, world * rows, group).wait()
    assert torch.equal(summed, reduce_scatter(summands, group))
    assert made[-1] == slice(rank * rows, (rank + 1) * rows)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("world", [2, 4])
def test_parts_have_the_bits_of_the_whole(world: int, rows: int) -> None:
    run(world, _same_bits, rows)


def _own_rows_before_others_have_sent(rank: int, world: int, key: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank:
        store.wait([key], PATIENCE)
    for step, _ in enumerate(Arriving(torch.zeros(2, 3), _group())):
        if rank == 0 and step == 0:
            store.set(key, "multiplied")


def _sent_before_own_rows_are_made(rank: int, world: int, key: str) -> None:
    store = dist.distributed_c10d._get_default_store()

    def make(rows: slice) -> Tensor:
        if rank == 0 and rows.start == 0:
            store.wait([key], PATIENCE)
        return torch.zeros(2, 3)

    start_sum_of_parts(make, 4, _group()).wait()
    if rank:
        store.set(key, "received")


@pytest.mark.parametrize(
    "order", [_own_rows_before_others_have_sent, _sent_before_own_rows_are_made]
)
def test_messages_travel_while_rows_are_computed(order: Callable[..., None]) -> None:
    run(2, order, str(uuid4()))
