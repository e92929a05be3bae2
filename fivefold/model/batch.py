"""Model inputs of one microbatch: B rows of S tokens, flattened row by row to T = B * S."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fivefold.config.reach import Reach
from fivefold.mesh.device import without_waiting
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class Documents:
    """Document boundaries, when a row packs several documents.

    Attributes:
        starts: offset of each document in the T tokens, then T; on the host, so that no kernel
            launch waits for the device.
        rows: number of rows.
        device: where the tokens are.
    """

    starts: tuple[int, ...]
    rows: int
    device: torch.device = torch.device("cpu")

    @cached_property
    def starts_C(self) -> Tensor:
        """`starts` as int32 on the device; the host does not wait for the copy."""
        return without_waiting(torch.tensor(self.starts, dtype=torch.int32), self.device)

    @cached_property
    def begins_BL(self) -> Tensor:
        """For each token the place in its row of its document's first token, int32."""
        starts = self.starts_C
        places = torch.arange(self.starts[-1], dtype=torch.int32, device=starts.device)
        first = starts[torch.searchsorted(starts, places, right=True) - 1]
        length = self.starts[-1] // self.rows
        return (first - places // length * length).view(self.rows, length)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each document."""
        return [end - start for start, end in pairwise(self.starts)]

    @cached_property
    def longest(self) -> int:
        """Number of tokens of the longest document."""
        return max(self.lengths)

    def prepare(self) -> None:
        """Compute what layers need on a GPU, since compiled layers cannot."""
        if self.device.type == "cuda":
            _ = self.starts_C, self.longest


@dataclass(frozen=True, eq=False)
class Batch:
    """One microbatch, a sequence slice of it, or one context-parallel rank's part of it.

    `documents` and `token_ids` cover all L tokens that can be attended to: for a slice also the
    tokens before it, for a part also those of the other ranks; otherwise L = S.

    Attributes:
        tokens: [B, S] int64 token ids.
        labels: [B, S] int64 token to predict; -100 is ignored by the loss.
        positions: [B, S] int64 position in the document (or in the row).
        documents: [B, L] int64 index of the document in its row; None without packing.
        token_ids: [B, L] int64 index of the token in the whole run; keys dropout masks.
        loss_weights: [B, S] float weight of each token's loss; None: all 1.
        step: optimizer step; keys dropout masks.
        mtp_tokens: [D, B, S] int64 token 1 .. D places further on, for multi-token prediction
            (`model.prediction`); None without it.
        mtp_labels: [D, B, S] int64 token to predict at each depth; -100 is ignored.
        mtp_weights: [D, B, S] float weights of these losses; None: all 1.
        part: which of the [B, L] tokens these are, if tokens are split over ranks. Packed rows are
            then laid end to end as one row: B is 1 and S is this rank's part of it.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    token_ids: Tensor
    loss_weights: Tensor | None = None
    step: int = 0
    mtp_tokens: Tensor | None = None
    mtp_labels: Tensor | None = None
    mtp_weights: Tensor | None = None
    part: MicrobatchShare | None = None
    _chunks: dict[int, Documents] = field(default_factory=dict, init=False, repr=False)

    @property
    def mtp_depth(self) -> int:
        """D: how many tokens beyond the next one are predicted."""
        return 0 if self.mtp_tokens is None else len(self.mtp_tokens)

    @property
    def own_token_ids(self) -> Tensor:
        """`token_ids` of the batch's own tokens, [B, S]."""
        if self.part is not None:
            return taken(self.token_ids, self.part)
        return self.token_ids[:, -self.tokens.shape[1] :]

    @cached_property
    def packing(self) -> Documents | None:
        """The documents of the rows, or None if every row is one document."""
        if self.documents is None:
            return None
        begins_BS = torch.ones_like(self.documents, dtype=torch.bool)
        begins_BS[:, 1:] = self.documents.diff(dim=1) != 0
        starts = begins_BS.flatten().nonzero().flatten().tolist()
        if len(starts) == len(self.documents):
            return None
        starts.append(self.documents.numel())
        return Documents(tuple(starts), len(self.documents), self.documents.device)

    @cached_property
    def recurrence(self) -> DocumentChunks:
        """The documents of the rows, as a recurrence walks through them."""
        rows, length = self.token_ids.shape
        whole = range(0, rows * length + 1, length)
        starts = whole if self.packing is None else self.packing.starts
        return DocumentChunks.of(starts, self.token_ids.device)

    @property
    def order(self) -> tuple[Tensor, ...]:
        """The tensors of `recurrence`, if a layer has used it."""
        if "recurrence" not in self.__dict__:
            return ()
        of = self.recurrence
        return of.take, of.put, of.position, *(() if of.real is None else (of.real,))

    def chunks_of(self, size: int | None) -> Documents | None:
        """Chunks of the documents of the rows, or None if every row is one chunk.

        Args:
            size: most tokens of a chunk, of which a document's first starts with it; None: any.
        """
        rows, length = self.token_ids.shape
        if size is None or (self.packing is None and size >= length):
            return self.packing
        if size not in self._chunks:
            whole = range(0, rows * length + 1, length)
            documents = whole if self.packing is None else self.packing.starts
            found = Documents(Reach(chunk=size).starts(documents), rows, self.token_ids.device)
            found.prepare()
            self._chunks[size] = found
        return self._chunks[size]

    def divided(self, part: MicrobatchShare) -> "Batch":
        """One rank's part of a whole microbatch."""
        weights = self.loss_weights

        def of_each(values_DBS: Tensor | None) -> Tensor | None:
            if values_DBS is None:
                return None
            return torch.stack([taken(values_BS, part) for values_BS in values_DBS])

        return replace(
            self,
            tokens=taken(self.tokens, part),
            labels=taken(self.labels, part),
            positions=taken(self.positions, part),
            loss_weights=None if weights is None else taken(weights, part),
            mtp_tokens=of_each(self.mtp_tokens),
            mtp_labels=of_each(self.mtp_labels),
            mtp_weights=of_each(self.mtp_weights),
            part=part,
        )

    def last(self) -> "Batch":
        """The last token of each row, as a slice."""
        length = self.tokens.shape[1]
        return self._slice(length - 1, length)

    def cut(self, num_slices: int) -> tuple["Batch", ...]:
        """Consecutive sequence slices of equal length."""
        if num_slices == 1:
            return (self,)
        assert self.mtp_depth == 0, "slices share keys and values only"
        length = self.tokens.shape[1] // num_slices
        return tuple(
            self._slice(end - length, end) for end in range(length, num_slices * length + 1, length)
        )

    def _slice(self, start: int, end: int) -> "Batch":
        def part(values: Tensor) -> Tensor:
            return values[:, start:end].contiguous()

        return replace(
            self,
            tokens=part(self.tokens),
            labels=part(self.labels),
            positions=part(self.positions),
            documents=None if self.documents is None else self.documents[:, :end].contiguous(),
            token_ids=self.token_ids[:, :end].contiguous(),
            loss_weights=None if self.loss_weights is None else part(self.loss_weights),
        )


def on_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    """Copies of a step's batches on a device; document boundaries stay known to the host.

    All tensors of one dtype travel together from pinned memory, so that the host does not wait and
    the device starts one copy, not several for each batch.
    """
    if device.type == "cpu":
        return [_moved(batch, {}) for batch in batches]
    flat = _flat(batches, pinned=device.type == "cuda")
    return _placed(batches, {d: x.to(device, non_blocking=True) for d, x in flat.items()})


class FixedBatches:
    """A step's batches on a device, in memory that later steps refill.

    Args:
        batches: the first step's, still on the host, each row one document.
        device: where they are to be.

    Attributes:
        batches: batches on the device.
    """

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        assert all(batch.packing is None for batch in batches), "documents differ in length"
        self._pinned = device.type == "cuda"
        flat = _flat(batches, self._pinned)
        self._memory = {dtype: x.to(device, non_blocking=True) for dtype, x in flat.items()}
        self.batches = _placed(batches, self._memory)

    def fill(self, batches: Sequence[Batch]) -> None:
        """Copy batches of the same form, as `on_device` does."""
        for dtype, flat in _flat(batches, self._pinned).items():
            self._memory[dtype].copy_(flat, non_blocking=True)


def form(batches: Sequence[Batch]) -> Hashable:
    """What equally shaped batches have in common: shapes, types, and whose part they are."""
    found: list[Hashable] = []
    for batch in batches:
        shapes = tuple((name, x.shape, x.dtype) for name, x in _tensors(batch))
        starts = None if batch.packing is None else batch.packing.starts
        part = None if batch.part is None else (batch.part.shards.chunks, batch.part.rank)
        found.append((shapes, starts, part))
    return tuple(found)


def _flat(batches: Sequence[Batch], pinned: bool) -> dict[torch.dtype, Tensor]:
    """All elements of the batches' tensors by type, in the order of `_places`."""
    found = {}
    for dtype, places in _places(batches).items():
        flat = torch.cat([getattr(batches[i], name).flatten() for i, name in places])
        found[dtype] = flat.pin_memory() if pinned else flat
    return found


def _placed(batches: Sequence[Batch], flat: Mapping[torch.dtype, Tensor]) -> list[Batch]:
    """The batches, with their tensors as views of memory laid out by `_flat`."""
    moved: list[dict[str, Any]] = [{} for _ in batches]
    for dtype, places in _places(batches).items():
        tensors = [getattr(batches[i], name) for i, name in places]
        parts = flat[dtype].split([tensor.numel() for tensor in tensors])
        for (i, name), tensor, part in zip(places, tensors, parts, strict=True):
            moved[i][name] = part.view(tensor.shape)
    return [_moved(batch, tensors) for batch, tensors in zip(batches, moved, strict=True)]


def _places(batches: Sequence[Batch]) -> dict[torch.dtype, list[tuple[int, str]]]:
    """The tensors of one type in all batches, in order."""
    found: dict[torch.dtype, list[tuple[int, str]]] = {}
    for i, batch in enumerate(batches):
        for name, tensor in _tensors(batch):
            found.setdefault(tensor.dtype, []).append((i, name))
    return found


def _tensors(batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """The fields of a batch that are tensors."""
    for each in fields(batch):
        value = getattr(batch, each.name)
        if isinstance(value, Tensor):
            yield each.name, value


def _moved(batch: Batch, tensors: Mapping[str, Any]) -> Batch:
    there = replace(batch, **tensors)
    packing = batch.packing
    if packing is not None and there.documents is not None:
        packing = replace(packing, device=there.documents.device)
        packing.prepare()
    there.__dict__["packing"] = packing
    return there


def taken(values_BL: Tensor, part: MicrobatchShare) -> Tensor:
    """One rank's part of values [B, L, ...] of all tokens."""
    rows = values_BL.reshape(part.shards.rows, -1, *values_BL.shape[2:])
    return torch.cat([rows[:, start:stop] for start, stop in part.spans], dim=1)
