"""What every layer of a stage needs to know of the microbatch, worked out once per forward."""

from dataclasses import dataclass

from fivefold.model.batch import Documents
from fivefold.model.dropout import Dropout
from fivefold.model.rope import RotaryTables


@dataclass(frozen=True)
class Context:
    """A microbatch as the layers see it.

    Attributes:
        rows: B, of which every one holds T / B tokens.
        rotary: RoPE tables, or None if positions are learned.
        packing: where documents begin, or None if every row is one document.
        dropout: None unless the model is training and drops something.
    """

    rows: int
    rotary: RotaryTables | None
    packing: Documents | None
    dropout: Dropout | None
