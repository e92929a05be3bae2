"""What transformers takes absent fields of Llama and related families for."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal


@dataclass(frozen=True)
class Defaults:
    """transformers' defaults for fields that a config.json omits.

    Attributes:
        num_key_value_heads: key/value heads; None: as many as query heads.
        head_dim: features of a head; None: hidden size / heads.
        rms_norm_eps: epsilon of RMSNorm.
        rope_theta: base of RoPE.
        sliding_window: sliding window in tokens, if a window is used.
        rotary_share: share of a head's features that RoPE rotates; None: the family has no such
            field, and rotates all.
        tied: whether embeddings are tied.
        activation: activation function of the MLP, as files have it.
        norms: which norms the family has around attention and MLP.
        heads: how it normalises heads of queries and keys; None: it does not.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    sliding_window: int | None = 4096
    rotary_share: float | None = None
    tied: bool = False
    activation: str = "silu"
    norms: Literal["before", "after", "both"] = "before"
    heads: Literal["per_head", "all_heads"] | None = None


HUNYUAN = "hunyuan_v1_dense", "hunyuan_v1_moe"
QWEN_LINEAR = "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"
"""Families with linear attention in some layers."""
ALWAYS_EXPERTS = "solar_open", "qwen3_5_moe_text"
"""Families without layers whose MLP is dense, which has no size there."""
DEFAULTS: Mapping[str, Defaults] = MappingProxyType(
    {
        "llama": Defaults(),
        "mistral": Defaults(8),
        "ministral3": Defaults(8, 128, 1e-5, 1e6, sliding_window=None),
        "mixtral": Defaults(8, None, 1e-5, 1e6, sliding_window=None),
        "qwen2": Defaults(32),
        "qwen3": Defaults(32, head_dim=128, heads="per_head"),
        "qwen2_moe": Defaults(16),
        "qwen3_moe": Defaults(4, heads="per_head"),
        "qwen3_next": Defaults(2, 256, rotary_share=0.25, heads="per_head"),
        "qwen3_5_text": Defaults(4, 256, rotary_share=0.25, heads="per_head"),
        "qwen3_5_moe_text": Defaults(2, 256, rotary_share=0.25, heads="per_head"),
        "gpt_oss": Defaults(8, 64, 1e-5, 150000.0),
        "granite": Defaults(),
        "granitemoe": Defaults(),
        "granitemoehybrid": Defaults(),
        "granitemoeshared": Defaults(),
        "seed_oss": Defaults(8, 128),
        "stablelm": Defaults(32, None, 1e-5, rotary_share=0.25),
        "arcee": Defaults(None, None, 1e-5, activation="relu2"),
        "nemotron": Defaults(None, None, 1e-5, rotary_share=0.5, activation="relu2"),
        "ernie4_5": Defaults(2, 128, 1e-5, 500000.0, tied=True),
        "ernie4_5_moe": Defaults(4, None, 1e-5, 500000.0, tied=True),
        "cohere": Defaults(None, None, 1e-5, 500000.0, tied=True),
        "cohere2": Defaults(None, None, 1e-5, tied=True),
        "phi3": Defaults(None, None, 1e-5, sliding_window=None, rotary_share=1.0),
        "glm": Defaults(2, 128, 1.5625e-7, rotary_share=0.5),
        "glm4": Defaults(2, 128, 1.5625e-7, rotary_share=0.5, norms="both"),
        "glm4_moe": Defaults(8, None, 1e-5, rotary_share=0.5),
        "solar_open": Defaults(8, 128, 1e-5, 1e6),
        "exaone4": Defaults(32, None, 1e-5, norms="after", heads="per_head"),
        "exaone_moe": Defaults(32, None, 1e-5, heads="per_head"),
        **dict.fromkeys(HUNYUAN, Defaults(None, None, 1e-5, heads="per_head")),
        "dots1": Defaults(32, heads="per_head"),
        "minimax_m2": Defaults(8, 128, 1e-6, 5e6, rotary_share=1.0, heads="all_heads"),
        "smollm3": Defaults(4, rope_theta=2000000.0, sliding_window=None, tied=True),
        "olmo2": Defaults(None, None, 1e-5, norms="after", heads="all_heads"),
        "olmoe": Defaults(None, None, 1e-5, heads="all_heads"),
        "olmo3": Defaults(None, None, 1e-5, norms="after", heads="all_heads"),
        "gemma": Defaults(16, 256, tied=True, activation="gelu_pytorch_tanh"),
        "gemma2": Defaults(4, 256, tied=True, activation="gelu_pytorch_tanh", norms="both"),
        "gemma3_text": Defaults(
            4, 256, tied=True, activation="gelu_pytorch_tanh", norms="both", heads="per_head"
        ),
    }
)
NULL_HEADS = (
    *("llama", "mistral", "mixtral", "gpt_oss", "ernie4_5", "arcee", "nemotron", "seed_oss"),
    *("stablelm", "ministral3"),
)
"""Families in which transformers takes a head_dim of null for hidden size / heads."""
GLM = "glm", "glm4", "glm4_moe", "solar_open"
"""Families whose attention_bias means queries, keys and values, without the output."""
COUNTED_HEADS = (
    *("qwen2_moe", "exaone4", "gemma", "gemma2", "gemma3_text", "minimax_m2", "ernie4_5_moe"),
    *("nemotron", "stablelm", "exaone_moe", "ministral3"),
    *QWEN_LINEAR,
    *GLM,
)
"""Families in which transformers takes no num_key_value_heads of null."""
NO_WINDOWS = (
    *("llama", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid"),
    *("olmo2", "olmoe", "gemma"),
    *("minimax_m2", "ernie4_5", "ernie4_5_moe", "arcee", "nemotron", "seed_oss", "stablelm"),
    "cohere",
    *HUNYUAN,
    *QWEN_LINEAR,
    *GLM,
)
EPSILONS = MappingProxyType(
    {
        "nemotron": "norm_eps",
        **dict.fromkeys(("stablelm", "cohere", "cohere2"), "layer_norm_eps"),
    }
)
"""Names of the norms' epsilon, where it is not rms_norm_eps."""
