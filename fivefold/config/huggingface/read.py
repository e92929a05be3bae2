"""Reads a config.json with the rules of its model family."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.cohere import cohere, cohere2
from fivefold.config.huggingface.deepseek import deepseek
from fivefold.config.huggingface.ernie import ernie4_5, ernie4_5_moe
from fivefold.config.huggingface.falcon import falcon
from fivefold.config.huggingface.generic import read_generic
from fivefold.config.huggingface.gpt import gpt2, gpt_neox, starcoder2
from fivefold.config.huggingface.granite import granite_hybrid
from fivefold.config.huggingface.hunyuan import hunyuan, hunyuan_moe
from fivefold.config.huggingface.layered import exaone4, gemma, gemma2, gemma3, olmo3
from fivefold.config.huggingface.llama import llama_like
from fivefold.config.huggingface.llama4 import llama4
from fivefold.config.huggingface.mixtures import (
    dots1,
    exaone_moe,
    glm4_moe,
    gpt_oss,
    granite_moe,
    minimax_m2,
    mixtral,
    olmoe,
    qwen_moe,
    solar_open,
)
from fivefold.config.huggingface.multimodal import MULTIMODAL, is_multimodal, text_reader
from fivefold.config.huggingface.naming import in_words_of
from fivefold.config.huggingface.nemotron_h import nemotron_h
from fivefold.config.huggingface.qwen_linear import qwen3_5, qwen3_5_moe, qwen3_next
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.seed import seed_oss
from fivefold.config.huggingface.stablelm import stablelm
from fivefold.config.huggingface.ungated import arcee, nemotron
from fivefold.config.model import ModelConfig
from fivefold.config.rules.model import check_model
from fivefold.errors import ConfigError, Mistake, did_you_mean
from fivefold.files import read_json

_FAMILIES: Mapping[str, Callable[[Reader, str], ModelConfig]] = MappingProxyType(
    {
        "llama": llama_like,
        "llama4_text": llama4,
        "mistral": llama_like,
        "ministral3": llama_like,
        "mixtral": mixtral,
        "qwen2": llama_like,
        "qwen3": llama_like,
        "phi3": llama_like,
        "smollm3": llama_like,
        "granite": llama_like,
        "granitemoe": granite_moe,
        "granitemoeshared": granite_moe,
        "granitemoehybrid": granite_hybrid,
        "seed_oss": seed_oss,
        "stablelm": stablelm,
        "falcon": falcon,
        "cohere": cohere,
        "cohere2": cohere2,
        "arcee": arcee,
        "nemotron": nemotron,
        "nemotron_h": nemotron_h,
        "ernie4_5": ernie4_5,
        "ernie4_5_moe": ernie4_5_moe,
        "olmo2": llama_like,
        "olmoe": olmoe,
        "olmo3": olmo3,
        "gemma": gemma,
        "gemma2": gemma2,
        "gemma3_text": gemma3,
        "qwen2_moe": qwen_moe,
        "qwen3_moe": qwen_moe,
        "qwen3_next": qwen3_next,
        "qwen3_5_text": qwen3_5,
        "qwen3_5_moe_text": qwen3_5_moe,
        "deepseek_v2": deepseek,
        "deepseek_v3": deepseek,
        "glm4_moe_lite": deepseek,
        "kimi_k2": deepseek,
        "glm": llama_like,
        "glm4": llama_like,
        "glm4_moe": glm4_moe,
        "solar_open": solar_open,
        "exaone4": exaone4,
        "exaone_moe": exaone_moe,
        "dots1": dots1,
        "hunyuan_v1_dense": hunyuan,
        "hunyuan_v1_moe": hunyuan_moe,
        "minimax_m2": minimax_m2,
        "gpt_oss": gpt_oss,
        "gpt_neox": gpt_neox,
        "gpt2": gpt2,
        "starcoder2": starcoder2,
    }
)


def from_hf_config(source: Mapping[str, Any] | str | Path) -> ModelConfig:
    """The architecture that a Hugging Face config.json (its content, path or folder) describes.

    Supports the families in `_FAMILIES`, as transformers v4 and v5 write them, and the text models
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
    elif isinstance(kind, str) and kind in _FAMILIES:
        reader = Reader(fields, f"this {kind} model")
    else:
        raise _unknown_family(kind)
    model = _FAMILIES[kind](reader, kind)
    read_generic(reader)
    reader.without_effect("model_type")
    reader.refuse_unread()
    reader.mistakes.raise_if_any()
    check_model(model, reader.mistakes)
    try:
        reader.mistakes.raise_if_any()
    except ConfigError as error:
        raise in_words_of(error, reader.fields, reader.known) from None
    return replace(model, unmodelled=tuple(reader.left_out))


def _read_file(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    return read_json(file, dict[str, Any], ConfigError)


def _unknown_family(kind: object) -> ConfigError:
    families = *_FAMILIES, *MULTIMODAL
    if not isinstance(kind, str):
        what = "config.json needs a text for 'model_type', which names the family of the model"
        return ConfigError(Mistake(what, works=families))
    what = f"unsupported model_type {kind[:80]!r}{did_you_mean(kind, families)}"
    return ConfigError(Mistake(what, works=families))
