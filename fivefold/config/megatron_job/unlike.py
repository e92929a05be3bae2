"""Checks by its stored arguments whether a Megatron-core checkpoint belongs to a model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fivefold.config.config import SETTINGS
from fivefold.config.huggingface.comparing import differences
from fivefold.config.megatron_job.arguments import job_of
from fivefold.config.megatron_job.model import of_experts, of_model, of_vocabulary
from fivefold.config.model import ModelConfig
from fivefold.config.translation import fitting
from fivefold.errors import ConfigError, Mistakes

_SIZES = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_words = SETTINGS["rotary_interleaved"].words
_FIELDS = frozenset(field.name for field in fields(ModelConfig))


def unlike(model: ModelConfig, arguments: Mapping[str, Any]) -> list[str]:
    """How a model differs from that of the run with these arguments, one line for each difference.

    Missing arguments have Megatron-LM's defaults, except sizes, which the tensors show. Arguments
    that only change how the same weights are trained are ignored.
    """
    if not arguments:
        return []
    as_here = {name: getattr(model, name) for name in _SIZES}
    as_here["bias_gelu_fusion"] = model.activation_func == "gelu_tanh"
    given = {name: value for name, value in arguments.items() if value is not None}
    mistakes = Mistakes()
    try:
        job = job_of(as_here | given)
        named = (
            *of_model(job, mistakes, []),
            *of_experts(job),
            *of_vocabulary(job, model.vocab_size, mistakes),
        )
        values = fitting(named, mistakes)
        mistakes.raise_if_any()
        there = ModelConfig(**{name: values[name] for name in values if name in _FIELDS})
    except ConfigError as error:
        return [mistake.what for mistake in error.mistakes]
    lines = differences(model, there)
    turned = model.rotary_interleaved, there.rotary_interleaved
    if model.position_embedding_type == "rope" and len({*turned}) > 1:
        lines.append("rotary_interleaved: {}, there {}".format(*map(_words, turned)))
    return lines
