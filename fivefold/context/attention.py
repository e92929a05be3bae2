"""Attention kernels of context parallelism, for the `kernel` seam of attention layers.

Shapes: B rows, S tokens of this rank, N query heads, G key/value heads, D head features, F all
features of all heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.context.transport import OwnTokens, Transport
from fivefold.mesh.collectives import all_to_all
from fivefold.model.attention.blocks import Span, indices
from fivefold.model.attention.blockwise import Queries
from fivefold.model.attention.grouped_query import Kernel, Scope, attention
from fivefold.model.attention.scores import Scores
from fivefold.model.dropout import HeadDropout
from fivefold.model.shards import MicrobatchShare, Shards


@dataclass(frozen=True)
class KVExchangeAttention:
    """Attention in which queries stay on their rank and keys and values are sent.

    Attributes:
        transport: how keys and values are sent.
    """

    transport: Transport

    def __call__(
        self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, scope: Scope, drop: HeadDropout | None
    ) -> Tensor:
        """See `model.attention.grouped_query.Kernel`."""
        out: Tensor = _KVExchange.apply(
            q_BSND, k_BSGD, v_BSGD, scope.sinks, self.transport, scope.part, (drop, scope.scores)
        )
        return out


How = tuple[HeadDropout | None, Scores]
"""Settings of dropout and of the scores."""


class _KVExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        transport: Transport,
        part: MicrobatchShare,
        how: How,
    ) -> Tensor:
        queries, own = _prepared(q, k, v, part, how)
        queries.begin(v.shape[-1], sinks)
        for keys in transport.forward(own):
            queries.meet(keys)
        out = queries.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, queries.lse)
        ctx.rest = transport, part, how, sinks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        transport, part, how, sinks = ctx.rest
        queries, own = _prepared(q, k, v, part, how)
        queries.begin_backward(grad, out, lse)
        steps = transport.backward(own)
        keys = next(steps)
        while True:
            try:
                keys = steps.send(queries.meet_backward(keys))
            except StopIteration as end:
                grads = end.value.split([k.shape[-1], v.shape[-1]], dim=-1)
                break
        d_sinks = None if sinks is None else queries.sink_grads(sinks)
        return queries.dq.to(q.dtype), *(g.to(k.dtype) for g in grads), d_sinks, None, None, None


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, part: MicrobatchShare, how: How
) -> tuple[Queries, OwnTokens]:
    drop, scores = how
    ids, mine = own_ids(part, drop)
    own = OwnTokens(torch.cat((k, v), dim=-1), k.shape[-1], part, ids)
    return Queries(q, k.shape[2], drop, mine, scores), own


def own_ids(part: MicrobatchShare, drop: HeadDropout | None) -> tuple[Tensor | None, Tensor | None]:
    """Token ids of whole rows, and of this rank's tokens; both None without dropout."""
    if drop is None:
        return None, None
    ids = drop.token_ids_BL.reshape(part.shards.rows, -1)
    return ids, torch.cat([ids[:, start:stop] for start, stop in part.spans], dim=1)


@dataclass(frozen=True)
class UlyssesAttention:
    """Ulysses attention: each rank computes a part of the heads for all tokens of the group.

    DeepSpeed-Ulysses (Jacobs et al. 2023): one all-to-all of packed queries, keys and values, and
    one of outputs. The inner kernel is that of one device, or another context-parallel one between
    groups (USP, Fang and Zhao 2024). A key/value head that several ranks need is sent to each.

    Attributes:
        group: consecutive context-parallel ranks.
        inner: the kernel for all tokens of the group.
        outer_rank: index of this group among the groups that `inner` connects; None if there is
            only one.
    """

    group: dist.ProcessGroup
    inner: Kernel = attention
    outer_rank: int | None = None

    def __call__(
        self, q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, scope: Scope, drop: HeadDropout | None
    ) -> Tensor:
        """See `model.attention.grouped_query.Kernel`."""
        part = scope.part
        assert part is not None, "whole rows need no context parallelism"
        assignment = self.assignment(part, q_BSND, k_BSGD)
        features = q_BSND.shape[3], k_BSGD.shape[3], v_BSGD.shape[3]
        packed = [x.flatten(2) for x in (q_BSND, k_BSGD, v_BSGD)]
        q, k, v = ToHeads.apply(assignment, features, *packed)
        first, last = assignment.queries(self.group.rank())
        if drop is not None:
            drop = drop.after(first)
        scope = replace(scope, scores=scope.scores.of_heads(first, last))
        if scope.sinks is not None:
            scope = replace(scope, sinks=scope.sinks[first:last])
        if self.outer_rank is None:
            # A single-device kernel takes packed rows in their original shape.
            rows = len(q) if scope.documents is None else scope.documents.rows
            q, k, v = (x.reshape(rows, -1, *x.shape[2:]) for x in (q, k, v))
            out = self.inner(q, k, v, replace(scope, part=None), drop)
            out = out.reshape(part.shards.rows, -1, *out.shape[2:])
        else:
            outer = MicrobatchShare(part.shards.merged(self.group.size()), self.outer_rank)
            out = self.inner(q, k, v, replace(scope, part=outer), drop)
        back: Tensor = ToTokens.apply(out.flatten(2), assignment)
        return back.unflatten(2, (q_BSND.shape[2], -1))

    def assignment(self, part: MicrobatchShare, q_BSND: Tensor, k_BSGD: Tensor) -> "HeadAssignment":
        """The assignment of heads and tokens to ranks."""
        return HeadAssignment(self.group, part, q_BSND.shape[2], k_BSGD.shape[2])


@dataclass(frozen=True)
class HeadAssignment:
    """The assignment of heads and tokens to the ranks of a group.

    Attributes:
        group: the ranks.
        part: the tokens that this rank holds.
        num_heads: N, over all ranks of the group.
        num_kv_heads: G, over all ranks of the group.
    """

    group: dist.ProcessGroup
    part: MicrobatchShare
    num_heads: int
    num_kv_heads: int

    @property
    def members(self) -> range:
        """Context-parallel ranks of the group's members."""
        first = self.part.rank - self.group.rank()
        return range(first, first + self.group.size())

    def queries(self, rank: int) -> Span:
        """The query heads of a rank of the group."""
        each = self.num_heads // self.group.size()
        return rank * each, (rank + 1) * each

    def keys(self, rank: int) -> Span:
        """The key/value heads those queries need: several, or one shared with other ranks."""
        first, last = self.queries(rank)
        shared = self.num_heads // self.num_kv_heads
        return first // shared, -(-last // shared)

    def in_order(self, by_rank: list[Tensor]) -> Tensor:
        """Concatenate the ranks' tokens, [B, S, F] each, in the order of the rows."""
        pieces = self._pieces()
        return torch.cat([by_rank[rank][:, slice(*at)] for _, rank, at in pieces], dim=1)

    def by_rank(self, x_BSF: Tensor) -> list[Tensor]:
        """Split tokens in row order into those of each rank: the inverse of `in_order`."""
        pieces = self._pieces()
        parts = x_BSF.split([stop - start for (start, stop), _, _ in pieces], dim=1)
        parts_by_rank: list[list[Tensor]] = [[] for _ in self.members]
        for (_, rank, _), values in zip(pieces, parts, strict=True):
            parts_by_rank[rank].append(values)
        return [torch.cat(values, dim=1) for values in parts_by_rank]

    def exchange(self, sends: list[Tensor], features: list[int]) -> list[Tensor]:
        """All-to-all: send one [B, S, F] to each rank, receive `features[r]` features from r."""
        rows, tokens = sends[0].shape[:2]
        received = [sends[0].new_empty((rows, tokens, width)) for width in features]
        all_to_all(sends, received, self.group)
        return received

    def _pieces(self) -> list[tuple[Span, int, Span]]:
        """(positions, rank in the group, indices in that rank's tensor), in row order."""
        shards: Shards = self.part.shards
        return sorted(
            (span, rank, indices(shards.chunks[member], span))
            for rank, member in enumerate(self.members)
            for span in shards.chunks[member]
        )


class ToHeads(torch.autograd.Function):
    """Packed heads [B, S, F], such as q, k and v: from all heads of own tokens to own heads of all
    tokens. The first has query heads, the others key/value heads; `dims`: features of a head."""

    @staticmethod
    def forward(
        ctx: Any, assignment: HeadAssignment, dims: tuple[int, ...], *packed: Tensor
    ) -> tuple[Tensor, ...]:
        """One [B, L, N, D] for each."""
        ctx.assignment, ctx.dims = assignment, dims
        sends = [
            torch.cat([x[..., slice(*span)] for x, span in zip(packed, spans, strict=True)], -1)
            for spans in (
                _features(assignment, rank, dims) for rank in range(assignment.group.size())
            )
        ]
        rank = assignment.group.rank()
        received = assignment.exchange(sends, [sends[rank].shape[2]] * len(sends))
        widths = [last - first for first, last in _features(assignment, rank, dims)]
        parts = assignment.in_order(received).split(widths, dim=-1)
        return tuple(x.unflatten(2, (-1, dim)) for x, dim in zip(parts, dims, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads_BSND: Tensor) -> tuple[Tensor | None, ...]:
        """The reverse exchange; gradients of a head that several ranks have are summed."""
        assignment, dims = ctx.assignment, ctx.dims
        spans = [_features(assignment, rank, dims) for rank in range(assignment.group.size())]
        widths = [[last - first for first, last in of_rank] for of_rank in spans]
        received = assignment.exchange(
            assignment.by_rank(torch.cat([grad.flatten(2) for grad in grads_BSND], dim=-1)),
            [sum(width) for width in widths],
        )
        parts = [grad.split(width, -1) for grad, width in zip(received, widths, strict=True)]
        every = zip(zip(*parts, strict=True), zip(*spans, strict=True), strict=True)
        return None, None, *(_summed(of_ranks, at) for of_ranks, at in every)


def _summed(parts_BSF: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
    """The ranks' gradients of the features in their spans, in order; of heads that several ranks
    have, the sum in at least fp32."""
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return torch.cat([*parts_BSF], dim=-1)
    narrow, shape = parts_BSF[0].dtype, parts_BSF[0].shape[:2]
    wide = torch.promote_types(narrow, torch.float32)
    total_BSF = parts_BSF[0].new_zeros((*shape, spans[-1][1]), dtype=wide)
    for part, span in zip(parts_BSF, spans, strict=True):
        total_BSF[..., slice(*span)] += part
    return total_BSF.to(narrow)


def _features(assignment: HeadAssignment, rank: int, dims: tuple[int, ...]) -> list[Span]:
    """For each rank, the ranges of the packed features that go to it."""
    heads = assignment.queries(rank), *(assignment.keys(rank),) * (len(dims) - 1)
    return [(first * d, last * d) for (first, last), d in zip(heads, dims, strict=True)]


class ToTokens(torch.autograd.Function):
    """Outputs [B, S, F]: from own heads of all tokens to all heads of own tokens."""

    @staticmethod
    def forward(ctx: Any, x_BSF: Tensor, assignment: HeadAssignment) -> Tensor:
        """[B, S, F] of all heads."""
        ctx.assignment = assignment
        sends = assignment.by_rank(x_BSF)
        return torch.cat(assignment.exchange(sends, [x_BSF.shape[2]] * len(sends)), dim=-1)

    @staticmethod
    def backward(ctx: Any, grad_BSF: Tensor) -> tuple[Tensor, None]:
        """The reverse exchange."""
        assignment: HeadAssignment = ctx.assignment
        sends = list(grad_BSF.chunk(assignment.group.size(), dim=-1))
        return assignment.in_order(
            assignment.exchange(sends, [sends[0].shape[2]] * len(sends))
        ), None
