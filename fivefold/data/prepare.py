"""Turns data paths into datasets: tokenises once, and processes share the cached result."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fivefold.config.data import FIM_TOKENS
from fivefold.data.cache import cached, open_cached, prepared_once
from fivefold.data.corpus import pieces
from fivefold.data.dataset import Corpus, Dataset
from fivefold.data.indexed import IndexedTokens, write_indexed
from fivefold.data.infilling import Infilling
from fivefold.data.mixture import Group, grouped, parse_named_paths
from fivefold.data.mock import MockTokens, number_tokenizer
from fivefold.data.packing import BEGINS, LEARNT, Packing
from fivefold.data.rules import DEFAULT_VOCAB_SIZE, checked_sources
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import DataError, FivefoldError, Mistake
from fivefold.files import at_home
from fivefold.units import human_bytes, human_count, human_seconds, several

if TYPE_CHECKING:
    from fivefold.config.data import DataConfig
    from fivefold.data.template import ChatTemplate

DEFAULT_CACHE = "~/.cache/fivefold/data"
# A tokenizer learns from at most so many characters of text, and so many for each token: the more
# tokens, the more text, since rare words matter to large vocabularies only.
TRAINING_CHARACTERS = 32 << 20
_CHARACTERS_PER_TOKEN = 5 << 10
# Text is encoded in batches of about this many characters, in parallel.
_BATCH_CHARACTERS = 8 << 20
# These must be increased when the tokens of the same text, or of the same conversation, change.
_CACHE_VERSION, _CONVERSATIONS_VERSION = 3, 2

Progress = Callable[[str], None]
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """A tokenizer and the corpora it has tokenised; the splits are made when first asked for.

    Each split is a `Dataset`, or raises DataError if a corpus leaves it less than one sample.
    Training samples are shuffled; validation and test samples keep the order of the corpus.

    Attributes:
        named: corpora of the validation sets that have names.
    """

    tokenizer: Tokenizer
    corpora: tuple[Corpus, ...]
    packing: Packing
    split: str
    seed: int
    named: Mapping[str, Corpus] = field(default_factory=dict)
    infilling: Infilling | None = None

    @cached_property
    def train(self) -> Dataset:
        """The training samples, shuffled anew in every epoch."""
        return self._dataset("train", shuffle=True)

    @cached_property
    def valid(self) -> Dataset:
        """The validation samples, in the order of the corpus."""
        return self._dataset("valid", shuffle=False)

    @cached_property
    def test(self) -> Dataset:
        """The test samples, in the order of the corpus."""
        return self._dataset("test", shuffle=False)

    def _dataset(self, part: str, shuffle: bool) -> Dataset:
        return Dataset(
            self.corpora,
            self.tokenizer,
            self.packing,
            split=self.split,
            part=part,
            seed=self.seed,
            shuffle=shuffle,
            infilling=self.infilling,
        )


def prepare(
    config: "DataConfig",
    seq_length: int,
    seed: int,
    progress: Progress = _log.info,
    *,
    named_only: bool = False,
) -> PreparedData:
    """Open the corpora of `config.data_path`; tokenise those that are not in the cache.

    Any number of processes may call this at the same time: one does the work, the others wait. Text
    without weights forms one corpus, in the order of the paths. With `named_only` only validation
    sets with names are opened, whose tokens are those of `config.tokenizer_model`.

    Raises:
        ConfigError: settings contradict each other; all mistakes at once.
        DataError: a file is missing, or is not of its format.
    """
    sources = checked_sources(config, seed)
    groups = [] if named_only else grouped(sources)
    named = {n: grouped([s])[0] for n, s in parse_named_paths(config.valid_data_path).items()}
    files = [file for group in groups for file in group.files]
    beside = [file for group in named.values() for file in group.files]
    # Tokens that are there already need no cache.
    cache = _cache_folder(config.data_cache_path or DEFAULT_CACHE) if files or beside else Path()
    template = None
    if config.sft and config.tokenizer_model is not None:
        from fivefold.data.conversations import check_conversations
        from fivefold.data.template import ChatTemplate

        template = ChatTemplate.load(config.tokenizer_model)
        check_conversations([*files, *beside])
    with _telling_removed(files):
        tokenizer = _tokenizer(config, files, cache, progress)

    def opened(group: Group) -> Corpus:
        with _telling_removed(group.files):
            return _corpus(group, config.text_key, tokenizer, template, cache, progress)

    return PreparedData(
        tokenizer=tokenizer,
        corpora=tuple(opened(group) for group in groups),
        packing=Packing(
            seq_length,
            tokenizer.eod_id,
            reset_position_ids=config.reset_position_ids,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
        ),
        split=config.split,
        seed=seed,
        named={name: opened(group) for name, group in named.items()},
        infilling=Infilling(config, tokenizer) if config.fim_data else None,
    )


def _cache_folder(path: str) -> Path:
    try:
        cache = at_home(path)
        cache.mkdir(parents=True, exist_ok=True)
    except (OSError, FivefoldError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        needs = "data_cache_path has to be a folder that can be written"
        raise DataError(Mistake(f"cannot make the cache folder {path}: {why}", (needs,))) from error
    return cache


@contextmanager
def _telling_removed(files: Sequence[Path]) -> Iterator[None]:
    """Name the text that somebody removes while it is read, whichever error follows from that."""
    try:
        yield
    except (FileNotFoundError, DataError) as error:
        gone = next((file for file in files if not file.exists()), None)
        if gone is None:
            raise
        raise DataError(f"{gone} was there when the command began, and is gone") from error


def _corpus(
    group: Group,
    text_key: str,
    tokenizer: Tokenizer,
    template: "ChatTemplate | None",
    cache: Path,
    progress: Progress,
) -> Corpus:
    """A corpus from the cache, tokenised first if it is not there; with a template, of
    conversations."""
    if group.prefix is not None:
        return Corpus(group.name, IndexedTokens(group.prefix), group.weight)
    if not group.files:
        return Corpus(group.name, MockTokens(tokenizer.vocab_size, tokenizer.eod_id))
    what = [text_key]
    if template is not None:
        what = ["conversations", str(_CONVERSATIONS_VERSION), template.digest]
    prefix = str(cache / _key(group.files, *what, tokenizer.digest))
    marks = f"{prefix}-marks"
    with prepared_once(f"{prefix}.idx", progress) as missing:
        if missing and template is None:
            build_index(group.files, tokenizer, prefix, text_key, progress)
        elif missing and template is not None:
            build_conversations(group.files, tokenizer, template, prefix, marks, progress)
    data = open_cached(prefix)
    if template is None:
        return Corpus(group.name, data, group.weight)
    # Without the index of the tokens both are made again.
    return Corpus(group.name, data, group.weight, open_cached(marks, f"{prefix}.idx"))


def build_conversations(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    template: "ChatTemplate",
    prefix: str,
    marks: str,
    progress: Progress,
) -> None:
    """Tokenise conversations into two `.bin/.idx` pairs: the tokens, and their marks.

    Raises:
        DataError: a file holds something else, with the line, or there are no conversations.
    """
    from fivefold.data.conversations import marked_texts

    began = time.perf_counter()
    progress(f"tokenising the conversations of {several(len(files), 'file')}")
    tokens = learnt = 0
    # The marks are whole before the index of the tokens says that everything is there.
    with (
        write_indexed(prefix, tokenizer.token_dtype, checksums=True) as of_tokens,
        write_indexed(marks, np.uint8, checksums=True) as of_marks,
    ):
        for batch in _batches(marked_texts(files, template)):
            for ids, inside in tokenizer.encode_spans(batch):
                if not len(ids):
                    continue
                bits = np.where(inside, LEARNT, 0)
                bits[0] = BEGINS
                for writer, values in ((of_tokens, ids), (of_marks, bits)):
                    writer.add(values)
                    writer.end_document()
                tokens, learnt = tokens + len(ids), learnt + int((bits == LEARNT).sum())
        if not tokens:
            raise DataError(
                f"no conversations in {several(len(files), 'file')}, the first is {files[0]}"
            )
    progress(
        f"tokenised {human_count(tokens)} tokens, {learnt / tokens:.1%} of them to learn, in "
        f"{human_seconds(time.perf_counter() - began)}"
    )


def build_index(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    prefix: str | os.PathLike[str],
    text_key: str = "text",
    progress: Progress = _log.info,
) -> None:
    """Tokenise files into `PREFIX.bin/.idx`, with an end-of-document token after each document.

    Documents without tokens are left out, as Megatron-LM's preprocessing does.

    Raises:
        DataError: a file cannot be read as text, or there is no text at all.
    """
    began = time.perf_counter()
    size = sum(file.stat().st_size for file in files)
    progress(f"tokenising {several(len(files), 'file')}, {human_bytes(size)}")
    end = np.array([tokenizer.eod_id], dtype=tokenizer.token_dtype)
    whole = not tokenizer.may_cut
    tokens, begun = 0, False
    with write_indexed(prefix, tokenizer.token_dtype, checksums=True) as writer:
        stream = (piece for file in files for piece in pieces(file, text_key, whole=whole))
        for batch in _batches(stream):
            encoded = tokenizer.encode_batch([text for text, _ in batch])
            for (_, ends), ids in zip(batch, encoded, strict=True):
                if len(ids):
                    writer.add(ids, continues=begun)
                    begun = True
                tokens += len(ids)
                if ends and begun:
                    writer.add(end, continues=True)
                    writer.end_document()
                    tokens += 1
                    begun = False
        if not tokens:
            raise DataError(f"no text in {several(len(files), 'file')}, the first is {files[0]}")
    progress(
        f"tokenised {human_count(tokens)} tokens in {human_seconds(time.perf_counter() - began)}"
    )


def _tokenizer(
    config: "DataConfig", files: Sequence[Path], cache: Path, progress: Progress
) -> Tokenizer:
    if config.tokenizer_model is not None:
        return Tokenizer.load(config.tokenizer_model)
    vocab_size = config.tokenizer_vocab_size or DEFAULT_VOCAB_SIZE
    if not files:  # mock data consists of numbers
        return number_tokenizer(vocab_size)
    special = [getattr(config, name) for name in FIM_TOKENS] if config.fim_data else []
    path = cache / f"tokenizer-{_key(files, config.text_key, str(vocab_size), *special)}.json"
    with prepared_once(str(path), progress) as missing:
        if missing:
            began = time.perf_counter()
            progress(f"training a byte-level BPE of {vocab_size} tokens")
            sample = _sample(files, config.text_key, vocab_size)
            tokenizer = Tokenizer.train(sample, vocab_size, special)
            tokenizer.save(path)
            progress(f"trained it in {human_seconds(time.perf_counter() - began)}")
    with cached(str(path)):
        return Tokenizer.load(path)


def _sample(files: Sequence[Path], text_key: str, vocab_size: int) -> Iterator[str]:
    """As much text as a vocabulary of this size is learnt from, spread evenly over the files."""
    most = min(TRAINING_CHARACTERS, _CHARACTERS_PER_TOKEN * vocab_size)
    share = min(1.0, most / max(1, sum(file.stat().st_size for file in files)))
    read = taken = 0
    for file in files:
        for text, _ in pieces(file, text_key):
            read += len(text)
            if taken <= share * read:
                taken += len(text)
                yield text
            if taken >= most:  # a compressed file holds more than its size suggests
                return


def _batches(stream: Iterable[tuple[str, T]]) -> Iterator[list[tuple[str, T]]]:
    batch: list[tuple[str, T]] = []
    size = 0
    for piece in stream:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _key(files: Sequence[Path], *settings: str) -> str:
    """The cache key of results made from these files in their present state."""
    described = []
    for file in files:
        stat = file.stat()
        described.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    content = json.dumps([_CACHE_VERSION, described, settings])
    return hashlib.sha256(content.encode()).hexdigest()[:32]
