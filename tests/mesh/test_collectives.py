"""Our collectives against torch's own, and what they promise beyond: order, repeats, buckets."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh import collectives
from fivefold.mesh.collectives import (
    all_gather,
    all_reduce,
    exchange_rows,
    group_size,
    integers_from_first,
    reduce_scatter,
    start_all_gather,
    start_reduce_scatter,
    start_row_exchange,
    sum_in_buckets,
)
from tests.pool import run

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


def _values(rank: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).mul(8).to(dtype)


def _of_all(world: int, *shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [_values(rank, *shape, dtype=dtype) for rank in range(world)]


def _told(rank: int, world: int) -> list[int]:
    own = [2**62 + 1, -3, 0] if rank == 0 else [rank] * 3
    return integers_from_first(own, dist.group.WORLD, torch.device("cpu"))


def test_integers_are_the_first_ranks() -> None:
    assert run(2, _told) == [[2**62 + 1, -3, 0]] * 2
    assert integers_from_first((1, 2), None, torch.device("cpu")) == [1, 2]


def _in_rank_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _like_torch(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for dtype in DTYPES:
        x = _values(rank, 3, 5, dtype=dtype)
        every = torch.empty(3 * world, 5, dtype=dtype)
        dist.all_gather_into_tensor(every, x)
        assert torch.equal(all_gather(x, group), every)
        whole = _values(rank, 2 * world, 5, dtype=dtype)
        assert torch.equal(
            reduce_scatter(whole, group),
            _in_rank_order(_of_all(world, 2 * world, 5, dtype=dtype)).chunk(world)[rank],
        )
        summed = x.clone()
        assert all_reduce(summed, group) is summed
        theirs = x.clone()
        dist.all_reduce(theirs)
        assert torch.equal(summed, theirs)
    part = torch.empty(2, 5, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, _values(rank, 2 * world, 5))
    ours = reduce_scatter(_values(rank, 2 * world, 5), group)
    torch.testing.assert_close(ours, part, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("world", [2, 4])
def test_they_do_what_torchs_do(world: int) -> None:
    run(world, _like_torch)


def _given_memory(rank: int, world: int) -> None:
    group = dist.group.WORLD
    parts = _of_all(world, 2, 3)
    # As FSDP2 does: the input is this rank's place in the output.
    out = torch.zeros(2 * world, 3, dtype=torch.float64)
    out.view(world, 2, 3)[rank] = parts[rank]
    own = out.view(world, 2, 3)[rank]
    assert start_all_gather(own, group, out).wait() is out
    assert torch.equal(out, torch.cat(parts))
    turned = _values(rank, 3, 2).t()
    assert not turned.is_contiguous()
    expected = torch.cat([part.t() for part in _of_all(world, 3, 2)])
    assert torch.equal(all_gather(turned, group), expected)
    kept = turned.clone()
    held = torch.empty(2 // 2, 3, dtype=torch.float64) if world == 2 else None
    if held is not None:
        assert start_reduce_scatter(turned, group, held).wait() is held
        whole = _in_rank_order([part.t() for part in _of_all(world, 3, 2)])
        assert torch.equal(held, whole.chunk(world)[rank])
    assert torch.equal(turned, kept), "the input is left alone"
    empty = torch.empty(0, 3)
    assert all_gather(empty, group).shape == (0, 3)
    assert reduce_scatter(empty, group).shape == (0, 3)


def test_outputs_given_inputs_not_contiguous_and_nothing_at_all() -> None:
    run(2, _given_memory)


def _rows(rank: int, world: int, in_pairs: bool) -> None:
    """Rank r has (r + p) mod 3 rows for rank p, of a tensor that is not contiguous."""
    group = dist.group.WORLD
    sizes = [[(source + target) % 3 for target in range(world)] for source in range(world)]
    every = [_values(source, 4, sum(sizes[source])).t() for source in range(world)]
    parts = [x.split(each) for x, each in zip(every, sizes, strict=True)]
    got = [each[rank] for each in sizes]
    out = torch.empty(sum(got), 4, dtype=torch.float64)
    with patch.object(collectives, "exchanges_in_pairs", lambda x, group: in_pairs):
        start_row_exchange(every[rank], out, sizes[rank], got, group).wait()
        firsts = exchange_rows(_values(rank, world, 2), group)
    assert torch.equal(out, torch.cat([part[rank] for part in parts]))
    sent = [_values(source, world, 2)[rank] for source in range(world)]
    assert torch.equal(firsts, torch.stack(sent))


@pytest.mark.parametrize("in_pairs", [False, True], ids=["one collective", "pairs"])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_reach_the_ranks_that_they_are_for(world: int, in_pairs: bool) -> None:
    """As on GPUs, and as by gloo; between some ranks nothing is sent."""
    run(world, _rows, in_pairs)


def _types_of_a_sum(rank: int, world: int, in_pairs: bool, types: Any) -> None:
    group, shape, (kept, wire, summed) = dist.group.WORLD, (2 * world, 7), types
    x, given = _values(rank, *shape, dtype=kept), torch.empty(2, 7, dtype=kept)
    with patch.object(collectives, "exchanges_in_pairs", lambda x, group: in_pairs):
        outs = [start_reduce_scatter(x, group, out, wire, summed).wait() for out in (None, given)]
    assert torch.equal(x, _values(rank, *shape, dtype=kept)) and outs[1] is given
    sent = [part.to(wire or kept) for part in _of_all(world, *shape, dtype=kept)]
    exact = _in_rank_order([part.to(summed or kept) for part in sent]).chunk(world)[rank].to(kept)
    for out in outs:
        assert out.dtype == kept
        if in_pairs or (wire or kept) != (summed or kept):
            assert torch.equal(out, exact)
        else:  # gloo's own collective, which adds in another order
            torch.testing.assert_close(out, exact, rtol=2e-2, atol=2e-2)
    if (wire, summed) == (torch.bfloat16, torch.float32):
        narrow = _in_rank_order([part.bfloat16() for part in sent]).chunk(world)[rank]
        assert not torch.equal(outs[0], narrow.to(kept)), "a bf16 sum would be another"


TYPES = [
    (torch.float32, None, None),
    (torch.float32, torch.bfloat16, None),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, None, None),
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float64, torch.bfloat16, torch.float64),
    (torch.float64, torch.bfloat16, torch.bfloat16),
]


@pytest.mark.parametrize("in_pairs", [False, True], ids=["one collective", "pairs"])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_types_of_gradients_of_messages_and_of_sums(types: Any, in_pairs: bool) -> None:
    """Where ranks sum themselves, in rank order: what is sent is rounded once, and no sum."""
    run(4, _types_of_a_sum, in_pairs, types)


def _repeats(rank: int, world: int) -> list[bytes]:
    group = dist.group.WORLD
    x = _values(rank, 64 * world, dtype=torch.float32)
    results = []
    for _ in range(3):
        scattered = reduce_scatter(x, group)
        results.append(all_gather(scattered, group).numpy().tobytes())
        results.append(all_reduce(x.clone(), group).numpy().tobytes())
    assert results[:2] == results[2:4] == results[4:]
    return results[:2]


def test_sums_are_bitwise_the_same_each_time_and_on_every_rank() -> None:
    first, *others = run(4, _repeats)
    assert all(other == first for other in others)


MIXED = (
    ((3, 4), torch.float64),
    ((0,), torch.float64),
    ((), torch.float64),
    ((5,), torch.float32),
    ((2, 0), torch.float32),
    ((6,), torch.float64),
)


def _buckets(rank: int, world: int, bucket_bytes: int) -> int:
    group = dist.group.WORLD
    tensors = [_values(rank, *shape, dtype=dtype) for shape, dtype in MIXED]
    tensors[0] = tensors[0].t()  # not contiguous
    calls: list[int] = []
    native: Callable[..., dist.Work | None] = dist.all_reduce

    def counted(tensor: Tensor, **kwargs: object) -> dist.Work | None:
        calls.append(tensor.numel())
        return native(tensor, **kwargs)

    dist.all_reduce = counted
    try:
        sum_in_buckets(tensors, group, bucket_bytes=bucket_bytes)
    finally:
        dist.all_reduce = native
    assert sum(calls) == 12 + 1 + 5 + 6
    for index, ((shape, dtype), tensor) in enumerate(zip(MIXED, tensors, strict=True)):
        parts = _of_all(world, *shape, dtype=dtype)
        if index == 0:
            parts = [part.t() for part in parts]
        assert tensor.dtype == dtype
        # gloo sums two ranks in one way only.
        assert torch.equal(tensor, _in_rank_order(parts))
    return len(calls)


@pytest.mark.parametrize(("bucket_bytes", "messages"), [(1 << 20, 3), (1, 5), (96, 4)])
def test_buckets_take_any_mixture(bucket_bytes: int, messages: int) -> None:
    """One message per run of a type, or as soon as a bucket is full; empty tensors ride along."""
    assert run(2, _buckets, bucket_bytes) == [messages] * 2


def _in_place(rank: int, world: int) -> bool:
    x, here = _values(rank, 4, 3), []
    native: Callable[..., dist.Work | None] = dist.all_reduce

    def noted(tensor: Tensor, **kwargs: object) -> dist.Work | None:
        here.append(tensor.data_ptr() == x.data_ptr())
        return native(tensor, **kwargs)

    dist.all_reduce = noted
    try:
        sum_in_buckets([x], dist.group.WORLD)
    finally:
        dist.all_reduce = native
    assert torch.equal(x, _in_rank_order(_of_all(world, 4, 3)))
    return here == [True]


def test_what_fills_a_message_is_not_copied() -> None:
    assert run(2, _in_place) == [True] * 2


def test_a_group_of_one_needs_no_processes() -> None:
    x = torch.randn(4, 3)
    assert group_size(None) == 1
    for collective in (all_reduce, all_gather, reduce_scatter):
        assert collective(x, None) is x
    out = torch.empty_like(x)
    assert start_all_gather(x, None, out).wait() is out
    assert torch.equal(out, x)
    out.zero_()
    assert start_reduce_scatter(x, None, out).wait() is out
    assert torch.equal(out, x)
    sum_in_buckets([x], None)
