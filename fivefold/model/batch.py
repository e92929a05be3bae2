"""One microbatch, as the model sees it. B rows of S tokens; T = B * S, row after row."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class Documents:
    """Which tokens belong together when a row holds several documents.

    Attributes:
        ids_BS: index of the document in its row, not decreasing along the row.
        starts: offsets into the T tokens at which a document starts, and T itself (known to the
            host, so that no kernel waits for the device).
    """

    ids_BS: Tensor
    starts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Batch:
    """One microbatch, a slice of its sequences, or one rank's part of them.

    `documents` and `token_ids` are of all L tokens that may be attended to: in a slice those before
    it as well, in a part those of all ranks, otherwise L = S.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token to predict; -100 takes no loss.
        positions: [B, S] int64, position in the document (or in the row).
        documents: [B, L] int64, index of the document in its row; None if rows are whole.
        token_ids: [B, L] int64, number of the token in the whole run; keys dropout masks.
        loss_weights: [B, S] float, weight of each token's loss; None if all weigh one.
        step: optimizer step; keys dropout masks.
        further_tokens: [D, B, S] int64, the token 1 .. D places further on, if more than the next
            one is to be predicted (`model.prediction`); None: no more.
        further_labels: [D, B, S] int64, what to predict from there; -100 takes no loss.
        further_weights: [D, B, S] float, weights of these losses; None if all weigh one.
        part: which tokens of [B, L] these are, if they are divided over ranks. Packed rows then
            are one row, laid end to end: S is its part, and B is 1.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    token_ids: Tensor
    loss_weights: Tensor | None = None
    step: int = 0
    further_tokens: Tensor | None = None
    further_labels: Tensor | None = None
    further_weights: Tensor | None = None
    part: MicrobatchShare | None = None

    @property
    def num_further(self) -> int:
        """D: how many tokens behind the next one are predicted as well."""
        return 0 if self.further_tokens is None else len(self.further_tokens)

    @property
    def own_token_ids(self) -> Tensor:
        """`token_ids` of the tokens themselves, [B, S]."""
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
        return Documents(self.documents, (*starts, self.documents.numel()))

    def divided(self, part: MicrobatchShare) -> "Batch":
        """The part of a whole microbatch that lies on one rank."""
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
            further_tokens=of_each(self.further_tokens),
            further_labels=of_each(self.further_labels),
            further_weights=of_each(self.further_weights),
            part=part,
        )

    def cut(self, num_slices: int) -> tuple["Batch", ...]:
        """Consecutive slices of the sequences, all of the same length."""
        if num_slices == 1:
            return (self,)
        assert self.num_further == 0, "slices share keys and values only"
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

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`, with the document boundaries still known to the host."""
        packing = self.packing
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        on_device: dict[str, Any] = {
            name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()
        }
        moved = replace(self, **on_device)
        if packing is not None and moved.documents is not None:
            packing = replace(packing, ids_BS=moved.documents)
        moved.__dict__["packing"] = packing
        return moved


def taken(values_BL: Tensor, part: MicrobatchShare) -> Tensor:
    """A rank's part of values of all tokens, [B, L] or with more dims behind."""
    rows = values_BL.reshape(part.shards.rows, -1, *values_BL.shape[2:])
    return torch.cat([rows[:, start:stop] for start, stop in part.spans], dim=1)
