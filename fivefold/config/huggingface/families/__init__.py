"""All model families that can be read: one record each, in the order in which a config.json that
can describe a model is sought."""

from collections.abc import Mapping
from types import MappingProxyType

from fivefold.config.huggingface.families import (
    afmoe,
    apertus,
    cohere,
    deepseek,
    ernie,
    exaone,
    flint,
    gemma,
    gemma4,
    glm,
    gpt,
    gpt_oss,
    gptj,
    granite,
    hunyuan,
    kimi_linear,
    latents,
    lfm2,
    llama,
    llama4,
    mellum,
    mimo,
    mistral,
    nanochat,
    nemotron_h,
    olmo,
    opt,
    phi,
    qwen,
    qwen_linear,
)
from fivefold.config.huggingface.family import Family

_MODULES = (
    llama,
    mistral,
    qwen,
    phi,
    granite,
    glm,
    exaone,
    olmo,
    gemma,
    gemma4,
    gpt,
    gptj,
    nanochat,
    opt,
    cohere,
    ernie,
    qwen_linear,
    kimi_linear,
    gpt_oss,
    hunyuan,
    llama4,
    nemotron_h,
    apertus,
    mellum,
    mimo,
    afmoe,
    deepseek,
    latents,
    lfm2,
    flint,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.kind: family for module in _MODULES for family in module.FAMILIES}
)
"""By their `model_type`."""
