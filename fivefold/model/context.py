"""Per-microbatch inputs that all layers of a stage share, computed once per forward."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.model.batch import Documents
from fivefold.model.dropout import Dropout, LayerDropout
from fivefold.model.linear_attention.chunks import DocumentChunks
from fivefold.model.rope import RotaryTables
from fivefold.model.sequence_slices import KeysAndValues
from fivefold.model.shards import MicrobatchShare


class BackwardLosses:
    """Losses that layers compute in their backwards.

    Not a list, because FSDP2 would give modules a copy of one.
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Record a loss of a layer, a scalar."""
        self._losses.append(loss)

    def take(self) -> list[Tensor]:
        """The sum recorded since the last call."""
        taken, self._losses = self._losses, []
        return taken


@dataclass(frozen=True)
class Context:
    """Properties of a microbatch that layers need.

    Attributes:
        rows: B; each row holds T / B tokens.
        rotary: RoPE tables of the kinds of layers that it turns, see `shape.rotations`.
        packing: document boundaries; None if every row is one document.
        dropout: dropout and router jitter; None in evaluation or if the model uses neither.
        part: the tokens this rank holds, if rows are split over ranks; None if it holds all.
        sequence: keeps keys and values of earlier sequence slices; None if rows are whole.
        routing: router decisions by layer, which a recomputed forward reuses.
        token_ids_T: run-wide ids of this rank's tokens in the residual stream; None for a model
            without experts.
        first_ids_B: run-wide id of the first token of each row of the microbatch, ascending.
        step: optimizer step.
        layer: dropout of the layer that runs.
        chunks: what `packing` is for layers that attend within chunks of documents.
        documents: documents as layers with linear attention walk through them; None: no such layer.
        temperature: factors of queries by position, [B, S, 1, 1]; None: all 1.
        shift: difference between the numbers of layers and those of the first ones that have
            their weights, in MTP modules that share them.
        noted: receives losses of layers in their backwards.
    """

    rows: int
    rotary: Mapping[bool, RotaryTables]
    packing: Documents | None
    dropout: Dropout | None
    part: MicrobatchShare | None
    sequence: KeysAndValues | None
    routing: dict[int, Any]
    token_ids_T: Tensor | None
    first_ids_B: Tensor
    step: int
    layer: LayerDropout = LayerDropout()
    chunks: Documents | None = None
    documents: DocumentChunks | None = None
    temperature: Tensor | None = None
    shift: int = 0
    noted: BackwardLosses = field(default_factory=BackwardLosses)

    def again(self, run: int, layers: int) -> "Context":
        """The context for another run of this many layers with the same weights, after `run`
        runs."""
        drops = self.dropout
        drops = None if drops is None else replace(drops, run=run)
        return replace(self, dropout=drops, shift=run * layers)

    def by_rows(self, x_TF: Tensor, heads: int) -> Tensor:
        """[T, F] -> [B, S, heads, F / heads]."""
        return x_TF.view(self.rows, x_TF.shape[0] // self.rows, heads, -1)

    @property
    def recurrence(self) -> DocumentChunks:
        """Documents in the form that a recurrence needs."""
        assert self.documents is not None, "only layers with linear attention ask"
        return self.documents

    @property
    def microbatch_rows(self) -> int:
        """Rows of the microbatch, over all ranks that share it."""
        return len(self.first_ids_B)

    def row_length(self, tokens: int) -> int:
        """Tokens per row of the microbatch, over all ranks that share it."""
        ranks = 1 if self.part is None else len(self.part.shards.chunks)
        return tokens * ranks // self.microbatch_rows

    @property
    def rows_T(self) -> Tensor:
        """Row index of each of this rank's tokens in the residual stream."""
        assert self.token_ids_T is not None, "only experts ask"
        return torch.searchsorted(self.first_ids_B.contiguous(), self.token_ids_T, right=True) - 1
