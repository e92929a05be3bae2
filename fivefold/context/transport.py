"""How the keys and values of other ranks reach a rank, and how their gradients come home.

A transport hands out keys as they arrive, own ones among them, while the next are under way. In the
backward it hands them out again and takes their gradients. KV stands for a rank's keys and values,
[B, S, G, Dk + Dv]; ranks are those of the context-parallel group, P in number.
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
from fivefold.model.blocks import Span, indices, joined, num_tokens
from fivefold.model.blockwise import Keys
from fivefold.model.shards import MicrobatchShare

HEAD_CHUNKS = 4
"""Parts of the heads that all-gather takes in turn: while one is computed the next arrives."""

Pair = tuple[Tensor, Tensor]
Backward = Generator[Keys, Pair, Tensor]
"""Yields keys, is sent their gradients in at least fp32, returns those of the rank's own KV."""


@dataclass(frozen=True)
class Own:
    """What a rank brings.

    Attributes:
        kv: keys and values of its tokens, [B, S, G, Dk + Dv].
        key_dim: Dk.
        part: which tokens these are.
        ids: token ids [B, L] of the whole rows, known if probabilities are dropped.
    """

    kv: Tensor
    key_dim: int
    part: MicrobatchShare
    ids: Tensor | None

    def keys(self, kv: Tensor, spans: tuple[Span, ...], heads: Span | None = None) -> Keys:
        """Keys and values of the tokens in `spans`, for a kernel."""
        k, v = kv[..., : self.key_dim], kv[..., self.key_dim :]
        ids = self.ids
        if ids is not None:
            ids = torch.cat([ids[:, start:stop] for start, stop in spans], dim=1)
        blocks = self.part.shards.blocks(self.part.rank, spans)
        return Keys(k, v, blocks, spans, heads, ids)

    def buffer(self, spans: tuple[Span, ...], heads: int, dtype: torch.dtype) -> Tensor:
        """Room for what these tokens send."""
        rows, _, _, features = self.kv.shape
        return self.kv.new_empty((rows, num_tokens(spans), heads, features), dtype=dtype)

    @property
    def wide(self) -> torch.dtype:
        """In which gradients are summed."""
        return torch.promote_types(self.kv.dtype, torch.float32)


class Transport(Protocol):
    """A way for keys and values to travel."""

    def forward(self, own: Own) -> Iterator[Keys]:
        """All keys that this rank's queries see."""

    def backward(self, own: Own) -> Backward:
        """The same keys in exchange for their gradients."""


@dataclass(frozen=True)
class Ring:
    """KV goes round in P-1 hops (Liu et al. 2023), each under way while a block is computed.

    In the backward the gradient of a rank's KV starts at the next rank with the first block that is
    not its own, and reaches home in P-1 hops; the own block is computed during the last. Forward
    (P-1) KV sent, backward (P-1) (KV + dKV), dKV in at least fp32. Public implementations let dKV
    hop P times.

    Attributes:
        group: group of context parallelism.
    """

    group: dist.ProcessGroup

    def forward(self, own: Own) -> Iterator[Keys]:
        """Own keys first, then those of the rank before, and so on."""
        chunks = own.part.shards.chunks
        size, rank = self.group.size(), self.group.rank()
        kv = own.kv
        for step in range(size):
            arriving = self._hop(kv) if step + 1 < size else None
            yield own.keys(kv, chunks[(rank - step) % size])
            if arriving is not None:
                kv = _arrived(arriving)

    def backward(self, own: Own) -> Backward:
        """Own keys last."""
        chunks = own.part.shards.chunks
        size, rank = self.group.size(), self.group.rank()
        arriving, coming_home = self._hop(own.kv), None
        for step in range(1, size):
            kv = _arrived(arriving)
            if step + 1 < size:
                arriving = self._hop(kv)
            grads = _joint((yield own.keys(kv, chunks[(rank - step) % size])))
            if coming_home is not None:
                grads += _arrived(coming_home)
            coming_home = self._hop(grads, tag=1)
        grads = _joint((yield own.keys(own.kv, chunks[rank])))
        assert coming_home is not None, "a ring has at least two ranks"
        return grads + _arrived(coming_home)

    def _hop(self, x: Tensor, tag: int = 0) -> tuple[Messages, Tensor]:
        """To the next rank, from the one before."""
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
    """Each rank sends every other, one after the other, the part of its KV that this one sees.

    For packed documents and sliding windows, where most ranks see little of each other. Gradients
    go home the same way, in at least fp32, and are summed there in the order of the ranks.

    Attributes:
        group: group of context parallelism.
    """

    group: dist.ProcessGroup

    def forward(self, own: Own) -> Iterator[Keys]:
        """Own keys first, then those of the rank before, and so on."""
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

    def backward(self, own: Own) -> Backward:
        """Own keys last."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        arriving = self._step(own, 1)
        home: list[tuple[int, tuple[Messages, Tensor]]] = []
        for step in range(1, size):
            kv = _arrived(arriving)
            if step + 1 < size:
                arriving = self._step(own, step + 1)
            source, target = (rank - step) % size, (rank + step) % size
            grads = kv.new_empty(kv.shape, dtype=own.wide)
            spans = shards.sent(source, rank)
            if spans:
                grads = _joint((yield own.keys(kv, spans)))
            incoming = own.buffer(shards.sent(rank, target), kv.shape[2], own.wide)
            messages = start_messages({source: grads}, {target: incoming}, self.group, tag=1)
            home.append((target, (messages, incoming)))
        total = _joint((yield own.keys(own.kv, own.part.spans)))
        for target, hop in sorted(home, key=lambda item: item[0]):
            _add(total, own.part, shards.sent(rank, target), _arrived(hop))
        return total

    def _step(self, own: Own, step: int) -> tuple[Messages, Tensor]:
        """To the rank `step` further on, from the one as far behind."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        source, target = (rank - step) % size, (rank + step) % size
        sent = taken(own.kv, own.part, shards.sent(rank, target))
        incoming = own.buffer(shards.sent(source, rank), own.kv.shape[2], own.kv.dtype)
        return start_messages({target: sent}, {source: incoming}, self.group), incoming


@dataclass(frozen=True)
class PeerToPeer:
    """The ring for whole rows; for documents and windows only what is seen, without detours.

    Attributes:
        group: group of context parallelism.
    """

    group: dist.ProcessGroup

    def forward(self, own: Own) -> Iterator[Keys]:
        """Own keys first."""
        return self._way(own).forward(own)

    def backward(self, own: Own) -> Backward:
        """Own keys last."""
        return self._way(own).backward(own)

    def _way(self, own: Own) -> Transport:
        return Ring(self.group) if own.part.shards.sight.whole else Halo(self.group)


@dataclass(frozen=True)
class Gather:
    """All KV that a rank sees is gathered, some heads at a time (Dubey et al., Llama 3, 2024).

    Each chunk is computed against all keys in their order, without merging sources. The backward
    gathers again; gradients go home in KV's type and are summed there in at least fp32. Of whole
    rows (P-1) KV forward, 2 (P-1) KV backward; of documents and windows only what is seen.

    Attributes:
        group: group of context parallelism.
        head_chunks: parts of the heads, at most.
    """

    group: dist.ProcessGroup
    head_chunks: int = HEAD_CHUNKS

    def forward(self, own: Own) -> Iterator[Keys]:
        """The keys of a part of the heads, then of the next."""
        return self._keys(own)

    def backward(self, own: Own) -> Backward:
        """The same; gradients of one part of the heads go home while the next is computed."""
        home: list[tuple[Span, Callable[[], Tensor]]] = []
        for keys in self._keys(own):
            assert keys.heads is not None
            home.append((keys.heads, self._send_home(own, _joint((yield keys)))))
        total = torch.empty_like(own.kv, dtype=own.wide)
        for (first, last), arrive in home:
            total[:, :, first:last] = arrive()
        return total

    def _keys(self, own: Own) -> Iterator[Keys]:
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

    def _fetch(self, own: Own, heads: Span) -> Callable[[], list[Tensor] | Tensor]:
        """Start gathering some heads: by source, what this rank sees of it."""
        kv, size, rank = own.kv[:, :, slice(*heads)], self.group.size(), self.group.rank()
        if own.part.shards.sight.whole:
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

    def _send_home(self, own: Own, grads: Tensor) -> Callable[[], Tensor]:
        """Start summing gradients of keys in their order where these are at home."""
        size, rank, shards = self.group.size(), self.group.rank(), own.part.shards
        by_source: list[list[Tensor]] = [[] for _ in range(size)]
        pieces = _pieces(own.part)
        lengths = [stop - start for (start, stop), _, _ in pieces]
        for (_, source, _), grad in zip(pieces, grads.split(lengths, dim=1), strict=True):
            by_source[source].append(grad)
        wire = own.kv.dtype
        if shards.sight.whole:
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


def _pieces(part: MicrobatchShare) -> list[tuple[Span, int, Span]]:
    """What a rank sees in the order of the row: positions, source, and where in what it sends."""
    found = []
    for source, chunks in enumerate(part.shards.chunks):
        sent = part.shards.sent(source, part.rank) if source != part.rank else chunks
        if part.shards.sight.whole:
            sent = chunks
        found += [(span, source, indices(sent, span)) for span in sent]
    return sorted(found)


def taken(kv: Tensor, part: MicrobatchShare, spans: tuple[Span, ...]) -> Tensor:
    """The tokens of a rank's tensor that lie in `spans`."""
    if not spans:
        return kv[:, :0]
    return torch.cat([kv[:, slice(*indices(part.spans, span))] for span in spans], dim=1)


def _add(total: Tensor, part: MicrobatchShare, spans: tuple[Span, ...], grads: Tensor) -> None:
    """Add the gradients of the tokens in `spans` to those of a rank's tokens."""
    lengths = [stop - start for start, stop in spans]
    for span, grad in zip(spans, grads.split(lengths, dim=1) if spans else (), strict=True):
        total[:, slice(*indices(part.spans, span))] += grad


def _joint(grads: Pair) -> Tensor:
    """The gradient of KV from those of keys and of values."""
    return torch.cat(grads, dim=-1)
