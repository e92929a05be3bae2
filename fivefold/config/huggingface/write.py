"""Writes the config.json of a model, in a family that reads it back as the same model."""

from collections.abc import Mapping
from typing import Any

from fivefold.config.huggingface.comparing import differences
from fivefold.config.huggingface.families import FAMILIES
from fivefold.config.huggingface.family import Family, Fields
from fivefold.config.huggingface.multimodal import text_reader
from fivefold.config.huggingface.read import from_hf_config
from fivefold.config.model import ModelConfig
from fivefold.errors import ConfigError, Mistake


def to_hf_config(model: ModelConfig) -> Fields:
    """The content of a config.json that describes this model.

    Raises:
        ConfigError: no supported family has such models; names the fields in which the nearest
            differs.
    """
    nearest: tuple[str, list[str]] | None = None
    for family in FAMILIES.values():
        if family.write is None:
            continue
        fields = _named(family) | family.write(model)
        try:
            again = from_hf_config(fields)
        except ConfigError:
            continue
        wrong = differences(model, again)
        if not wrong:
            return fields
        if nearest is None or len(wrong) < len(nearest[1]):
            nearest = family.kind, wrong
    why = [] if nearest is None else [f"nearest: {nearest[0]}, but for", *nearest[1]]
    what = "no model family of Hugging Face's that is supported has this architecture"
    raise ConfigError(Mistake(what, tuple(why)))


def text_model_fields(fields: Mapping[str, Any]) -> Fields:
    """The config.json of the text model alone, from that of a multimodal one.

    Raises:
        ConfigError: it is not supported.
    """
    reader, kind = text_reader(fields)
    reader.mistakes.raise_if_any()
    whole = {name: fields[name] for name in _TOKENS if name in fields}
    return {**reader.fields, **whole, **_named(FAMILIES[kind])}


def _named(family: Family) -> Fields:
    return {"architectures": [family.architecture], "model_type": family.kind}


_TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Fields of a whole model that go before those of its text model."""
