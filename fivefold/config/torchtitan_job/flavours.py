"""The models of torchtitan, by the names that its jobs give them.

Sources: `torchtitan/models` of releases 0.1.0 to 0.3.0. `releases.json` has the number of
parameters that each of them has there, which these models have exactly
(`tests/config/test_torchtitan_job.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from fivefold.config.layer_pattern import runs
from fivefold.config.model import ModelConfig
from fivefold.config.presets import PRESETS

_LLAMA3_DEBUG = replace(
    PRESETS["llama3-8b"],
    num_layers=6,
    hidden_size=256,
    num_attention_heads=16,
    num_query_groups=16,
    ffn_hidden_size=768,
    vocab_size=2048,
)
_LLAMA4 = replace(  # all layers have RoPE and attend to all before, and no norms of heads
    PRESETS["llama4-scout"],
    no_rope_freq=None,
    attention_chunk_size=None,
    qk_l2_norm=False,
    attn_temperature_tuning=False,
    make_vocab_size_divisible_by=64,
)
_LLAMA4_17BX128E = replace(
    _LLAMA4,
    use_rope_scaling=False,
    rope_scaling_factor=8.0,
    rope_high_freq_factor=4.0,
    num_experts=128,
    moe_layer_freq="([0]*1+[1]*1)*24",
)
_LLAMA4_DEBUG = replace(
    _LLAMA4,
    num_layers=6,
    hidden_size=256,
    num_attention_heads=16,
    num_query_groups=16,
    kv_channels=None,
    ffn_hidden_size=768,
    vocab_size=2048,
    num_experts=8,
    moe_ffn_hidden_size=512,
    moe_shared_expert_intermediate_size=512,
    moe_layer_freq="([0]*1+[1]*1)*3",
)
_QWEN3_DEBUG = replace(
    PRESETS["qwen3-0.6b"], num_layers=8, hidden_size=256, ffn_hidden_size=3072, vocab_size=2048
)
_QWEN3_DEBUG_MOE = replace(
    PRESETS["qwen3-30b-a3b"],
    num_layers=8,
    hidden_size=256,
    num_attention_heads=16,
    num_query_groups=8,
    ffn_hidden_size=3072,
    vocab_size=2048,
    num_experts=64,
)
_DEEPSEEK_V3_16B = replace(
    PRESETS["deepseek-v2-lite"],
    norm_epsilon=1e-5,
    mscale=0.7,
    mscale_all_dim=0.7,
)
_DEEPSEEK_V3_DEBUG = replace(
    _DEEPSEEK_V3_16B,
    num_layers=6,
    hidden_size=256,
    ffn_hidden_size=1024,
    vocab_size=2048,
    num_experts=8,
    moe_router_topk=3,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=512,
    moe_layer_freq="[0]*1+[1]*5",
)
_DEEPSEEK_V3_236B = replace(
    PRESETS["deepseek-v2"],
    norm_epsilon=1e-5,
    mscale=1.0,
    mscale_all_dim=1.0,
    moe_router_group_scores=2,
)
_DEEPSEEK_V3_671B = replace(PRESETS["deepseek-v3"], norm_epsilon=1e-5, mtp_num_layers=0)
_GPT_OSS_DEBUG = replace(PRESETS["gpt-oss-20b"], num_layers=4, hidden_size=256, num_experts=8)


def _in_turn(model: ModelConfig, chunk: int) -> ModelConfig:
    """With its first layer, and every fourth after it, without RoPE, and chunks in the others."""
    unrotated = [layer % 4 == 0 for layer in range(model.num_layers)]
    return replace(model, no_rope_freq=runs(unrotated), attention_chunk_size=chunk)


FLAVOURS: Mapping[str, Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "llama3": {
            "debugmodel": _LLAMA3_DEBUG,
            "1B": PRESETS["llama3.2-1b"],
            "3B": PRESETS["llama3.2-3b"],
            "8B": PRESETS["llama3-8b"],
            "70B": PRESETS["llama3-70b"],
            "405B": PRESETS["llama3-405b"],
        },
        "llama4": {
            "debugmodel": _LLAMA4_DEBUG,
            "17bx16e": _LLAMA4,
            "17bx128e": _LLAMA4_17BX128E,
            "debugmodel_irope": _in_turn(_LLAMA4_DEBUG, 256),
            "17bx16e_irope": _in_turn(_LLAMA4, 8192),
            "17bx128e_irope": _in_turn(_LLAMA4_17BX128E, 8192),
        },
        "qwen3": {
            "debugmodel": _QWEN3_DEBUG,
            **{name: PRESETS[f"qwen3-{name.lower()}"] for name in ("0.6B", "1.7B", "4B")},
            **{name: PRESETS[f"qwen3-{name.lower()}"] for name in ("8B", "14B", "32B")},
            "debugmodel_moe": _QWEN3_DEBUG_MOE,
            "30B-A3B": PRESETS["qwen3-30b-a3b"],
            "235B-A22B": replace(PRESETS["qwen3-235b-a22b"], rotary_base=5000000.0),
        },
        "deepseek_v3": {
            "debugmodel": _DEEPSEEK_V3_DEBUG,
            "16B": _DEEPSEEK_V3_16B,
            "236B": _DEEPSEEK_V3_236B,
            "671B": _DEEPSEEK_V3_671B,
        },
        "gpt_oss": {
            "debugmodel": _GPT_OSS_DEBUG,
            "20b": PRESETS["gpt-oss-20b"],
            "120b": PRESETS["gpt-oss-120b"],
        },
    }
)
"""Models by module and flavour, as the newest release with the flavour has them."""

_BALANCED = ("llama4", "deepseek_v3", "gpt_oss")
"""Modules whose experts are balanced by a bias of the router; from 0.3 on, those of all are."""
_ALIKE = ("_flex_attn", "_varlen_attn", "_flex", "_varlen", "_non_fused_qkv")
"""Ends of names of flavours that differ in how attention is computed."""
_IN_DOCUMENTS = ("16B", "236B", "671B")
"""Flavours of deepseek_v3 whose attention stays within documents, as that of those with `flex`
does."""


def known_as(module: str, flavour: str) -> str | None:
    """The flavour's name in `FLAVOURS`; None: it is none of them."""
    plain = next((flavour.removesuffix(end) for end in _ALIKE if flavour.endswith(end)), flavour)
    return next((n for n in (flavour, plain) if n in FLAVOURS.get(module, {})), None)


def within_documents(module: str, flavour: str) -> bool:
    """Whether tokens of a flavour attend within their documents alone, before release 0.3."""
    flexible = any(word in flavour for word in ("flex", "varlen", "irope"))
    return flexible or (module == "deepseek_v3" and flavour in _IN_DOCUMENTS)


def model_of(module: str, flavour: str, release: str, seq_length: int) -> ModelConfig:
    """The model of a flavour in a release, trained with sequences of a length.

    Args:
        module: key of `FLAVOURS`.
        flavour: key of its flavours.
        release: such as "0.2.2".
        seq_length: tokens of a sequence, by which DeepSeek's RoPE is stretched before 0.3.
    """
    model = FLAVOURS[module][flavour]
    plain = ModelConfig(1, 1, 1, 1)
    if model.num_experts and (module in _BALANCED or release >= "0.3"):
        model = replace(model, moe_router_enable_expert_bias=True)
    if release < "0.2":  # RoPE as it is
        model = _restored(model, plain, "use_rope_scaling", "rope_scaling_factor")
        model = _restored(model, plain, "rope_high_freq_factor")
    if release < "0.2.1" and module == "deepseek_v3":  # experts are not chosen by groups
        model = _restored(model, plain, "moe_router_num_groups", "moe_router_group_topk")
        model = _restored(model, plain, "moe_router_group_scores")
    if release < "0.2.2" and module == "qwen3":  # nothing is tied
        model = _restored(model, plain, "untie_embeddings_and_output_weights")
    short = seq_length <= model.original_max_position_embeddings
    if release < "0.3" and module == "deepseek_v3" and short:
        model = _restored(model, plain, "rope_type", "mscale", "mscale_all_dim")
    if module == "gpt_oss" and flavour == "debugmodel" and release >= "0.3":
        model = replace(model, vocab_size=2048)
    return replace(model, max_position_embeddings=max(model.max_position_embeddings, seq_length))


def _restored(model: ModelConfig, plain: ModelConfig, *names: str) -> ModelConfig:
    return replace(model, **{name: getattr(plain, name) for name in names})
