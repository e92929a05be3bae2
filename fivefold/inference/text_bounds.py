"""The tokens that begin and end a text that a model writes: those with which it was trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.convert.hub import CONFIG
from fivefold.data.prompts import opening
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import CheckpointError
from fivefold.files import read_json
from fivefold.train.folder.side_files import GENERATION, side_file

Fields = Mapping[str, Any]


@dataclass(frozen=True)
class TextBounds:
    """The tokens around a text.

    Attributes:
        opening: tokens before those of a prompt.
        ends: tokens of which each ends a text.
    """

    opening: tuple[int, ...]
    ends: frozenset[int]

    @classmethod
    def of(cls, run: Path, tokenizer: Tokenizer) -> "TextBounds":
        """The bounds for a run's model.

        With weights from Hugging Face, a text begins with the tokens that transformers puts before
        it, and ends at any of the tokens at which its `generate` stops. Documents that a run trains
        on here have no tokens before them.

        Raises:
            CheckpointError: a file from Hugging Face cannot be read.
        """
        model = _said(run, CONFIG)
        if model is None:
            return cls((), frozenset({tokenizer.eod_id}))
        how = _said(run, GENERATION)
        ends = (model if how is None else how).get("eos_token_id")
        others = ends if isinstance(ends, list) else [ends]
        whole = frozenset({tokenizer.eod_id, *(end for end in others if type(end) is int)})
        return cls(tuple(opening(tokenizer)), whole)


def _said(run: Path, name: str) -> Fields | None:
    file = side_file(run, name)
    return None if file is None else read_json(file, dict[str, Any], CheckpointError)
