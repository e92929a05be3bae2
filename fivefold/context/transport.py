"""Communication of keys and values between context-parallel ranks, and of their gradients back.

A transport yields keys as they arrive, including the rank's own, while the next are in transfer. In
the backward it yields them again and receives their gradients. KV denotes a rank's keys and values,
[B, S, G, Dk + Dv]; there are P ranks in the context-parallel group.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.mesh.collectives import (
    Messages,
    start_all_gather,
    start_messages,
    start_reduce_scatter,
)
from fivefold.model.attention.blocks import Span, indices, joined, num_tokens
from fivefold.model.attention.blockwise import Keys
from fivefold.model.shards import MicrobatchShare

HEAD_CHUNKS = 4
"""Groups of heads that all-gather processes in turn, so that one is computed while the next
arrives."""

Backward = Generator[Keys, Tensor, Tensor]
"""A generator that yields keys, receives the gradients of KV in at least fp32, which it may change,
and returns those of the rank's own KV."""


@dataclass(frozen=True)
class OwnTokens:
    """The tokens that a rank contributes.

    Attributes:
        kv: keys and values of its tokens, [B, S, G, Dk + Dv].
        key_dim: Dk.
        part: which tokens these are.
        ids: token ids [B, L] of the whole rows, needed only if probabilities are dropped.
    """

    kv: Tensor
    key_dim: int
    part: MicrobatchShare
    ids: Tensor | None

    def keys(self, kv: Tensor, spans: tuple[Span, ...], heads: Span | None = None) -> Keys:
        """Keys and values [B, L, G, key_dim + value_dim] of the tokens in `spans`, for a kernel."""
        k, v = kv[..., : self.key_dim], kv[..., self.key_dim :]
        ids = self.ids
        if ids is not None:
            ids = torch.cat([ids[:, start:stop] for start, stop in spans], dim=1)
        blocks = self.part.shards.blocks(self.part.rank, spans)
        return Keys(k, v, blocks, spans, heads, ids)

    def buffer(self, spans: tuple[Span, ...], heads: int, dtype: torch.dtype) -> Tensor:
        """An empty buffer for the KV of these tokens."""
        rows, _, _, features = self.kv.shape
        return self.kv.new_empty((rows, num_tokens(spans), heads, features), dtype=dtype)

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which gradients are summed: at least fp32."""
        return torch.promote_types(self.kv.dtype, torch.float32)


class Transport(Protocol):
    """A communication pattern for keys and values."""

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Yield all keys that this rank's queries see."""

    def backward(self, own: OwnTokens) -> Backward:
        """Yield the same keys and receive their gradients."""


@dataclass(frozen=True)
class Ring:
    """Ring attention: KV takes P-1 hops (Liu et al. 2023), each overlapped with one block.

    In the backward, the gradient of a rank's KV starts at the next rank, with that rank's first
    foreign block, and returns in P-1 hops; the rank's own block is computed during the last.
    The forward sends (P-1) KV, the backward (P-1) (KV + dKV), with dKV in at least fp32. Public
    implementations let dKV take P hops.

    Attributes:
        group: context-parallel group.
    """

    group: dist.ProcessGroup

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Own keys first, then those of the previous rank, and so on."""
        chunks = own.part.shards.chunks
        size, rank = self.group.size(), self.group.rank()
        kv = own.kv
        for step in range(size):
            arriving = self._hop(kv) if step + 1 < size else None
            yield own.keys(kv, chunks[(rank - step) % size])
            if arriving is not None:
                kv = _arrived(arriving)

    def backward(self, own: OwnTokens) -> Backward:
        """Own keys last."""
        chunks = own.part.shards.chunks
        size, rank = self.group.size(), self.group.rank()
        arriving, returned = self._hop(own.kv), None
        for step in range(1, size):
            kv = _arrived(arriving)
            if step + 1 < size:
                arriving = self._hop(kv)
            grads = yield own.keys(kv, chunks[(rank - step) % size])
            if returned is not None:
                grads += _arrived(returned)
            returned = self._hop(grads, tag=1)
        del kv, arriving  # own keys need no others beside them
        grads = yield own.keys(own.kv, chunks[rank])
        assert returned is not None, "a ring has at least two ranks"
        return grads.add_(_arrived(returned))

    def _hop(self, x: Tensor, tag: int = 0) -> tuple[Messages, Tensor]:
        """Send to the next rank, receive from the previous one."""
        size, rank = self.group.size(), self.group.rank()
        incoming = torch.empty_like(x, memory_format=torch.contiguous_format)
        sends, receives = {(rank + 1) % size: x}, {(rank - 1) % size: incoming}
        return start_messages(sends, receives, self.group, tag), incoming


def _arrived(hop: tuple[Messages, Tensor]) -> Tensor:
    messages, incoming = hop
    messages.wait()
    return incoming


@dataclass(frozen=True)
class Halo:
    """Pairwise exchange: each rank sends every other only the part of its KV that that one sees.

    For packed documents and sliding windows, where most ranks see little of each other. Gradients
    return by the same messages, in at least fp32, and are summed in rank order.

    Attributes:
        group: context-parallel group.
    """

    group: dist.ProcessGroup

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Own keys first, then those of the previous rank, and so on."""
        size, rank = self.group.size(), self.group.rank()
        arriving = self._step(own, 1)
        yield own.keys(own.kv, own.part.spans)
        for step in range(1, size):
            kv = _arrived(arriving)
            if step + 1 < size:
                arriving = self._step(own, step + 1)
            spans = own.part.shards.sent((rank - step) % size, rank)
            if spans:
                yield own.keys(kv, spans)

    def backward(self, own: OwnTokens) -> Backward:
        """Own keys last."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        arriving = self._step(own, 1)
        returning: list[tuple[int, tuple[Messages, Tensor]]] = []
        for step in range(1, size):
            kv = _arrived(arriving)
            if step + 1 < size:
                arriving = self._step(own, step + 1)
            source, target = (rank - step) % size, (rank + step) % size
            grads = kv.new_empty(kv.shape, dtype=own.wide)
            spans = shards.sent(source, rank)
            if spans:
                grads = yield own.keys(kv, spans)
            incoming = own.buffer(shards.sent(rank, target), kv.shape[2], own.wide)
            messages = start_messages({source: grads}, {target: incoming}, self.group, tag=1)
            returning.append((target, (messages, incoming)))
        total = yield own.keys(own.kv, own.part.spans)
        for target, hop in sorted(returning, key=lambda item: item[0]):
            _add(total, own.part, shards.sent(rank, target), _arrived(hop))
        return total

    def _step(self, own: OwnTokens, step: int) -> tuple[Messages, Tensor]:
        """Send to the rank `step` after this one, receive from the rank `step` before it."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        source, target = (rank - step) % size, (rank + step) % size
        sent = taken(own.kv, own.part, shards.sent(rank, target))
        incoming = own.buffer(shards.sent(source, rank), own.kv.shape[2], own.kv.dtype)
        return start_messages({target: sent}, {source: incoming}, self.group), incoming


@dataclass(frozen=True)
class PeerToPeer:
    """The ring for whole rows; for documents and windows, pairwise exchange of visible keys.

    Attributes:
        group: context-parallel group.
    """

    group: dist.ProcessGroup

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Own keys first."""
        return self._way(own).forward(own)

    def backward(self, own: OwnTokens) -> Backward:
        """Own keys last."""
        return self._way(own).backward(own)

    def _way(self, own: OwnTokens) -> Transport:
        return Ring(self.group) if own.part.shards.mask.whole else Halo(self.group)


@dataclass(frozen=True)
class Gather:
    """All-gather of the KV that a rank sees, some heads at a time (Dubey et al., Llama 3, 2024).

    Queries meet all keys in row order, so no outputs are merged over ranks. The backward gathers
    again; gradients return in KV's dtype and are summed in at least fp32. For whole rows this sends
    (P-1) KV in the forward and 2 (P-1) KV in the backward; for documents and windows, only what is
    seen.

    Attributes:
        group: context-parallel group.
        head_chunks: maximum number of groups of heads.
    """

    group: dist.ProcessGroup
    head_chunks: int = HEAD_CHUNKS

    def backward(self, own: OwnTokens) -> Backward:
        """As `forward`; one group's gradients are returned while the next group is computed."""
        returning: list[tuple[Span, Callable[[], Tensor]]] = []
        for keys in self.forward(own):
            assert keys.heads is not None
            returning.append((keys.heads, self._return_gradients(own, (yield keys))))
        total = torch.empty_like(own.kv, dtype=own.wide)
        for (first, last), arrive in returning:
            total[:, :, first:last] = arrive()
        return total

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """The keys of one group of heads after the other."""
        heads = own.kv.shape[2]
        count = min(self.head_chunks, heads)
        chunks = [(heads * i // count, heads * (i + 1) // count) for i in range(count)]
        pieces = _pieces(own.part)
        arrive = self._fetch(own, chunks[0])
        for chunk, following in zip_longest(chunks, chunks[1:]):
            after = None if following is None else self._fetch(own, following)
            by_source = arrive()
            kv = torch.cat([by_source[source][:, slice(*at)] for _, source, at in pieces], dim=1)
            yield own.keys(kv, joined(span for span, _, _ in pieces), chunk)
            if after is not None:
                arrive = after

    def _fetch(self, own: OwnTokens, heads: Span) -> Callable[[], list[Tensor] | Tensor]:
        """Start gathering some heads; the result lists by source rank what this rank sees."""
        kv, size, rank = own.kv[:, :, slice(*heads)], self.group.size(), self.group.rank()
        if own.part.shards.mask.whole:
            return start_all_gather(kv[None], self.group).wait
        shards = own.part.shards
        received = [
            kv if source == rank else own.buffer(shards.sent(source, rank), kv.shape[2], kv.dtype)
            for source in range(size)
        ]
        others = [peer for peer in range(size) if peer != rank]
        messages = start_messages(
            {target: taken(kv, own.part, shards.sent(rank, target)) for target in others},
            {source: received[source] for source in others},
            self.group,
        )

        def arrive() -> list[Tensor]:
            messages.wait()
            return received

        return arrive

    def _return_gradients(self, own: OwnTokens, grads: Tensor) -> Callable[[], Tensor]:
        """Start returning the gradients of gathered keys to their ranks, summed there."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        by_source: list[list[Tensor]] = [[] for _ in range(size)]
        pieces = _pieces(own.part)
        lengths = [stop - start for (start, stop), _, _ in pieces]
        for (_, source, _), grad in zip(pieces, grads.split(lengths, dim=1), strict=True):
            by_source[source].append(grad)
        wire = own.kv.dtype
        if shards.mask.whole:
            whole = torch.stack([torch.cat(parts, dim=1) for parts in by_source])
            pending = start_reduce_scatter(whole, self.group, wire_dtype=wire)
            return lambda: pending.wait()[0]
        total = torch.cat(by_source[rank], dim=1)
        others = [peer for peer in range(size) if peer != rank]
        received = {
            target: own.buffer(shards.sent(rank, target), grads.shape[2], wire) for target in others
        }
        sends = {peer: torch.cat(by_source[peer], 1).to(wire) for peer in others if by_source[peer]}
        messages = start_messages(sends, received, self.group, tag=1)

        def arrive() -> Tensor:
            messages.wait()
            for target, grad in received.items():
                _add(total, own.part, shards.sent(rank, target), grad)
            return total

        return arrive


@dataclass(frozen=True)
class SingleRank:
    """One rank that has all tokens."""

    def forward(self, own: OwnTokens) -> Iterator[Keys]:
        """Its own keys."""
        yield own.keys(own.kv, own.part.spans)

    def backward(self, own: OwnTokens) -> Backward:
        """Its own keys."""
        return (yield own.keys(own.kv, own.part.spans))


def _pieces(part: MicrobatchShare) -> list[tuple[Span, int, Span]]:
    """(positions, source rank, indices in its message) of the visible tokens, in row order."""
    found = []
    for source, chunks in enumerate(part.shards.chunks):
        sent = part.shards.sent(source, part.rank) if source != part.rank else chunks
        if part.shards.mask.whole:
            sent = chunks
        found += [(span, source, indices(sent, span)) for span in sent]
    return sorted(found)


def taken(kv: Tensor, part: MicrobatchShare, spans: tuple[Span, ...]) -> Tensor:
    """The tokens of a rank's tensor [B, L, ...] that lie in `spans`."""
    if not spans:
        return kv[:, :0]
    return torch.cat([kv[:, slice(*indices(part.spans, span))] for span in spans], dim=1)


def _add(total: Tensor, part: MicrobatchShare, spans: tuple[Span, ...], grads: Tensor) -> None:
    """Add gradients of the tokens in `spans` to `total`, the gradients of a rank's tokens."""
    lengths = [stop - start for start, stop in spans]
    for span, grad in zip(spans, grads.split(lengths, dim=1) if spans else (), strict=True):
        total[:, slice(*indices(part.spans, span))] += grad
