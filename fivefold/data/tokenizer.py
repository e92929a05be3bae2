"""Hugging Face `tokenizers`: load a tokenizer.json, or train a byte-level BPE on the corpus."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fivefold.errors import DataError
from fivefold.files import write_atomic

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
SMALLEST_VOCAB_SIZE = 257  # 256 bytes and the end of a document


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: the largest id plus one.
        eod_id: the id of the token that ends a document.
        digest: SHA-256 of the tokenizer.json text; equal digests encode equally.
    """

    def __init__(self, definition: str, origin: str) -> None:
        """Build from the text of a tokenizer.json; `origin` names it in errors.

        Raises:
            DataError: the text is no tokenizer, or has no token that ends a document.
        """
        import tokenizers

        try:
            self._backend = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(
                f"{origin} is not a tokenizer.json that `tokenizers` {tokenizers.__version__} can "
                f"read\n  it says: {error}"
            ) from error
        # A document that spells out "<|endoftext|>" must not end there.
        self._backend.encode_special_tokens = True
        self._definition = definition
        vocab = self._backend.get_vocab(with_added_tokens=True)
        name = next((name for name in END_OF_DOCUMENT_NAMES if name in vocab), None)
        if name is None:
            special = [t.content for t in self._backend.get_added_tokens_decoder().values()]
            raise DataError(
                f"{origin} has no token that ends a document\n"
                f"  looked for: {' '.join(END_OF_DOCUMENT_NAMES)}\n"
                f"  its special tokens: {' '.join(special[:12]) or 'none'}"
            )
        self.eod_id: int = vocab[name]
        self.vocab_size: int = max(vocab.values()) + 1
        self.digest = hashlib.sha256(definition.encode()).hexdigest()

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Load a tokenizer.json, or the one in a model folder.

        Raises:
            DataError: no such file, not UTF-8, not a tokenizer.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            path /= "tokenizer.json"
        try:
            return cls(path.read_text(encoding="utf-8"), str(path))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} is not a tokenizer.json: byte {error.start} is not UTF-8\n"
                "  works: a tokenizer.json (a SentencePiece .model has to be converted first)"
            ) from error
        except OSError as error:
            raise DataError(
                f"no tokenizer at {path}: {error.strerror}\n"
                "  works: a tokenizer.json | a folder that holds one | no tokenizer_model, "
                "to train a byte-level BPE on the corpus"
            ) from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Train a byte-level BPE; the same texts in the same order give the same vocabulary.

        A small corpus may yield fewer than `vocab_size` (>= 257) tokens.
        """
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers, trainers

        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        return cls(backend.to_str(), "the trained tokenizer")

    @property
    def token_dtype(self) -> np.dtype:
        """The type its tokens are stored in: Megatron-LM's rule, uint16 below 65500 tokens."""
        return np.dtype(np.uint16 if self.vocab_size < 65500 else np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, in `token_dtype`; nothing is added at either end."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.token_dtype) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some token ids, special tokens spelt out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tokenizer.json; it appears whole or not at all."""
        write_atomic(path, self._definition)
