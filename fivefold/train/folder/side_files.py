"""The files beside weights on the hub; a run keeps them for its conversion back."""

import json
import shutil
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from fivefold.config.huggingface.multimodal import is_multimodal
from fivefold.config.huggingface.write import text_model_fields
from fivefold.convert.hub import CONFIG
from fivefold.errors import CheckpointError
from fivefold.files import read_json, write_atomic
from fivefold.train.folder.run_folder import TOKENIZER

SIDE = "huggingface"
"""Folder of a run with what lay beside the weights: tokenizer, settings of generation."""
GENERATION = "generation_config.json"
WHOLE_MODEL = "multimodal_config.json"
"""There, the config.json of a multimodal model; `config.json` is then that of its text model."""
# The last two with what auto_map names.
_OF_MODELS = (CONFIG, WHOLE_MODEL, "configuration_*.py", "modeling_*.py")
_OF_TOKENIZERS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "tokenization_*.py",
    GENERATION,  # numbers of tokens
)


def keep_side_files(source: Path, run: Path) -> None:
    """Copy the files beside a Hugging Face folder's weights, or those that another run kept."""
    if source.resolve() == (run / SIDE).resolve():
        return
    (run / SIDE).mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and _is_any(file, (*_OF_MODELS, *_OF_TOKENIZERS)):
            shutil.copyfile(file, run / SIDE / file.name)
    config = run / SIDE / CONFIG
    if config.is_file() and is_multimodal(fields := _fields(config)):
        config.replace(run / SIDE / WHOLE_MODEL)
        write_atomic(config, json.dumps(text_model_fields(fields), indent=2) + "\n")


def whole_model(run: Path) -> str | None:
    """The multimodal family whose text model a run started from; None if it did not start from
    one."""
    file = run / SIDE / WHOLE_MODEL
    return str(_fields(file)["model_type"]) if file.is_file() else None


def _fields(file: Path) -> dict[str, Any]:
    return read_json(file, dict[str, Any], CheckpointError)


def side_files(run: Path) -> Iterator[Path]:
    """What goes beside its weights on the hub; a tokenizer's files only if it is the run's own."""
    if not (run / SIDE).is_dir():
        return
    other = _has_another_tokenizer(run)
    for file in (run / SIDE).iterdir():
        if file.name != WHOLE_MODEL and not (other and _is_any(file, _OF_TOKENIZERS)):
            yield file


def side_file(run: Path, name: str) -> Path | None:
    """One of `side_files`; None if it is not there."""
    return next((file for file in side_files(run) if file.name == name), None)


def _has_another_tokenizer(run: Path) -> bool:
    own, its = run / TOKENIZER, run / SIDE / TOKENIZER
    there = own.is_file() and its.is_file()
    return there and own.read_text("utf-8") != its.read_text("utf-8")


def _is_any(file: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)
