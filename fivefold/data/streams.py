"""Cuts one split of a corpus into samples: consecutive tokens of text, or whole conversations."""

import numpy as np

from fivefold.data.checksums import TokenArray
from fivefold.data.packing import BEGINS, Packing


class Text:
    """Sample k is the seq_length + 1 tokens that begin at token `start` + k * seq_length."""

    def __init__(self, tokens: TokenArray, start: int, end: int, packing: Packing) -> None:
        self._tokens, self._start, self._end = tokens, start, end
        self._length = packing.seq_length

    def __len__(self) -> int:
        return max(0, self._end - self._start - 1) // self._length

    def window(self, sample: int) -> tuple[np.ndarray, None]:
        """The tokens of a sample, int64 [seq_length + 1]."""
        start = self._start + sample * self._length
        return self._tokens[start : start + self._length + 1].astype(np.int64), None


class Conversations:
    """Each sample holds as many of the next conversations as fit into seq_length + 1 tokens.

    An answer is never separated from its question: the rest of a sample is padding, a document of
    its own without a loss. A conversation longer than a sample loses its end.

    Attributes:
        cut: how many conversations lose their end.
        padding: tokens of padding in all samples.
    """

    def __init__(
        self, tokens: TokenArray, marks: TokenArray, starts: np.ndarray, packing: Packing
    ) -> None:
        """`starts`: the first token of each conversation, then the end of the last one."""
        self._tokens, self._marks, self._eod_id = tokens, marks, packing.eod_id
        self._room = packing.seq_length + 1
        firsts = [0]  # conversation of each sample, then their number
        while firsts[-1] < len(starts) - 1:
            fits = int(np.searchsorted(starts, starts[firsts[-1]] + self._room, side="right")) - 1
            firsts.append(max(fits, firsts[-1] + 1))
        self._starts = starts[firsts]
        held = np.minimum(np.diff(self._starts), self._room)
        self.cut = int((np.diff(starts) > self._room).sum())
        self.padding = int((self._room - held).sum())

    def __len__(self) -> int:
        return len(self._starts) - 1

    def window(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of a sample and their marks, int64 [seq_length + 1] each."""
        start, end = self._starts[sample : sample + 2]
        end = min(end, start + self._room)
        tokens = np.full(self._room, self._eod_id, dtype=np.int64)
        marks = np.zeros(self._room, dtype=np.int64)
        tokens[: end - start] = self._tokens[start:end]
        marks[: end - start] = self._marks[start:end]
        if end - start < self._room:
            marks[end - start] = BEGINS
        return tokens, marks
