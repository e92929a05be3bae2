"""Families that are not read, and what of them no model here can have."""

from collections.abc import Mapping
from types import MappingProxyType

_GEMMA4 = (
    "layers without a window have heads of another size and fewer keys, which may be the values, "
    "too; values are normalised, RoPE turns a part of the frequencies of a whole head, and each "
    "layer is multiplied by a number of its file. E2B and E4B have keys of earlier layers, and "
    "embeddings for each layer, besides; 26B-A4B has experts beside an MLP, each with norms"
)
_MIMO = (
    "layers with a window have twice the key heads of the others, and sinks, which those have not; "
    "values are of another size than keys, and multiplied by a number"
)
_CONVOLUTIONS = "most layers have gated convolutions in place of attention"
_BESIDE = "attention and Mamba-2 read one hidden state side by side"
_NO_WEIGHTS = "norms have no weights"
_BIASED_HEAD = "the output layer has a bias"
LACKING: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), _GEMMA4),
        **dict.fromkeys(
            ("gemma3n", "gemma3n_text"),
            "several residual streams are mixed in each layer (AltUp), and MLPs keep few features",
        ),
        "mimo_v2_flash": _MIMO,
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
        "longcat_flash": "a layer has two attentions, and experts that compute nothing",
        **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "layers have Mamba, not Mamba-2"),
    }
)
"""By their `model_type`."""
