"""Documents with their middle last, so that a model learns to fill it in.

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), as
Megatron-LM's `GPTFIMDataset` does it (StarCoder's way): to the documents of a sample, at random
characters.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np

from fivefold.config.data import FIM_TOKENS, DataConfig
from fivefold.config.settings import flag_of
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError, Mistake


class Infilling:
    """Rearranges the documents of a sample.

    Attributes:
        settings: all that what it makes depends on, beside the tokenizer.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer) -> None:
        """Set up from the `fim_` settings of `config`.

        Raises:
            DataError: the tokenizer lacks one of their tokens.
        """
        self._tokenizer = tokenizer
        self._rate, self._spm_rate = config.fim_rate, config.fim_spm_rate
        self._no_prefix = config.fim_no_prefix
        self._fragment_rate = config.fim_fragment_rate or 0.0
        names = [*FIM_TOKENS, *(["fim_split_sample"] if config.fim_split_sample else [])]
        self.settings: dict[str, Any] = {
            name: getattr(config, name)
            for name in ("fim_rate", "fim_spm_rate", "fim_fragment_rate", "fim_no_prefix", *names)
        }
        ids = {name: tokenizer.id_of(self.settings[name]) for name in names}
        if missing := [name for name in names if ids[name] is None]:
            raise _lacking(tokenizer, {name: self.settings[name] for name in missing})
        self._prefix, self._middle, self._suffix = (np.array([ids[name]]) for name in FIM_TOKENS)
        self._split_id = ids.get("fim_split_sample")

    def __call__(self, window: np.ndarray, random: Random) -> np.ndarray:
        """The tokens of a sample, int64 [length], with rearranged documents, cut to the same
        length.

        Markers, and the extra tokens of words that are cut in two, displace the last tokens.
        """
        parts: list[np.ndarray] = []
        for document, end in _pieces(window, self._tokenizer.eod_id):
            parts += [self._document(document, random), end]
        return np.concatenate(parts)[: len(window)]

    def _document(self, ids: np.ndarray, random: Random) -> np.ndarray:
        if random.random() >= self._rate:
            return ids
        if self._split_id is None or self._split_id not in ids:
            return self._rearranged(ids, random)
        parts: list[np.ndarray] = []
        for fragment, end in _pieces(ids, self._split_id):
            chosen = random.random() < self._fragment_rate
            parts += [self._rearranged(fragment, random) if chosen else fragment, end]
        return np.concatenate(parts)

    def _rearranged(self, ids: np.ndarray, random: Random) -> np.ndarray:
        """A text, cut at two characters and rearranged.

        Unchanged where its tokens are not those of its text, as at a sample's edge within a
        character or word, or where the cut would split a token that stands for no text.
        """
        text = self._tokenizer.decode(ids)
        first, second = sorted(int(random.random() * (len(text) + 1)) for _ in range(2))
        suffix_first = random.random() < self._spm_rate
        if not text or (self._no_prefix is not None and text.startswith(self._no_prefix)):
            return ids
        parts = (text, text[:first], text[first:second], text[second:])
        encoded = self._tokenizer.encode_spans([(part, ()) for part in parts])
        whole, prefix, middle, suffix = (part.astype(np.int64) for part, _ in encoded)
        kept = np.concatenate([prefix, middle, suffix])
        if not np.array_equal(whole, ids) or self._special(kept) != self._special(ids):
            return ids
        pieces = [self._prefix, prefix, self._suffix, suffix, self._middle, middle]
        if suffix_first:  # so that the middle follows its prefix directly
            pieces = [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
        return np.concatenate(pieces)

    def _special(self, ids: np.ndarray) -> int:
        return int(np.isin(ids, [*self._tokenizer.special]).sum())


def _pieces(ids: np.ndarray, separator: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces between separators, each with the separator that follows it, if any."""
    begin = 0
    for end in [*np.flatnonzero(ids == separator).tolist(), len(ids)]:
        yield ids[begin:end], ids[end : end + 1]
        begin = end + 1


def _lacking(tokenizer: Tokenizer, missing: dict[str, str]) -> DataError:
    """Names the tokens that a tokenizer lacks, and those of its tokens that may be meant."""
    alike = [name for name in tokenizer.special.values() if "fim" in name.lower()]
    what = f"{tokenizer.origin} lacks tokens that fim_data puts into documents"
    lines = [f"{name} is {token!r}" for name, token in missing.items()]
    lines.append(f"its tokens for this: {' '.join(alike) or 'none'}")
    lines.append(f"{' '.join(flag_of(name) for name in missing)} name those of another tokenizer")
    return DataError(Mistake(what, tuple(lines)))
