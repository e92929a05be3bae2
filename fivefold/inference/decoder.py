"""Continues rows of tokens; keeps keys and values, so that each new token costs one token's
work."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.model.batch import Batch, on_device
from fivefold.model.sequence_slices import GrowingSequence
from fivefold.model.transformer import Stage
from fivefold.tensor.linear import WholeRows


class Decoder:
    """The next token of rows of any lengths, as if each row were alone.

    Rows are padded on the left with a document of their own. Once the longest row exceeds the
    window, the window moves on, and everything in it is computed anew.

    Args:
        stage: a whole model, or a tensor-parallel rank's part of it.
        rows: prompts of at least one token each.
        window: most tokens that the model is given.
        group: tensor-parallel group, without sequence parallelism; None: one device.
    """

    def __init__(
        self,
        stage: Stage,
        rows: Sequence[Sequence[int]],
        window: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._whole = None if group is None else WholeRows(group, sequence_parallel=False)
        self._stage, self._window = stage.eval(), window
        self._rows = [list(row) for row in rows]
        self._device = next(stage.parameters()).device
        self._cache: GrowingSequence | None = None

    def add(self, tokens: Sequence[int]) -> None:
        """Add a token to each row."""
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits [rows, V] of the token after each row, over the vocabulary without padding."""
        length = max(map(len, self._rows))
        batch = self._batch(min(length, self._window))
        if length > self._window:
            self._cache = None
        elif self._cache is None:
            self._cache = GrowingSequence()
        else:
            batch = batch.last()
        (there,) = on_device([batch], self._device)
        logits_TV = self._stage.logits(there, self._cache)
        last_BV = logits_TV.unflatten(0, (len(self._rows), -1))[:, -1]
        if self._whole is not None:
            last_BV = self._whole(last_BV.contiguous())
        return last_BV[:, : self._stage.model.vocab_size]

    def _batch(self, length: int) -> Batch:
        """The last tokens of each row, this many including padding."""
        shape = (len(self._rows), length)
        tokens, positions, documents = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
        for number, row in enumerate(self._rows):
            kept = torch.tensor(row[-length:])
            tokens[number, length - len(kept) :] = kept
            positions[number, length - len(kept) :] = torch.arange(len(kept))
            documents[number, length - len(kept) :] = 1
        ids = torch.arange(shape[0])[:, None] * self._window + torch.arange(length)
        return Batch(tokens, tokens, positions, documents, ids)
