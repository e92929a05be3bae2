"""Reads a config.json with the rules of its model family."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.config import Config
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.generic import read_generic
from fivefold.config.huggingface.multimodal import MULTIMODAL, is_multimodal, text_reader
from fivefold.config.huggingface.naming import in_words_of
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.unsupported import UNSUPPORTED
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.rules.layer_dependents import DECIDES
from fivefold.config.rules.model import check_model
from fivefold.errors import ConfigError, Mistake, did_you_mean
from fivefold.files import read_json


def from_hf_config(source: Mapping[str, Any] | str | Path) -> ModelConfig:
    """The architecture that a Hugging Face config.json (its content, path or folder) describes.

    Supports the families in `FAMILIES`, as transformers v4 and v5 write them, and the text models
    of those in `MULTIMODAL`. A missing field has transformers' default; sizes are required, but for
    those of a text model within another. Unsupported features that leave sizes unchanged, such
    as how a router scores, are listed in `unmodelled` for families that can be planned with but not
    trained; any other unsupported feature is refused.

    Raises:
        ConfigError: the file cannot be read; or lists every field that has a wrong type, conflicts
            with another, is not supported, or is not known.
    """
    fields = source if isinstance(source, Mapping) else _read_file(Path(source))
    kind = fields.get("model_type")
    if is_multimodal(fields):
        reader, kind = text_reader(fields)
    elif isinstance(kind, str) and kind in FAMILIES:
        reader = Reader(fields, f"this {kind} model")
    else:
        raise _unknown_family(kind)
    model = FAMILIES[kind].read(reader)
    read_generic(reader)
    reader.without_effect("model_type")
    reader.refuse_unread()
    reader.mistakes.raise_if_any()
    check_model(model, reader.mistakes)
    try:
        reader.mistakes.raise_if_any()
    except ConfigError as error:
        raise in_words_of(error, reader.fields, reader.known) from None
    # A file gives sizes of every kind of layer, whether or not any layer is of it.
    model = without_orphans(Config(model), (), deciding=DECIDES)[0].model
    return replace(model, unmodelled=tuple(reader.left_out))


def _read_file(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    return read_json(file, dict[str, Any], ConfigError)


def _unknown_family(kind: object) -> ConfigError:
    families = *FAMILIES, *MULTIMODAL
    if not isinstance(kind, str):
        what = "config.json needs a text for 'model_type', which names the family of the model"
        return ConfigError(Mistake(what, works=families))
    what = f"unsupported model_type {kind[:80]!r}"
    if kind in UNSUPPORTED:
        return ConfigError(Mistake(f"{what}: {UNSUPPORTED[kind]}"))
    return ConfigError(Mistake(what + did_you_mean(kind, families), works=families))
