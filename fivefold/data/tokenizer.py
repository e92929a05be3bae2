"""Loads a tokenizer, or trains a byte-level BPE, with Hugging Face's `tokenizers`."""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from fivefold.data.borders import may_cut
from fivefold.data.tokenizer_files import read_tokenizer, telling
from fivefold.errors import DataError, Mistake
from fivefold.files import parse_json, write_atomic

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

END_OF_DOCUMENT = "<|endoftext|>"
# Best name first: where several exist (Llama 3, Qwen), the one that ends a document, not a turn.
END_OF_DOCUMENT_NAMES = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<｜end▁of▁sentence｜>",
    "<|eos|>",
    "[EOS]",
    "<|eot_id|>",
    "<|im_end|>",
)
_NO_CHARACTER = "\U0010ffff"  # for ever unassigned, so in no vocabulary
_KINDS = (r"\p{L}", r"\p{N}", r"[^\s\p{L}\p{N}]", r"\s")
"""What the words of GPT-2's pattern, which a byte-level BPE splits at, have characters of: one."""
_LONGEST_WORD = 1000
"""The trainer's time grows with the square of a word's length: a million letters without a space,
as of a genome, would take it an hour, in which no signal ends it."""
SMALLEST_VOCAB_SIZE = 257  # 256 bytes and the end of a document


class Tokenizer:
    """Converts text to token ids and back.

    Truncation, padding, and templates that put tokens around a text are removed from the
    tokenizer.json, since they are meant for other uses.

    Attributes:
        vocab_size: largest id plus one.
        eod_id: id of the token that ends a document.
        digest: SHA-256 of the tokenizer.json text; tokenizers with equal digests encode equally.
        definition: text of the tokenizer.json, and `origin`, what messages call it.
        may_cut: whether a text may be cut at a `borders.last_border` without changing its tokens.
    """

    def __init__(self, definition: str, origin: str) -> None:
        """Build from the text of a tokenizer.json; error messages call it `origin`.

        Raises:
            DataError: the text is not a tokenizer, has no token that ends a document, or encodes
                the same text differently each time.
        """
        from tokenizers import AddedToken

        backend = backend_of(definition, origin)
        vocab = backend.get_vocab(with_added_tokens=True)
        name = next((name for name in END_OF_DOCUMENT_NAMES if name in vocab), None)
        if name is None:
            special = [t.content for t in backend.get_added_tokens_decoder().values()]
            why = (
                f"looked for: {' '.join(END_OF_DOCUMENT_NAMES)}",
                f"its special tokens: {' '.join(special[:12]) or 'none'}",
            )
            raise DataError(Mistake(f"{origin} has no token that ends a document", why))
        # A document that spells out "<|endoftext|>" must not end there.
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])
        backend.encode_special_tokens = True
        self.eod_id: int = vocab[name]
        self.vocab_size: int = max(vocab.values()) + 1
        if self.vocab_size > 1 << 31:
            raise DataError(f"{origin} has a token {self.vocab_size - 1}, beyond 32-bit integers")
        self.digest = hashlib.sha256(definition.encode()).hexdigest()
        self.may_cut = may_cut(
            _state(backend.normalizer),
            _state(backend.pre_tokenizer),
            backend.get_added_tokens_decoder().values(),
        )
        self._backend = backend
        self.definition = definition
        self.origin = origin
        self._name = name

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Load a tokenizer from a path that `read_tokenizer` accepts.

        Raises:
            DataError: there is none, or it is not one.
        """
        definition, file = read_tokenizer(path)
        return cls(definition, str(file))

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, special: Sequence[str] = ()
    ) -> "Tokenizer":
        """Train a byte-level BPE; the same texts in the same order give the same vocabulary.

        A small corpus may yield fewer than `vocab_size` (>= 257) tokens, among them `special` ones,
        which stand for no text. Words of more than `_LONGEST_WORD` characters count as several, in
        training alone.
        """
        return cls(_trained(texts, vocab_size, special), "the trained tokenizer")

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name, such as `<fim_prefix>`; None if there is none."""
        number: int | None = self._backend.token_to_id(token)
        return number

    @property
    def token_dtype(self) -> np.dtype:
        """The type in which tokens are stored: uint16 below 65500 tokens, as in Megatron-LM."""
        return np.dtype(np.uint16 if self.vocab_size < 65500 else np.int32)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """Bytes of text that each token stands for, [vocabulary]; None unless it is byte-level.

        The vocabulary of a byte-level BPE has a character for each byte (GPT-2). Special tokens
        stand for no text.
        """
        if (_state(self._backend.decoder) or {}).get("type") != "ByteLevel":
            return None
        bytes_V = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._backend.get_vocab(with_added_tokens=False).items():
            bytes_V[number] = len(token)
        for number, added in self._backend.get_added_tokens_decoder().items():
            bytes_V[number] = 0 if added.special else len(added.content.encode())
        return bytes_V

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, in `token_dtype`; nothing is added at either end.

        Raises:
            DataError: the tokenizer has no token for a part of the text, or gives it the token
                that ends a document.
        """
        with telling(f"{self.origin} cannot tokenise the text"):
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            self._without_end(np.array(encoding.ids, dtype=self.token_dtype))
            for encoding in encodings
        ]

    def encode_spans(
        self, texts: Sequence[tuple[str, Sequence[tuple[int, int]]]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Token ids of each text, and whether a character of its spans is in the token.

        Special tokens that a text spells out become these tokens, as chat templates need it.

        Raises:
            DataError: the tokenizer has no token for a part of a text.
        """
        with telling(f"{self.origin} cannot tokenise the text"):
            encodings = self._verbatim.encode_batch(
                [text for text, _ in texts], add_special_tokens=False
            )
        found = []
        for (_, spans), encoding in zip(texts, encodings, strict=True):
            begins_N, ends_N = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            inside_N = np.zeros(len(begins_N), dtype=bool)
            for begin, end in spans:
                inside_N |= (begins_N < end) & (ends_N > begin)
            found.append((np.array(encoding.ids, dtype=self.token_dtype), inside_N))
        return found

    @cached_property
    def special(self) -> Mapping[int, str]:
        """Tokens that stand for no text, and their names."""
        added = self._verbatim.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    @cached_property
    def _verbatim(self) -> "Backend":
        """Encodes as the file says, so that special tokens are found in a text."""
        return backend_of(self.definition, self.origin)

    def _without_end(self, ids: np.ndarray) -> np.ndarray:
        """Token ids of a text, with end-of-document tokens that it spells out split up.

        Some models (Unigram, WordLevel) encode text that spells a special token as that token. Here
        it gets the tokens of its first character and of the rest.
        """
        ends = np.flatnonzero(ids == self.eod_id)
        if not len(ends):
            return ids
        model = self._backend.model
        with telling(f"{self.origin} cannot tokenise {self._name!r} in a text"):
            spelt = [
                t.id for part in (self._name[:1], self._name[1:]) for t in model.tokenize(part)
            ]
            unknown = [token.id for token in model.tokenize(_NO_CHARACTER)]
        if self.eod_id in spelt + unknown:
            what = f"{self.origin} has {self._name!r} for text that it does not know, which would "
            works = ("a tokenizer with a token of its own for such text",)
            raise DataError(Mistake(f"{what}end a document there", works=works))
        parts = np.split(ids, ends)
        spelt_ids = np.array(spelt, dtype=ids.dtype)
        return np.concatenate([parts[0], *[x for part in parts[1:] for x in (spelt_ids, part[1:])]])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these token ids, including special tokens."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer.json atomically."""
        write_atomic(path, self.definition)


def _trained(texts: Iterable[str], vocab_size: int, special: Sequence[str]) -> str:
    """The tokenizer.json of a byte-level BPE that is trained on texts."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    backend = Backend(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    long = Regex("|".join(f"{kind}{{{_LONGEST_WORD}}}" for kind in _KINDS))
    cut = pre_tokenizers.Split(long, "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, words])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, *special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    backend.pre_tokenizer = words
    return str(backend.to_str())


def backend_of(definition: str, origin: str, *, templates: bool = False) -> "Backend":
    """A tokenizer that drops no tokens and always encodes a text in the same way.

    It adds no tokens around a text, unless `templates` are kept that do.
    """
    import tokenizers
    from tokenizers.processors import Sequence as Processors

    _check_merges(definition, origin)
    unreadable = f"{origin} is not a tokenizer.json that `tokenizers` "
    with telling(f"{unreadable}{tokenizers.__version__} can read"):
        backend = tokenizers.Tokenizer.from_str(definition)
    if dropout := getattr(backend.model, "dropout", None):
        what = f"{origin} gives the same text different tokens each time: its BPE has a dropout of "
        raise DataError(Mistake(f"{what}{dropout:.3g}", works=('"dropout": null in it',)))
    backend.no_truncation()
    backend.no_padding()
    if not templates:
        backend.post_processor = Processors([])
    return backend


class _Model(TypedDict, total=False):
    continuing_subword_prefix: str | None
    merges: list[tuple[str, str] | str]


class _Definition(TypedDict, total=False):
    model: _Model


def _check_merges(definition: str, origin: str) -> None:
    """Refuse merges without the prefix of their BPE, with which `tokenizers` aborts the process."""
    source = f"{origin} is not a tokenizer.json: it"
    model = parse_json(definition, _Definition, source, DataError).get("model", {})
    prefix = model.get("continuing_subword_prefix") or ""
    for merge in model.get("merges", ()):
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1]
        if not second.startswith(prefix):
            raise DataError(
                f"{source} merges {second!r}, which does not begin with its "
                f"continuing_subword_prefix {prefix!r}"
            )


def _state(part: Any) -> dict[str, Any] | None:
    """A normaliser or pre-tokeniser as in tokenizer.json, with every setting."""
    return None if part is None else parse_json(part.__getstate__(), dict, "its state", DataError)
