"""Turns a SentencePiece model (Kudo & Richardson 2018) into a tokenizer.json of the same tokens."""

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fivefold.errors import DataError, Mistake

_SPACE = "\u2581"  # stands for a space in pieces
_BPE = 2  # TrainerSpec.ModelType
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6  # ModelProto.SentencePiece.Type
_ALL_SPACES = 1 << 20


def from_pieces(content: bytes, file: Path) -> tuple[str, Mapping[str, int]]:
    """The text of a tokenizer.json, and the number of each piece.

    Texts have the tokens that SentencePiece gives them, whatever they are.

    Args:
        content: a serialised `sentencepiece.ModelProto`.
        file: what messages call it.

    Raises:
        DataError: it is no such model, or one of which `tokenizers` would make other tokens.
    """
    model = _parsed(content, file)
    _check(model, file)
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    definition = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": number,
                "content": piece.piece,
                "special": True,
                **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
            }
            for number, piece in enumerate(model.pieces)
            if piece.type in (_UNKNOWN, _CONTROL)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": list(_normalizers(model.normalizer_spec)),
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(_decoders(model.normalizer_spec))},
        "model": {
            "type": "BPE",
            "unk_token": model.pieces[model.trainer_spec.unk_id].piece,
            "fuse_unk": True,
            "byte_fallback": model.trainer_spec.byte_fallback,
            "vocab": vocabulary,
            "merges": list(_merges(model.pieces)),
        },
    }
    return json.dumps(definition), vocabulary


def _parsed(content: bytes, file: Path) -> Any:
    """The message in a file; its classes are created at run time, so type checkers do not see
    them."""
    try:
        from google.protobuf.message import DecodeError

        messages = import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError as error:
        what = f"{file} is no tokenizer.json; SentencePiece models need {error.name}"
        raise DataError(Mistake(what, attempt='pip install "fivefold[sentencepiece]"')) from error
    model = messages.ModelProto()
    try:
        model.ParseFromString(content)
    except DecodeError as error:
        what = f"{file} is neither a tokenizer.json nor a SentencePiece model"
        raise DataError(what) from error
    texts = [piece.piece for piece in model.pieces]  # bytes where they are not UTF-8
    unknown = [number for number, p in enumerate(model.pieces) if p.type == _UNKNOWN]
    sound = all(isinstance(text, str) and text for text in texts)
    if not sound or len(set(texts)) < len(texts) or unknown != [model.trainer_spec.unk_id]:
        raise DataError(f"{file} is no SentencePiece model, or is damaged")
    return model


def _check(model: Any, file: Path) -> None:
    """Refuse models that `tokenizers` would treat differently or cannot represent.

    Its Unigram finds control and byte pieces that a text spells; its normaliser by a table drops
    accents after a character that the table changes; symbols of the user's are found before a
    text is normalised, and a space is put before what follows each. Of a piece of several spaces
    before a text SentencePiece takes away one.
    """
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    kinds = {piece.type for piece in model.pieces}
    spaced = any(p.piece.startswith(2 * _SPACE) for p in model.pieces if p.type == _NORMAL)
    scores = [p.score for p in model.pieces if p.type == _NORMAL and len(p.piece) > 1]
    wrong = [
        (trainer.model_type != _BPE, "its model is not BPE"),
        (
            bool(normalizer.precompiled_charsmap),
            f"it normalises characters ({normalizer.name or 'by a table of its own'})",
        ),
        (
            not kinds <= {_NORMAL, _UNKNOWN, _CONTROL, _BYTE},
            "it has pieces that are the user's symbols, or unused",
        ),
        (not normalizer.escape_whitespaces, "its pieces hold spaces as they are"),
        (trainer.treat_whitespace_as_suffix, "it puts spaces after words"),
        (len(set(scores)) < len(scores), "some of its pieces have equal scores"),
        (
            normalizer.remove_extra_whitespaces and spaced,
            "it removes spaces, and has pieces that begin with several",
        ),
    ]
    if reasons := [reason for is_wrong, reason in wrong if is_wrong]:
        what = f"{file} is a SentencePiece model that no tokenizer.json can reproduce"
        attempt = "the tokenizer.json that came with the model"
        raise DataError(Mistake(what, tuple(reasons), attempt=attempt))


def _normalizers(spec: Any) -> Iterator[dict[str, Any]]:
    if spec.remove_extra_whitespaces:
        pattern = rf"\A +|[ {_SPACE}]+\z|(?<= ) +"
        yield {"type": "Replace", "pattern": {"Regex": pattern}, "content": ""}
    if spec.add_dummy_prefix:
        yield {"type": "Prepend", "prepend": _SPACE}
    yield {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _decoders(spec: Any) -> Iterator[dict[str, Any]]:
    yield {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    yield {"type": "ByteFallback"}
    yield {"type": "Fuse"}
    before = _ALL_SPACES if spec.remove_extra_whitespaces else int(spec.add_dummy_prefix)
    yield {"type": "Strip", "content": " ", "start": before, "stop": 0}


def _merges(pieces: Any) -> Iterator[tuple[str, str]]:
    """The pairs of pieces that make a piece, in the order in which they are merged.

    SentencePiece merges the pair whose piece has the highest score, the first in the text of equal
    ones.
    """
    numbers = {p.piece: number for number, p in enumerate(pieces) if p.type == _NORMAL}
    ordered = sorted(numbers, key=lambda piece: (-pieces[numbers[piece]].score, numbers[piece]))
    for piece in ordered:
        for cut in range(1, len(piece)):
            if (first := piece[:cut]) in numbers and (second := piece[cut:]) in numbers:
                yield first, second
