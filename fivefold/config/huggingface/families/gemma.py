"""Gemma 1 to 3, and VaultGemma: norms' weights that start at 0, embeddings times the root of their
size."""

from dataclasses import replace
from functools import partial
from typing import Any

from fivefold.config.huggingface import windows
from fivefold.config.huggingface.comparing import softmax_scale
from fivefold.config.huggingface.family import AFTER, Family, Fields, Names, Tensors
from fivefold.config.huggingface.llama_like import LlamaLike
from fivefold.config.huggingface.reader import Reader
from fivefold.config.huggingface.rope import Rope, rope_by_layer
from fivefold.config.model import ModelConfig

_GEMMA = LlamaLike(
    num_key_value_heads=16,
    head_dim=256,
    tied=True,
    activation="gelu_pytorch_tanh",
    null_key_value_heads=False,
    padded=True,
)
_GEMMA2 = replace(
    _GEMMA, num_key_value_heads=4, norms="both", hidden_act="hidden_activation", windows=None
)
_VAULT = replace(_GEMMA2, norms="before")
_GEMMA3 = replace(_GEMMA2, heads="per_head", rope=None)


def _gemma(reader: Reader) -> ModelConfig:
    """The first."""
    model = _GEMMA.read(reader)
    reader.without_effect("hidden_activation")
    reader.fixed("use_bidirectional_attention", None, False)
    # In files of the first release gelu means its approximation by tanh.
    function = "gelu_tanh" if model.activation_func == "gelu" else model.activation_func
    return replace(model, activation_func=function, **_settings(model))


def _gemma2(reader: Reader, like: LlamaLike = _GEMMA2) -> ModelConfig:
    """Gemma 2: norms around attention and MLP, windows in every other layer, capped scores and
    logits. VaultGemma has norms before them alone."""
    model = like.read(reader)
    reader.without_effect("hidden_act", "cache_implementation", "sliding_window_size")
    reader.fixed("use_bidirectional_attention", None, False)
    slides = windows.listed(reader, model.num_layers)
    slides = slides or tuple(layer % 2 == 0 for layer in range(model.num_layers))
    return replace(
        model,
        softmax_scale=_scale(reader, model),
        attn_logit_softcapping=reader.number_or_null("attn_logit_softcapping", 50.0),
        final_logit_softcapping=reader.number_or_null("final_logit_softcapping", 30.0),
        **_settings(model),
        **windows.settings(windows.needed(reader, slides), slides),
    )


def _gemma3(reader: Reader) -> ModelConfig:
    """Gemma 3 for text: norms around attention and MLP, windows in five of six layers, in which
    RoPE has another base."""
    model = _GEMMA3.read(reader)
    # The last is what transformers has made layer_types of.
    reader.without_effect("hidden_act", "cache_implementation", "_sliding_window_pattern")
    reader.fixed("use_bidirectional_attention", False, None)
    why = "transformers caps scores in one of its implementations of attention and not in others"
    reader.fixed("attn_logit_softcapping", None, why=why)
    slides = windows.all_but_every(reader, 6, model.num_layers)
    rope, base = rope_by_layer(
        reader, Rope(1000000.0, 1.0, "default"), 10000.0, local="rope_local_base_freq"
    )
    return replace(
        model,
        softmax_scale=_scale(reader, model),
        final_logit_softcapping=reader.number_or_null("final_logit_softcapping", None),
        **_settings(model),
        **windows.beside_rope(reader, slides, rope, base),
    )


def _settings(model: ModelConfig) -> dict[str, Any]:
    return {"apply_layernorm_1p": True, "embedding_multiplier": model.hidden_size**0.5}


def _scale(reader: Reader, model: ModelConfig) -> float | None:
    size = reader.size("query_pre_attn_scalar", default=256)
    return None if size == model.head_dim else size**-0.5


def _windows_and_caps(model: ModelConfig) -> Fields:
    fields = _GEMMA2.write(model) | windows.fields(model)
    fields["hidden_activation"] = fields.pop("hidden_act")
    fields["query_pre_attn_scalar"] = round(softmax_scale(model) ** -2)
    return fields | {"final_logit_softcapping": model.final_logit_softcapping}


def _write_gemma2(model: ModelConfig) -> Fields:
    return _windows_and_caps(model) | {"attn_logit_softcapping": model.attn_logit_softcapping}


def _write_gemma3(model: ModelConfig) -> Fields:
    base = model.rotary_base_local or model.rotary_base
    return _windows_and_caps(model) | {"rope_local_base_freq": base}


_AROUND: Names = {".post_attention_layernorm.": ".pre_feedforward_layernorm.", **AFTER}
FAMILIES = (
    Family("gemma", "GemmaForCausalLM", _gemma, _GEMMA.write),
    Family("gemma2", "Gemma2ForCausalLM", _gemma2, _write_gemma2, Tensors(_AROUND)),
    Family(
        "vaultgemma",
        "VaultGemmaForCausalLM",
        partial(_gemma2, like=_VAULT),
        _write_gemma2,
        Tensors({".post_attention_layernorm.": ".pre_feedforward_layernorm."}),
    ),
    Family("gemma3_text", "Gemma3ForCausalLM", _gemma3, _write_gemma3, Tensors(_AROUND)),
)
