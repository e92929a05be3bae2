"""Asynchronous collectives on local tensors.

On CUDA these are NCCL's. On the CPU gloo's own all-gather and reduce-scatter take about twice the
CPU time of pairwise exchanges from 1 MiB on (about the same below), and its sums depend on the
ring; here every pair exchanges directly and sums run in rank order, so that results are
reproducible. gloo's all-reduce is the better one. `benchmarks/collectives.py` measures them all.
Groups may be None, which means a group of one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.buckets import buckets_of
from fivefold.mesh.device import exchanges_in_pairs, without_waiting
from fivefold.mesh.slices import is_same_memory

T = TypeVar("T")


@dataclass
class Pending:
    """A collective in progress; `wait()` returns its result, and may be called once."""

    works: list[dist.Work]
    finish: Callable[[], Tensor]

    def wait(self) -> Tensor:
        """Wait for the result and return it."""
        for work in self.works:
            work.wait()
        return self.finish()


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks of a group; 1 for None."""
    return 1 if group is None else group.size()


def gather_objects(own: T, group: dist.ProcessGroup | None) -> list[T]:
    """An object from each rank of a group, in rank order."""
    if group is None:
        return [own]
    found = [own] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found


def from_first(own: T, group: dist.ProcessGroup | None) -> T:
    """The object of the first rank of a group, on every rank."""
    if group is None:
        return own
    gathered = [own]
    dist.broadcast_object_list(gathered, group=group, group_src=0)
    return gathered[0]


def integers_from_first(
    own: Sequence[int], group: dist.ProcessGroup | None, device: torch.device
) -> list[int]:
    """Integers of the first rank of a group, on every rank; those of the others only say how many.

    One broadcast between devices: the first rank does not wait for it, the others once.
    """
    if group is None:
        return list(own)
    gathered = without_waiting(torch.tensor(own, dtype=torch.int64), device)
    dist.broadcast(gathered, group=group, group_src=0)
    return list(own) if group.rank() == 0 else gathered.tolist()


def start_all_reduce(
    x: Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """Reduce `x` over the group in place, by sum or by `op`. Sends 2(P-1)/P of its bytes."""
    if group is None:
        return Pending([], lambda: x)
    work = dist.all_reduce(x, op=op, group=group, async_op=True)
    return Pending([work], lambda: x)


def start_all_gather(
    x: Tensor, group: dist.ProcessGroup | None, out: Tensor | None = None
) -> Pending:
    """Concatenate every rank's `x` along dim 0. Sends (P-1)/P of the result's bytes.

    Args:
        x: [n, ...], the same shape on every rank.
        group: group whose ranks contribute, in order.
        out: [P*n, ...], contiguous; allocated when None.
    """
    if group is None:
        return Pending([], lambda: x if out is None else out.copy_(x))
    x = x.contiguous()
    size, rank = group.size(), group.rank()
    if out is None:
        out = x.new_empty((size * x.size(0), *x.shape[1:]))
    result = out
    if not exchanges_in_pairs(x, group):
        work = dist.all_gather_into_tensor(out, x, group=group, async_op=True)
        return Pending([work], lambda: result)
    rows = out.view(size, *x.shape)
    works = _exchange(group, send=lambda peer: x, receive=lambda peer: rows[peer])
    if not is_same_memory(rows[rank], x):  # FSDP2 hands in a part of its own output
        rows[rank].copy_(x)
    # `x` is read until the sends end, so the closure keeps it alive.
    return Pending(works, lambda keep=x: result)  # type: ignore[misc]


def start_reduce_scatter(
    x: Tensor,
    group: dist.ProcessGroup | None,
    out: Tensor | None = None,
    wire_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
) -> Pending:
    """Sum over the group and keep this rank's part of dim 0. Sends (P-1)/P of `x`'s bytes.

    Args:
        x: [P*n, ...].
        group: group whose ranks contribute; the sum runs in their order.
        out: [n, ...], contiguous, of `x`'s type; allocated when None.
        wire_dtype: type to send; None: `x`'s own.
        sum_dtype: type of the sum, `x`'s own when None. If it is not the wire's, ranks send each
            other their parts (all-to-all) and sum them themselves.
    """
    if group is None:
        return Pending([], lambda: x if out is None else out.copy_(x))
    x = x.contiguous()
    size, rank = group.size(), group.rank()
    wire_dtype, sum_dtype = wire_dtype or x.dtype, sum_dtype or x.dtype
    part = (x.size(0) // size, *x.shape[1:])
    result = x.new_empty(part) if out is None else out
    sent, in_pairs = x.to(wire_dtype), exchanges_in_pairs(x, group)
    if not in_pairs and wire_dtype == sum_dtype:
        total = result if sum_dtype == x.dtype else sent.new_empty(part)
        work = dist.reduce_scatter_tensor(total, sent, group=group, async_op=True)
        return Pending([work], lambda: result if total is result else result.copy_(total))
    rows = sent.view(size, *part)
    received = torch.empty_like(rows)
    if in_pairs:
        works = _exchange(group, lambda peer: rows[peer], lambda peer: received[peer])
    else:
        work = dist.all_to_all_single(received, rows, group=group, async_op=True)
        works = [work] if work is not None else []

    def finish() -> Tensor:
        total = result if sum_dtype == x.dtype else x.new_empty(part, dtype=sum_dtype)
        if in_pairs:
            sum_in_order([rows[r] if r == rank else received[r] for r in range(size)], total)
        else:
            torch.sum(received, 0, dtype=sum_dtype, out=total)
        return result if total is result else result.copy_(total)

    return Pending(works, finish)


def sum_in_order(rows: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The sum of at least two tensors, first to last, in the type of `out` (default: theirs)."""
    first = rows[0] if out is None else rows[0].to(out.dtype)
    total = torch.add(first, rows[1], out=out)
    for row in rows[2:]:
        total.add_(row)
    return total


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Blocking `start_all_reduce`."""
    return start_all_reduce(x, group).wait()


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Blocking `start_all_gather`."""
    return start_all_gather(x, group).wait()


def reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Blocking `start_reduce_scatter`."""
    return start_reduce_scatter(x, group).wait()


def _exchange(
    group: dist.ProcessGroup, send: Callable[[int], Tensor], receive: Callable[[int], Tensor]
) -> list[dist.Work]:
    """Post one send and one receive per peer; round k pairs rank r with r+k and r-k."""
    size, rank = group.size(), group.rank()
    works = []
    for step in range(1, size):
        source, target = (rank - step) % size, (rank + step) % size
        works.append(dist.irecv(receive(source), group=group, group_src=source))
        works.append(dist.isend(send(target), group=group, group_dst=target))
    return [work for work in works if work is not None]


@dataclass
class Messages:
    """Messages in progress between pairs of ranks; `wait()` returns when all are received."""

    works: list[dist.Work]
    sent: list[Tensor]  # alive until they have left

    def wait(self) -> None:
        """Wait until everything has been sent and received."""
        for work in self.works:
            work.wait()


def start_messages(
    sends: Mapping[int, Tensor],
    receives: Mapping[int, Tensor],
    group: dist.ProcessGroup,
    tag: int = 0,
) -> Messages:
    """Send tensors to ranks of a group and receive others; empty tensors are not sent.

    Args:
        sends: tensors to send, by rank of the group.
        receives: contiguous tensors to fill, by rank of the group.
        group: group in which ranks are counted.
        tag: number that distinguishes messages in progress between the same two ranks; on CUDA
            their order does.
    """
    kept = {peer: tensor.contiguous() for peer, tensor in sends.items() if tensor.numel()}
    ops = [
        dist.P2POp(dist.isend, tensor, group=group, tag=tag, group_peer=peer)
        for peer, tensor in kept.items()
    ]
    ops += [
        dist.P2POp(dist.irecv, tensor, group=group, tag=tag, group_peer=peer)
        for peer, tensor in receives.items()
        if tensor.numel()
    ]
    return Messages(dist.batch_isend_irecv(ops) if ops else [], list(kept.values()))


def start_all_to_all(
    sends: list[Tensor], receives: list[Tensor], group: dist.ProcessGroup
) -> Messages:
    """Send the i-th tensor to rank i and fill the i-th from it; sizes may differ.

    Args:
        sends: one tensor per rank.
        receives: one contiguous tensor per rank; that of this rank is copied.
        group: group whose ranks take part.
    """
    rank = group.rank()
    if not exchanges_in_pairs(sends[rank], group):
        kept = [tensor.contiguous() for tensor in sends]
        work = dist.all_to_all(receives, kept, group=group, async_op=True)
        return Messages([work] if work is not None else [], kept)
    others = [peer for peer in range(group.size()) if peer != rank]
    messages = start_messages(
        {peer: sends[peer] for peer in others}, {peer: receives[peer] for peer in others}, group
    )
    receives[rank].copy_(sends[rank])
    return messages


def all_to_all(sends: list[Tensor], receives: list[Tensor], group: dist.ProcessGroup) -> None:
    """`start_all_to_all`, waited for."""
    start_all_to_all(sends, receives, group).wait()


def start_row_exchange(
    x: Tensor, out: Tensor, sent: Sequence[int], got: Sequence[int], group: dist.ProcessGroup
) -> Messages:
    """Send rank i its rows of `x` and fill in its rows of `out`, in the order of the ranks.

    Args:
        x: [sum(sent), ...]; free again after the wait.
        out: [sum(got), ...], contiguous.
        sent: number of rows for each rank.
        got: number of rows from each rank.
        group: group whose ranks take part.
    """
    if exchanges_in_pairs(x, group):
        return start_all_to_all(list(x.split(sent)), list(out.split(got)), group)
    # One operation on two tensors, however many ranks: a view of each would cost the host more.
    kept = x.contiguous()
    work = dist.all_to_all_single(out, kept, list(got), list(sent), group, async_op=True)
    return Messages([work] if work is not None else [], [kept])


def exchange_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send the i-th row of [P, ...] to rank i of P; returns the rows received, in rank order."""
    out, each = torch.empty_like(x, memory_format=torch.contiguous_format), [1] * len(x)
    start_row_exchange(x, out, each, each, group).wait()
    return out


def sum_in_buckets(
    tensors: list[Tensor], group: dist.ProcessGroup | None, *, bucket_bytes: int = 64 << 20
) -> None:
    """Sum tensors over a group in place, flattened into few large messages.

    One that fills a message, as a tied embedding does, is sent as it is, without a copy.

    Args:
        tensors: tensors of this rank, in the same order on every rank.
        group: group over which to sum.
        bucket_bytes: size in bytes at which a bucket is closed.
    """
    if group is None:
        return
    for bucket in _buckets(tensors, bucket_bytes):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            all_reduce(bucket[0], group)
            continue
        flat = all_reduce(torch.cat([tensor.reshape(-1) for tensor in bucket]), group)
        parts = flat.split([tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    for _, alike in groupby(tensors, key=lambda tensor: tensor.dtype):
        run = [*alike]
        for part in buckets_of((t.numel() * t.element_size() for t in run), bucket_bytes):
            yield run[part]
