"""Reads the files in which tokenizers come, as the text of a tokenizer.json."""

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fivefold.data.sentence_pieces import from_pieces
from fivefold.errors import DataError, Mistake
from fivefold.files import at_home, read_json
from fivefold.recipes import how_to_get_tokenizer

_WHOLE, _PIECES = "tokenizer.json", "tokenizer.model"
_VOCABULARY, _MERGES = "vocab.json", "merges.txt"
_CONFIG, _ADDED = "tokenizer_config.json", "added_tokens.json"


def read_tokenizer(path: str | os.PathLike[str]) -> tuple[str, Path]:
    """The text of a tokenizer.json, and the file that it was read from or made of.

    Args:
        path: a tokenizer.json; a SentencePiece model; a `vocab.json` of GPT-2's kind, beside its
            `merges.txt` (both names may begin alike, as `gpt2-vocab.json` and `gpt2-merges.txt`,
            Megatron-LM's `--vocab-file` and `--merge-file`); or a folder that holds one of them,
            of which the first counts.

    Raises:
        DataError: there is none, it is damaged, or a tokenizer.json cannot do what it says.
    """
    file = at_home(path, DataError)
    if file.is_dir():
        file /= next((n for n in (_WHOLE, _PIECES, _VOCABULARY) if (file / n).is_file()), _WHOLE)
    try:
        content = file.read_bytes()
    except OSError as error:
        why = (
            *how_to_get_tokenizer(os.fspath(path)),
            "tokenizer_model is a tokenizer.json, a SentencePiece model, a vocab.json with its "
            "merges.txt, or a folder that holds one; without it a byte-level BPE is trained on the "
            "corpus",
        )
        what, works = f"no tokenizer at {file}: {error.strerror}", ("--tokenizer-model none",)
        raise DataError(Mistake(what, why, works)) from error
    if file.name.endswith(_VOCABULARY):
        return _of_gpt2(file), file
    if content.lstrip()[:1] == b"{" or file.suffix == ".json":
        return _text(content, file), file
    if _is_ranks(content):
        what = f"{file} is a file of tiktoken: it lacks the special tokens and how words are cut"
        raise DataError(Mistake(what, attempt="the tokenizer.json of the same tokenizer"))
    definition, vocabulary = from_pieces(content, file)
    _check_added(file, vocabulary)
    return definition, file


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn an error of the Rust library into a DataError that begins with `what`."""
    try:
        yield
    except BaseException as error:
        # It raises bare Exception, or a PanicException that is none and that nothing exports.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DataError(Mistake(what, (f"it says: {error}",))) from error
        raise


def _text(content: bytes, file: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"{file} is not a tokenizer.json: byte {error.start} is not UTF-8"
        raise DataError(what) from error


def _is_ranks(content: bytes) -> bool:
    """Whether the first line is a token in base64 and its rank."""
    token, _, rank = content.partition(b"\n")[0].partition(b" ")
    return token.isascii() and rank.strip().isdigit()


def _of_gpt2(file: Path) -> str:
    """GPT-2's tokenizer, with this vocabulary and the merges beside it.

    Such files do not say how text is cut into words. GPT-2's way is assumed, unless files beside
    them name another tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    whole, config = file.with_name(_WHOLE), file.with_name(_CONFIG)
    if file.name == _VOCABULARY and whole.is_file():
        what = f"{file} does not say how its tokenizer cuts words, as {whole} does"
        raise DataError(Mistake(what, attempt=f"--tokenizer-model {whole}"))
    said = _said(config).get("tokenizer_class", "GPT2Tokenizer")
    if said not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        what = f"{file} is of a {said} ({config}), which may cut words where GPT-2's does not"
        raise DataError(Mistake(what, attempt="the tokenizer.json of the same tokenizer"))
    merges = file.with_name(file.name.removesuffix(_VOCABULARY) + _MERGES)
    with telling(f"{file} and {merges} are no vocabulary and merges of GPT-2's kind"):
        backend = Tokenizer(models.BPE.from_file(str(file), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    _check_added(file, backend.get_vocab())
    return backend.to_str()


def _check_added(file: Path, vocabulary: Container[str]) -> None:
    """Refuse a vocabulary whose neighbouring files add tokens, in an order of their own."""
    beside = file.with_name(_ADDED)
    added = set(read_json(beside, dict[str, int], DataError)) if beside.is_file() else set[str]()
    listed = _said(file.with_name(_CONFIG)).get("added_tokens_decoder", {})
    added |= {str(token["content"]) for token in listed.values()}
    if missing := sorted(token for token in added if token not in vocabulary):
        what = f"{file} has no {' '.join(missing[:8])}, which files beside it add"
        raise DataError(Mistake(what, attempt="the tokenizer.json of the same tokenizer"))


def _said(config: Path) -> dict[str, Any]:
    return read_json(config, dict[str, Any], DataError) if config.is_file() else {}
