"""The validation sets of a run: the split of its corpus, and sets with names."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fivefold.config.data import IGNORED
from fivefold.data.dataset import Corpus, Dataset, check_labels, parse_split
from fivefold.data.prepare import PreparedData
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError, Mistakes

if TYPE_CHECKING:
    from fivefold.config.training import TrainingConfig


@dataclass(frozen=True)
class ValidationSet:
    """Samples over which one loss is computed.

    Attributes:
        name: its name; empty: the validation split of the corpus.
        dataset: its samples, in the order of the corpus.
        batches: global batches of an evaluation.
        samples: samples that count; later ones fill the last batch, without a loss.
    """

    name: str
    dataset: Dataset
    batches: int
    samples: int

    def text_bytes(self, tokenizer: Tokenizer) -> int | None:
        """Bytes of the text whose tokens have a loss; None if the tokenizer cannot tell."""
        if (bytes_V := tokenizer.token_bytes) is None:
            return None
        labels = (self.dataset.microbatch([n]).labels_BS for n in range(self.samples))
        return sum(int(bytes_V[each[each != IGNORED]].sum()) for each in labels)


def validation_sets(training: "TrainingConfig", data: PreparedData) -> tuple[ValidationSet, ...]:
    """What each evaluation reads.

    The validation split of the corpus comes first; where `split` gives it no share, and other sets
    have names, there is none. With `full_validation` each sample of a set is read once: weights
    of a blend do not count then (of several corpora with more than 2^20 samples together, a few
    may be read twice in place of others: see `Blend`).

    Raises:
        ConfigError: sets with a name have fewer samples than an evaluation reads.
        DataError: a set is too short for one sample, or no token that is read has a loss.
    """
    size, iters = training.global_batch_size, training.eval_iters
    mistakes = Mistakes()
    found = []
    for name, dataset in _datasets(data, unweighted=training.full_validation):
        count = dataset.num_samples
        if training.full_validation:
            found.append(ValidationSet(name, dataset, -(-count // size), count))
            continue
        found.append(ValidationSet(name, dataset, iters, iters * size))
        if name and count < iters * size:
            fewer = [f"--eval-iters {count // size}"] if count >= size else []
            mistakes.add(
                f"the validation set {name} has {count:,} samples, and an evaluation reads more",
                f"eval_iters {iters} x global_batch_size {size} = {iters * size:,} samples of "
                f"{dataset.seq_length:,} tokens",
                works=[*fewer, "--full-validation"],
            )
    mistakes.raise_if_any()
    for each in found:
        with _naming(each.name):
            check_labels(each.dataset, each.samples)
    return tuple(found)


def has_split(split: str, named: Collection[str]) -> bool:
    """Whether the validation split of the corpus is evaluated, beside the sets with names."""
    return parse_split(split)[1] > 0 or not named


def _datasets(data: PreparedData, *, unweighted: bool) -> Iterator[tuple[str, Dataset]]:
    """The name and the samples of each set."""
    if has_split(data.split, data.named):
        corpora = [replace(each, weight=None) if unweighted else each for each in data.corpora]
        yield "", replace(data, corpora=tuple(corpora)).valid
    for name, corpus in data.named.items():
        yield name, _whole(name, corpus, data)


def _whole(name: str, corpus: Corpus, data: PreparedData) -> Dataset:
    """All samples of a corpus, without a split."""
    with _naming(name):
        return replace(data, corpora=(corpus,), split="0,1").valid


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Add the name of the validation set, if it has one, to errors."""
    try:
        yield
    except DataError as error:
        raise DataError(f"validation set {name}: {error}" if name else str(error)) from error
