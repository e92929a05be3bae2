"""The models of torchtitan 0.3.0, and the comparison of a model with them.

Two models are the same if all settings that determine their function are.
`benchmarks.check_exports` compares this table with torchtitan's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from fivefold.config.by_layer import IN_BF16
from fivefold.config.config import SETTINGS
from fivefold.config.model import INITIAL, ModelConfig
from fivefold.config.torchtitan_job.flavours import FLAVOURS, model_of
from fivefold.config.torchtitan_job.releases import IN_PYTHON
from fivefold.config.torchtitan_job.releases import known as registered
from fivefold.config.training import TrainingConfig

_BF16 = (None, None)
_FLOAT8 = ("e4m3", "rowwise")


@dataclass(frozen=True)
class TorchtitanModel:
    """A configuration function of torchtitan.

    Attributes:
        module: module that contains the function.
        model: model that it trains.
        narrow: 8-bit format and recipe of its multiplications.
    """

    module: str
    model: ModelConfig
    narrow: tuple[str | None, str | None] = _BF16


def _its_models() -> Mapping[str, TorchtitanModel]:
    """Those configurations of the registry that are a flavour as it is, or in 8 bits."""
    found = {}
    for name, each in registered().configurations.items():
        plain = f"{each.module}_{each.flavour.lower()}".replace(".", "_").replace("-", "_")
        own = FLAVOURS[each.module].get(each.flavour)
        if own is not None and name in (plain, f"{plain}_float8"):
            model = replace(
                model_of(each.module, each.flavour, IN_PYTHON, own.max_position_embeddings),
                moe_router_enable_expert_bias=own.moe_router_enable_expert_bias,
            )
            narrow = _FLOAT8 if "Float8Linear" in each.linear else _BF16
            found[name] = TorchtitanModel(each.module, model, narrow)
    return MappingProxyType(found)


ITS_MODELS = _its_models()
"""torchtitan's models by the name of their configuration function."""

WITHOUT_MEANING = ("max_position_embeddings", "make_vocab_size_divisible_by", "rotary_interleaved")
"""Settings without effect in torchtitan: position tables grow, vocabularies are not padded, and
rotary features are in an order of its own, for which weights are reordered."""
_ROPE_SCALING = (
    "rope_scaling_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_max_position_embeddings",
)


def known(model: ModelConfig, training: TrainingConfig) -> str | None:
    """The configuration function for this model and these formats; None if there is none."""
    found = [name for name, its in ITS_MODELS.items() if not differences(model, its.model)]
    wanted = (training.fp8_format, training.fp8_recipe) if training.fp8_format else _BF16
    for narrow in (wanted, _BF16):  # 8 bits are said to be missing, never added
        for name in found:
            if ITS_MODELS[name].narrow == narrow:
                return name
    return None


def why_unknown(model: ModelConfig) -> str:
    """A sentence about the differences between this model and torchtitan's nearest one."""
    nearest = min(ITS_MODELS, key=lambda name: len(differences(model, ITS_MODELS[name].model)))
    its = ITS_MODELS[nearest]
    different = differences(model, its.model)
    if not different:
        return (
            f"{nearest} computes in 8 bits ({' '.join(map(str, its.narrow))}): a configuration of "
            f"your own must take this model without its converters"
        )
    said = ", ".join(
        f"{name} = {SETTINGS[name].words(mine)}, not {SETTINGS[name].words(theirs)}"
        for name, (mine, theirs) in different.items()
    )
    return f"none of its configurations has this model; of {nearest} it differs in {said}"


def differences(model: ModelConfig, other: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """The values of both models for each field that differs and determines the function."""
    mine, theirs = _function(model), _function(other)
    return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


@lru_cache(maxsize=128)  # its models are compared with each model
def _function(model: ModelConfig) -> Mapping[str, Any]:
    """The fields that determine the function, with defaults filled in; None if without effect."""
    found = {field.name: getattr(model, field.name) for field in fields(model)}
    for name in (*WITHOUT_MEANING, *INITIAL, *IN_BF16):
        del found[name]
    if not model.use_rope_scaling:
        found |= dict.fromkeys(_ROPE_SCALING)
    if model.position_embedding_type != "rope":
        found["rotary_base"] = None
    latent = model.multi_latent_attention
    found["num_query_groups"] = model.num_kv_heads
    found["kv_channels"] = None if latent else model.head_dim
    found["qk_layernorm"] = latent or model.qk_layernorm
    found["add_qkv_bias"] = model.qkv_bias
    found["attention_out_bias"], found["mlp_bias"] = model.output_bias, model.inner_bias
    layers = tuple(map(model.is_moe, range(model.num_layers))) if model.num_experts else ()
    found["moe_layer_freq"] = layers
    found["ffn_hidden_size"] = None if layers and all(layers) else model.ffn_size
    found["moe_ffn_hidden_size"] = model.expert_ffn_size if layers else None
    found["moe_shared_expert_intermediate_size"] = model.shared_ffn_size
    found["unmodelled"] = frozenset(model.unmodelled)
    return found
