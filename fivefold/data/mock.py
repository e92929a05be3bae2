"""Synthetic tokens for runs that measure and need no text (Megatron-LM's --mock-data)."""

import numpy as np

from fivefold.data.order import mixed
from fivefold.data.tokenizer import END_OF_DOCUMENT, Tokenizer

NUM_TOKENS = 1 << 40
_RUN = 1 << 10


class CountedTokens:
    """Numbers that count up through the vocabulary, and jump elsewhere every 1,024 tokens.

    They are learnt quickly, so that a run that measures also shows that it trains. The
    end-of-document token, which lies in the middle of many vocabularies, is left out.
    """

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self._numbers, self._eod_id = vocab_size - 1, eod_id

    def __len__(self) -> int:
        return NUM_TOKENS

    def __getitem__(self, part: slice) -> np.ndarray:
        """A slice of the tokens, int64."""
        runs, places = np.divmod(np.arange(*part.indices(NUM_TOKENS)), _RUN)
        distinct, which = np.unique(runs, return_inverse=True)
        starts = np.array([mixed(int(run)) % self._numbers for run in distinct], dtype=np.int64)
        numbers = (starts[which] + places) % self._numbers
        return numbers + (numbers >= self._eod_id)


class MockTokens:
    """One endless document, longer than any run reads, in the form of `IndexedTokens`.

    Every sample is a part of it, and attends to all of itself.
    """

    num_documents = num_sequences = 1

    def __init__(self, vocab_size: int, eod_id: int) -> None:
        self.tokens = self.checked = CountedTokens(vocab_size, eod_id)
        self.sequence_starts = self.document_starts = np.array([0, NUM_TOKENS], dtype=np.int64)


def number_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer whose tokens are spelled as their numbers; the last one ends documents.

    Megatron-LM's NullTokenizer adds that one to the vocabulary.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    names = [*map(str, range(vocab_size - 1)), END_OF_DOCUMENT]
    backend = Backend(models.WordLevel({name: token for token, name in enumerate(names)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return Tokenizer(backend.to_str(), "the tokenizer of numbers")
