"""In every family, a setting of the architecture is refused, or changes the model."""

from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.check import check
from fivefold.config.config import SETTINGS, Config
from fivefold.config.model import ModelConfig
from fivefold.config.rules.dependence import without_orphans
from fivefold.config.rules.layer_dependents import DECIDES, KINDS
from fivefold.config.settings import Setting, settings_of
from fivefold.errors import ConfigError
from fivefold.layout import Layout
from fivefold.model.prediction import with_mtp_tokens
from tests.model.models import (
    CHUNKED,
    COMMAND,
    CONVOLVING,
    DELTA,
    GPT,
    HYBRID,
    LATENT,
    LONG,
    NEOX,
    PLAIN_QUERIES,
    SINKS,
    SPARSE,
    batch_of,
    build,
)
from tests.verify.cases import chosen

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2}
UNSCALED: dict[str, Any] = {"rope_original_max_position_embeddings": 8192}
STRETCHED: dict[str, Any] = {"original_max_position_embeddings": 64, "beta_fast": 8.0}
INDEXER: dict[str, Any] = {"dsa_indexer_head_dim": 20}
LATENTS = replace(LATENT, **UNSCALED, **STRETCHED, qk_pos_emb_head_dim=16)
FAMILIES = {
    "gpt": GPT,
    "neox": replace(
        NEOX,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=True,
        rope_original_max_position_embeddings=16,
    ),
    "command": replace(COMMAND, rotary_seq_len_interpolation_factor=None),
    "chunked": replace(CHUNKED, rope_original_max_position_embeddings=16),
    "sinks": SINKS,
    "chunked, experts": replace(
        CHUNKED,
        num_experts=4,
        moe_router_topk=1,
        moe_router_score_function="sigmoid",
        use_rope_scaling=False,
        **UNSCALED,
    ),
    "sinks, experts": replace(SINKS, **EXPERTS, use_rope_scaling=False, **UNSCALED),
    "long": replace(LONG, **UNSCALED),
    "latent": LATENTS,
    "latent, plain queries": replace(PLAIN_QUERIES, **UNSCALED, add_bias_linear=False),
    "convolving": replace(CONVOLVING, **UNSCALED, linear_attention_freq="[0,1,0]"),
    "sparse": replace(SPARSE, **UNSCALED, **STRETCHED, qk_pos_emb_head_dim=16, **INDEXER),
    "latent experts": replace(LATENTS, **EXPERTS, moe_shared_expert_intermediate_size=24),
}
# Numbers to try; of other settings, the other choices or the other switch.
NUMBERS: dict[str, Any] = {
    "rotary_base": 90.0,
    "rotary_base_local": 90.0,
    "rotary_percent": 0.5,
    "rope_scaling_factor": 4.0,
    "rope_low_freq_factor": 2.0,
    "rope_high_freq_factor": 8.0,
    "rotary_scaling_factor": 20.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 2.0,
    "beta_slow": 0.5,
    "mscale": 0.5,
    "mscale_all_dim": 0.5,
    "longrope_short_factor": (3.0, 1.0, 1.5),
    "longrope_long_factor": (3.0, 1.0, 1.5),
    "longrope_attention_factor": 0.7,
    "glu_linear_offset": 0.5,
    "activation_func_clamp_value": 0.3,
    "embedding_init_method_std": 1.5,
    "norm_epsilon": 0.01,
    "latent_norm_epsilon": 0.02,
    "moe_router_norm_epsilon": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 3.0,
    "softmax_scale": 0.3,
    "clip_qkv": 0.2,
    "position_embedding_offset": 2,
    "attn_logit_softcapping": 0.8,
    "final_logit_softcapping": 0.8,
    "rotary_seq_len_interpolation_factor": 3.0,
    "window_size": 2,
    "window_attn_skip_freq": "3",
    "no_rope_freq": "3",
    "attention_chunk_size": 4,
    "attn_scale": 0.5,
    "floor_scale": 2,
    "num_query_groups": 1,
    "ffn_hidden_size": 28,
    "attention_dropout": 0.4,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_group_scores": 2,
    "moe_router_topk_scaling_factor": 2.0,
    "moe_ffn_hidden_size": 24,
    "kv_channels": 14,
    "num_query_groups_local": 4,
    "kv_channels_local": 14,
    "v_channels": 9,
    "value_multiplier": 0.3,
    "hybrid_override_pattern": "*-M",
    "mamba_state_dim": 4,
    "mamba_head_dim": 8,
    "mamba_num_groups": 3,
    "mamba_num_heads": 4,
    "mtp_hybrid_override_pattern": "*-",
    "linear_attention_freq": "3",
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 4,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 22,
    "dsa_indexer_topk": 3,
    "q_lora_rank": 10,
    "v_head_dim": 8,
}
KNOWN = {
    "dsa_indexer_use_sparse_loss": ("sparse",),  # of backwards: tests/model/test_indexer.py
    # With add_bias_linear they have these biases.
    "add_qkv_bias": ("gpt", "neox", "command", "sinks"),
    "attention_out_bias": ("gpt", "neox", "command", "sinks"),
    "mlp_bias": ("gpt", "neox", "command", "sinks"),
    "qk_layernorm": ("latent", "sparse"),  # which are normalised in any case, as its help says
    "attn_temperature_tuning": ("neox", "command"),  # of sequences of 8191 tokens or more
    "use_rope_scaling": (
        "command",
        "convolving",
        "sinks, experts",
        "chunked, experts",
        "latent",
        "sparse",
    ),  # of contexts beyond 8192 tokens
    "rope_type": (
        "command",
        "convolving",
        "chunked, experts",
        "sinks, experts",
        "latent",
        "sparse",
    ),  # beyond 4096 tokens
    "softmax_type_local": ("sinks",),  # which all its layers have
    "longrope_long_factor": ("long",),  # of longer rows: tests/model/test_rope.py
}


def _values(setting: Setting) -> tuple[Any, ...]:
    if setting.name in NUMBERS:
        return (NUMBERS[setting.name],)
    return (False, True) if setting.kind is bool else () if setting.many else setting.choices


CASES = [(s.name, value) for s in settings_of(ModelConfig) for value in _values(s)]


def _made(model: ModelConfig) -> list[Tensor]:
    """The losses of a model, and all that it holds."""
    stage = build(model)
    batch = with_mtp_tokens(batch_of(model, [[12], [12]]), model.mtp_num_layers)
    with torch.no_grad():
        return [stage(None, batch), *stage.state_dict().values()]


def _layout(model: ModelConfig) -> Layout:
    return check(Config(model).with_values(seq_length=16), 1)


@cache
def _before(family: str) -> list[Tensor]:
    return _made(FAMILIES[family])


# The layers of the others are in families with experts, too, and dense MLPs in "gpt" and "neox".
ALSO = {"chunked", "sinks", "latent", "latent, plain queries", "command"}


@pytest.mark.parametrize("family", chosen(FAMILIES, *(set(FAMILIES) - ALSO)))
def test_no_setting_of_the_model_is_ignored(family: str) -> None:
    model, ignored = FAMILIES[family], []
    _layout(model)
    for name, value in CASES:
        if getattr(model, name) == value:
            continue
        other = replace(model, **{name: value})
        try:
            _layout(other)
        except ConfigError:
            continue
        made, before = _made(other), _before(family)
        same = [a.shape for a in made] == [b.shape for b in before]
        if same and all(torch.equal(a, b) for a, b in zip(made, before, strict=True)):
            ignored.append(name)
    known = {name for name, families in KNOWN.items() if family.startswith(families)}
    assert set(ignored) <= known


OF_LAYERS = sorted({n for kind in KINDS for n in kind.names if _values(SETTINGS[n])})
# Of contexts beyond 4096 tokens, or the same in other words: a list of windows where layers have
# states, a softmax as others have it.
ALIKE = {"use_rope_scaling", "rope_type", "window_attn_skip_freq", "softmax_type_local"}
STATES = replace(DELTA, **UNSCALED, window_size=2, linear_attention_freq="[1,0,1]")


def _hybrid(others: str, random: Random) -> ModelConfig:
    """A model with Mamba-2 and these mixers, some perhaps in a further prediction alone, and
    without the settings of layers that it lacks."""
    first, further = "M", ""
    for letter in others:
        if random.random() < 0.3:
            further += letter
        else:
            first += letter
    first = "".join(random.sample(first + random.choice(first), k=len(first) + 1))
    predicts = {"mtp_num_layers": 1, "mtp_hybrid_override_pattern": further}
    model = replace(HYBRID, **UNSCALED, **(EXPERTS if "E" in others else {}))
    model = replace(model, num_layers=len(first), hybrid_override_pattern=first)
    return _usable(replace(model, **predicts if further else {}))


def _usable(model: ModelConfig) -> ModelConfig:
    return without_orphans(Config(model), (), deciding=DECIDES)[0].model


def _refusal(model: ModelConfig) -> str:
    try:
        _layout(model)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("draws", [6, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "layers", ["", "*", "-", "E", "*-", "*E", "-E", "[0,1,1]", "[1,1,0]", "[1,0,1]"]
)
def test_settings_of_layers_that_a_model_lacks_are_refused(layers: str, draws: int) -> None:
    """Neither more nor fewer: models with drawn mixers, or with windows and positions where layers
    have states, are built with each drawn setting, whether it is refused or not."""
    random = Random(f"{layers} {draws}")
    model = replace(STATES, window_attn_skip_freq=layers) if "," in layers else None
    model = _hybrid(layers, random) if model is None else _usable(model)
    assert not _refusal(model), _refusal(model)
    before = _made(model)
    for _ in range(draws):
        name = random.choice(OF_LAYERS)
        value = random.choice(_values(SETTINGS[name]))
        other, default = replace(model, **{name: value}), SETTINGS[name].default
        told = _refusal(other)
        idle = f"{name} = {SETTINGS[name].words(value)} has no effect: it is for layers with"
        if (told and idle not in told) or value in (default, getattr(model, name)):
            continue
        made = _made(other)
        same = [a.shape for a in made] == [b.shape for b in before]
        same = same and all(torch.equal(a, b) for a, b in zip(made, before, strict=True))
        assert same == bool(told) or (name in ALIKE and not told), (model, name, value, told)
