"""A blend of token streams cut into samples; a sample depends only on its global index."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from random import Random
from typing import Any

import numpy as np

from fivefold.config.data import IGNORED
from fivefold.data.indexed import IndexedTokens
from fivefold.data.infilling import Infilling
from fivefold.data.mock import MockTokens
from fivefold.data.order import Blend, shuffled
from fivefold.data.packing import Microbatch, Packing, pack
from fivefold.data.streams import Conversations, Text
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import ConfigError, DataError, Mistake
from fivefold.units import several

SPLITS = ("train", "valid", "test")
_DECIMAL = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


@dataclass(frozen=True)
class Corpus:
    """Tokens with the name shown to the user and the weight in the blend.

    A weight of None means the number of samples of the corpus. `marks` says of each token of
    conversations what is known of it: `packing.LEARNT`, `packing.BEGINS`.
    """

    name: str
    data: IndexedTokens | MockTokens
    weight: Fraction | None = None
    marks: IndexedTokens | None = None

    def identity(self) -> str:
        """Its name, sizes and a digest of its tokens."""
        tokens, starts = self.data.checked, self.data.document_starts
        digest = hashlib.sha256(starts.tobytes())
        every = max(1, len(tokens) // 4096)
        digest.update(tokens[::every].tobytes())
        if self.marks is not None:
            digest.update(self.marks.checked[::every].tobytes())
        weight = "" if self.weight is None else f", weight {self.weight}"
        return (
            f"{self.name}: {len(tokens)} tokens, {self.data.num_documents} documents{weight}, "
            f"sha256 {digest.hexdigest()[:16]}"
        )


def content(identity: str) -> str:
    """The identity of a corpus without its name, which a move may change."""
    return identity.rpartition(": ")[2]


def parse_split(split: str) -> tuple[float, ...]:
    """Shares of train, validation and test, summing to 1: "969,30,1", or fewer numbers.

    They are Megatron-LM's floats (`parse_and_normalize_split`), to the last bit. It looks for
    digits and points alone, so "1e-3" or "1/3" is two numbers to it; here they are refused.

    Raises:
        ConfigError: not one to three plain decimal numbers with a positive sum.
    """
    parts = [part.strip() for part in split.split(",")]
    weights = np.array([float(part) for part in parts if _DECIMAL.fullmatch(part)])
    with np.errstate(over="ignore"):
        total = weights.sum()
    if len(weights) != len(parts) or len(parts) > len(SPLITS) or not 0 < total < np.inf:
        raise ConfigError(
            Mistake(
                f"split {split!r} is not up to three shares, of {', '.join(SPLITS)}",
                ("shares are plain decimal numbers with commas between them, not all 0",),
                works=("--split 969,30,1", "--split 98,2", "--split 1"),
            )
        )
    shares = (weights / total).tolist()
    return (*shares, *[0.0] * (len(SPLITS) - len(shares)))


def sequence_edges(sequences: int, shares: Sequence[float]) -> list[int]:
    """The sequences at which the splits begin, and the end: splits + 1 numbers."""
    return [round(edge * sequences) for edge in (0.0, *accumulate(shares))]


def split_bounds(data: IndexedTokens | MockTokens, shares: Sequence[float]) -> list[int]:
    """The tokens at which the splits begin, and the end: splits + 1 numbers.

    Megatron-LM's rule: whole sequences of the index (each a document, unless the preprocessing
    split documents), the running sums of the shares rounded as floats, ties to even. Where that
    leaves a split none, on which Megatron-LM would search for ever, the token stream is cut
    instead, so that a single text file will do.
    """
    edges = [0.0, *accumulate(shares)]
    sequences = sequence_edges(data.num_sequences, shares)
    if all(
        first < last or end <= start
        for (start, end), (first, last) in zip(pairwise(edges), pairwise(sequences), strict=True)
    ):
        return [int(data.sequence_starts[sequence]) for sequence in sequences]
    return [round(edge * len(data.tokens)) for edge in edges]


class Dataset:
    """One split of a blend of corpora. Any sample index >= 0 is valid: epochs follow each other.

    Sample k of a corpus is seq_length + 1 tokens from token k * seq_length of its split (the last
    token of one sample is the first of the next), or whole conversations. When shuffled, each pass
    over a corpus takes all its samples in an order of its own.

    Attributes:
        names: names of the corpora.
        num_samples: number of distinct samples over all corpora.
        fingerprint: everything that order and content of the samples depend on, in JSON types.
    """

    def __init__(
        self,
        corpora: Sequence[Corpus],
        tokenizer: Tokenizer,
        packing: Packing,
        *,
        split: str,
        part: str,
        seed: int,
        shuffle: bool,
        infilling: Infilling | None = None,
    ) -> None:
        """`split` as in `parse_split`, `part` one of SPLITS; `infilling` is for text alone.

        Raises:
            DataError: this part of a corpus is too short for one sample.
        """
        self.names = [corpus.name for corpus in corpora]
        self._packing = packing
        self._vocab_size = tokenizer.vocab_size
        self._seed, self._shuffle, self._infilling = seed, shuffle, infilling
        shares = parse_split(split)
        which = SPLITS.index(part)
        self._streams: list[Text | Conversations] = []
        for corpus in corpora:
            stream: Text | Conversations
            if corpus.marks is not None:
                starts = corpus.data.sequence_starts
                edges = sequence_edges(len(starts) - 1, shares)
                starts = starts[edges[which] : edges[which + 1] + 1]
                tokens = int(starts[-1] - starts[0])
                stream = Conversations(corpus.data.checked, corpus.marks.checked, starts, packing)
            else:
                bounds = split_bounds(corpus.data, shares)
                tokens = bounds[which + 1] - bounds[which]
                stream = Text(corpus.data.checked, bounds[which], bounds[which + 1], packing)
            if not len(stream):
                raise _too_short(corpus, tokens, packing.seq_length, part, split)
            self._streams.append(stream)
        self._sizes = [len(stream) for stream in self._streams]
        self._blend = Blend(
            [
                Fraction(size) if corpus.weight is None else corpus.weight
                for corpus, size in zip(corpora, self._sizes, strict=True)
            ]
        )
        self.num_samples = sum(self._sizes)
        self.fingerprint: dict[str, Any] = {
            "data": [corpus.identity() for corpus in corpora],
            "split": split,
            "part": part,
            "seed": seed if shuffle or infilling is not None else None,
            "tokenizer": tokenizer.digest,
            **asdict(packing),
            **({} if infilling is None else infilling.settings),
        }

    @property
    def seq_length(self) -> int:
        """Number of tokens per sample."""
        return self._packing.seq_length

    def locate(self, index: int) -> tuple[int, int]:
        """The corpus of global sample `index`, and the number of the sample in this corpus."""
        corpus, number = self._blend[index]
        epoch, sample = divmod(number, self._sizes[corpus])
        if self._shuffle:
            sample = shuffled(sample, self._sizes[corpus], (self._seed, corpus, epoch))
        return corpus, sample

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """The seq_length + 1 tokens of a sample, int64, and for conversations their marks.

        Raises:
            DataError: a token is outside the tokenizer's vocabulary.
        """
        corpus, sample = self.locate(index)
        window, marks = self._streams[corpus].window(sample)
        if window.max() >= self._vocab_size or window.min() < 0:
            bad = window[(window >= self._vocab_size) | (window < 0)][0]
            last = self._vocab_size - 1
            what = f"{self.names[corpus]} holds token {bad}; the tokenizer knows 0 to {last}"
            why = "tokenizer_model has to be the one that the data was tokenised with"
            raise DataError(Mistake(what, (why,)))
        if self._infilling is not None:
            window = self._infilling(window, Random(self._seed << 64 | index))
        return window, marks

    def microbatch(self, indices: Sequence[int] | np.ndarray) -> Microbatch:
        """The samples with these global indices, one per row."""
        windows, marks = zip(*(self.window(int(index)) for index in indices), strict=True)
        return pack(
            np.stack(windows),
            np.asarray(indices, dtype=np.int64),
            self._packing,
            None if marks[0] is None else np.stack(marks),
        )

    @property
    def packed(self) -> str:
        """What packing costs for conversations, in words; empty for text."""
        streams = [stream for stream in self._streams if isinstance(stream, Conversations)]
        if not streams:
            return ""
        room = sum(len(stream) for stream in streams) * (self.seq_length + 1)
        padding = sum(stream.padding for stream in streams)
        return f"{padding / room:.1%} padding, {sum(s.cut for s in streams)} conversations cut"


def check_labels(dataset: Dataset, samples: int) -> None:
    """Raise DataError if no token of the first samples has a loss, so that there is no mean."""
    read = min(samples, dataset.num_samples)
    if any((dataset.microbatch([n]).labels_BS != IGNORED).any() for n in range(read)):
        return
    part, names = dataset.fingerprint["part"], " + ".join(dataset.names)
    cut = f"{dataset.packed}: a longer --seq-length keeps more of each" if dataset.packed else ""
    what = f"the {part} split of {names} has nothing to predict: no token of its first "
    why = f"samples of {dataset.seq_length + 1} tokens, {cut or 'each the end of a document'}"
    raise DataError(Mistake(f"{what}{read:,} samples has a loss", (why,)))


def _too_short(corpus: Corpus, tokens: int, seq_length: int, part: str, split: str) -> DataError:
    total = len(corpus.data.tokens)
    if corpus.marks is not None:
        what = f"the {part} split of {corpus.name} has none of its {corpus.data.num_documents} "
        why = f"shares are rounded to whole conversations; a larger one for {part} has some"
        return DataError(Mistake(f"{what}conversations: split is {split}", (why,)))
    what = (
        f"the {part} split of {corpus.name} is too short: {tokens} tokens, and one sample needs "
        f"{seq_length + 1} (seq_length {seq_length} + 1 to predict)"
    )
    works = (f"--seq-length {tokens - 1}",) if tokens > 1 else ()
    why = f"split {split} of {total} tokens in {several(corpus.data.num_documents, 'document')}"
    if total > seq_length:
        share = f"a share of at least {(seq_length + 1) / total:.2%} would do for {part}"
        return DataError(Mistake(what, (why, share), works))
    return DataError(Mistake(what, (why if works else f"{why}; more text is needed",), works))
