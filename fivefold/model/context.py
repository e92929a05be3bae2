"""What every layer of a stage needs to know of the microbatch, worked out once per forward."""

from dataclasses import dataclass

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
    """

    rows: int
    rotary: RotaryTables | None
    packing: Documents | None
    dropout: Dropout | None
    part: MicrobatchShare | None = None
    sequence: SlicedSequence | None = None
