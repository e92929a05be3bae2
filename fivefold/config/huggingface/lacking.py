"""Families that are not read, and what of them no model here can have."""

from collections.abc import Mapping
from types import MappingProxyType

_CONVOLUTIONS = "most layers have gated convolutions in place of attention"
_BESIDE = "attention and Mamba-2 read one hidden state side by side"
_NO_WEIGHTS = "norms have no weights"
_BIASED_HEAD = "the output layer has a bias"
GEMMA4_SHARED = (
    "E2B and E4B take keys and values of earlier layers, which pipeline stages would have to send"
)
GEMMA4_EMBEDDED = (
    "E2B and E4B embed each token for each layer, too, and every layer multiplies by that"
)
GEMMA4_EXPERTS = (
    "26B-A4B has experts beside an MLP in each layer, each with norms, and a router with a norm "
    "and scales"
)
LACKING: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("gemma3n", "gemma3n_text"),
            "several residual streams are mixed in each layer (AltUp), and MLPs keep few features",
        ),
        **dict.fromkeys(
            ("aya_vision", "cohere2_vision"),
            "transformers leaves logit_scale of its text model out, which then is another model",
        ),
        **dict.fromkeys(("phi", "gptj", "codegen"), _BIASED_HEAD),
        **dict.fromkeys(("olmo", "nanochat"), _NO_WEIGHTS),
        **dict.fromkeys(("lfm2", "lfm2_moe"), _CONVOLUTIONS),
        "falcon_h1": _BESIDE,
        **dict.fromkeys(("bloom", "mpt"), "attention knows positions by slopes (ALiBi)"),
        "opt": "learned positions start at the third row of their table, and MLPs have a ReLU",
        "phimoe": "its router chooses one expert after the other (SparseMixer)",
        "minimax": "most layers have lightning attention",
        "kimi_linear": "most layers have Kimi Delta Attention, whose decay is of each feature",
        "longcat_flash": "a layer has two attentions, and experts that compute nothing",
        **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "layers have Mamba, not Mamba-2"),
    }
)
"""By their `model_type`."""
