"""One microbatch, as the model sees it. B rows of S tokens; T = B * S, row after row."""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


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
    """One microbatch, or a slice of its sequences.

    `documents` and `token_ids` are of all L tokens that may be attended to: in a slice those before
    it as well, otherwise L = S.

    Attributes:
        tokens: [B, S] int64.
        labels: [B, S] int64, the token to predict; -100 takes no loss.
        positions: [B, S] int64, position in the document (or in the row).
        documents: [B, L] int64, index of the document in its row; None if rows are whole.
        token_ids: [B, L] int64, number of the token in the whole run; keys dropout masks.
        loss_weights: [B, S] float, weight of each token's loss; None if all weigh one.
        step: optimizer step; keys dropout masks.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    token_ids: Tensor
    loss_weights: Tensor | None = None
    step: int = 0

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

    def cut(self, num_slices: int) -> tuple["Batch", ...]:
        """Consecutive slices of the sequences, all of the same length."""
        if num_slices == 1:
            return (self,)
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
