"""Writes the config.json of a model: of the family that, read again, is the same model."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from fivefold.config.huggingface.comparing import differences
from fivefold.config.huggingface.dense_fields import (
    Fields,
    ernie4_5,
    falcon,
    gpt2,
    gpt_neox,
    llama_like,
    starcoder2,
)
from fivefold.config.huggingface.expert_fields import (
    deepseek,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    gpt_oss,
    granite_moe_shared,
    hunyuan_moe,
    llama4,
    minimax_m2,
    mixtral,
    nemotron_h,
    olmoe,
    qwen_linear,
    qwen_moe,
    solar_open,
)
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
    for kind, (name, write) in _FAMILIES.items():
        fields = {"architectures": [name], "model_type": kind, **write(model, kind)}
        try:
            again = from_hf_config(fields)
        except ConfigError:
            continue
        wrong = differences(model, again)
        if not wrong:
            return fields
        if nearest is None or len(wrong) < len(nearest[1]):
            nearest = kind, wrong
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
    named = {"architectures": [_FAMILIES[kind][0]], "model_type": kind}
    return {**reader.fields, **whole, **named}


_TOKENS = "bos_token_id", "eos_token_id", "pad_token_id"
"""Fields of a whole model that go before those of its text model."""


_FAMILIES: Mapping[str, tuple[str, Callable[[ModelConfig, str], Fields]]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", llama_like),
        "mistral": ("MistralForCausalLM", llama_like),
        "ministral3": ("Ministral3ForCausalLM", llama_like),
        "qwen2": ("Qwen2ForCausalLM", llama_like),
        "qwen3": ("Qwen3ForCausalLM", llama_like),
        "phi3": ("Phi3ForCausalLM", llama_like),
        "smollm3": ("SmolLM3ForCausalLM", llama_like),
        "granite": ("GraniteForCausalLM", llama_like),
        "glm": ("GlmForCausalLM", llama_like),
        "glm4": ("Glm4ForCausalLM", llama_like),
        "exaone4": ("Exaone4ForCausalLM", llama_like),
        "olmo2": ("Olmo2ForCausalLM", llama_like),
        "olmo3": ("Olmo3ForCausalLM", llama_like),
        "gemma": ("GemmaForCausalLM", llama_like),
        "gemma2": ("Gemma2ForCausalLM", llama_like),
        "gemma3_text": ("Gemma3ForCausalLM", llama_like),
        "gpt2": ("GPT2LMHeadModel", gpt2),
        "starcoder2": ("Starcoder2ForCausalLM", starcoder2),
        "gpt_neox": ("GPTNeoXForCausalLM", gpt_neox),
        "mixtral": ("MixtralForCausalLM", mixtral),
        "granitemoe": ("GraniteMoeForCausalLM", mixtral),
        "granitemoeshared": ("GraniteMoeSharedForCausalLM", granite_moe_shared),
        "seed_oss": ("SeedOssForCausalLM", llama_like),
        "stablelm": ("StableLmForCausalLM", llama_like),
        "falcon": ("FalconForCausalLM", falcon),
        "cohere": ("CohereForCausalLM", llama_like),
        "cohere2": ("Cohere2ForCausalLM", llama_like),
        "arcee": ("ArceeForCausalLM", llama_like),
        "nemotron": ("NemotronForCausalLM", llama_like),
        "ernie4_5": ("Ernie4_5ForCausalLM", ernie4_5),
        "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", ernie4_5_moe),
        "olmoe": ("OlmoeForCausalLM", olmoe),
        "minimax_m2": ("MiniMaxM2ForCausalLM", minimax_m2),
        "qwen2_moe": ("Qwen2MoeForCausalLM", qwen_moe),
        "qwen3_moe": ("Qwen3MoeForCausalLM", qwen_moe),
        "qwen3_next": ("Qwen3NextForCausalLM", qwen_linear),
        "qwen3_5_text": ("Qwen3_5ForCausalLM", qwen_linear),
        "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", qwen_linear),
        "gpt_oss": ("GptOssForCausalLM", gpt_oss),
        "glm4_moe": ("Glm4MoeForCausalLM", glm4_moe),
        "solar_open": ("SolarOpenForCausalLM", solar_open),
        "exaone_moe": ("ExaoneMoeForCausalLM", exaone_moe),
        "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM", llama_like),
        "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", hunyuan_moe),
        "dots1": ("Dots1ForCausalLM", dots1),
        "llama4_text": ("Llama4ForCausalLM", llama4),
        "nemotron_h": ("NemotronHForCausalLM", nemotron_h),
        "deepseek_v2": ("DeepseekV2ForCausalLM", deepseek),
        "deepseek_v3": ("DeepseekV3ForCausalLM", deepseek),
        "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", deepseek),
    }
)
"""Of each family: the name of transformers' class, and what writes its fields."""
