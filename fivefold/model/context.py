"""What every layer of a stage needs to know of the microbatch, worked out once per forward."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.model.batch import Documents
from fivefold.model.dropout import Dropout
from fivefold.model.rope import RotaryTables
from fivefold.model.sequence_slices import SlicedSequence
from fivefold.model.shards import MicrobatchShare


@dataclass(frozen=True)
class Context:
    """A microbatch as the layers see it.

    Attributes:
        rows: B, of which every one holds T / B tokens.
        rotary: RoPE tables, or None if positions are learned.
        packing: where documents begin, or None if every row is one document.
        dropout: None unless the model is training and drops something.
        part: what this rank holds of rows divided over ranks, or None if it has all of them.
        sequence: what earlier slices of the rows left, or None if rows are whole.
        routing: what the routers of the stage decide, by layer; a repeated forward finds it here.
        token_ids_T: run-wide ids of the tokens of the residual stream on this rank; None for a
            model without experts.
        first_ids_B: id of the first token of every row of the microbatch, ascending.
        step: optimizer step.
    """

    rows: int
    rotary: RotaryTables | None
    packing: Documents | None
    dropout: Dropout | None
    part: MicrobatchShare | None
    sequence: SlicedSequence | None
    routing: dict[int, Any]
    token_ids_T: Tensor | None
    first_ids_B: Tensor
    step: int

    @property
    def microbatch_rows(self) -> int:
        """Rows of the microbatch, on all ranks that share it."""
        return len(self.first_ids_B)

    @property
    def rows_T(self) -> Tensor:
        """The row of each token of the residual stream on this rank."""
        assert self.token_ids_T is not None, "only experts ask"
        return torch.searchsorted(self.first_ids_B.contiguous(), self.token_ids_T, right=True) - 1
