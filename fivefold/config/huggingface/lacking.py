"""Families that cannot be read, and the features that no model here can have."""

from collections.abc import Mapping
from types import MappingProxyType

_HEAD_GATES = "attention has a gate for each whole head"
_STREAMS = "several residual streams are mixed in each layer (hyper-connections)"
_WINDOWED_HEADS = "layers with a window have other numbers of heads"
_MISTRAL_LARGE4 = (
    "layers take latents of earlier ones (kv_source_layers), and what their indexers have chosen"
)
_INKLING = (
    f"{_WINDOWED_HEADS}, and attention adds learned numbers for distances between tokens to scores"
)
_CYCLES = "layers are run several times, one round after the other"
_BESIDE = "attention and Mamba-2 read one hidden state side by side"
GEMMA4_SHARED = (
    "E2B and E4B take keys and values of earlier layers, which pipeline stages would have to send"
)
GEMMA4_EMBEDDED = (
    "E2B and E4B embed each token for each layer, too, and every layer multiplies by that"
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
        "lfm3": _HEAD_GATES,
        "laguna": f"{_HEAD_GATES}, a softplus, and layers may have other numbers of heads",
        "step3p7": f"{_HEAD_GATES}, and {_WINDOWED_HEADS}",
        **dict.fromkeys(
            ("hy_v4", "hy_v4_vl", "qwen4_exp", "qwen4_exp_text", "glm5_next", "glm5_next_text"),
            _STREAMS,
        ),
        "deepseek_v4": f"{_STREAMS}, and attention reads keys that are compressed over tokens",
        **dict.fromkeys(("mistral_large4", "mistral_large4_text"), _MISTRAL_LARGE4),
        **dict.fromkeys(
            ("minimax_m3_vl", "minimax_m3_vl_text"),
            "attention is to whole blocks of tokens that an indexer chooses",
        ),
        **dict.fromkeys(
            ("dots3_note", "dots3_note_text"), "layers may have other numbers of experts"
        ),
        **dict.fromkeys(("inkling_text", "inkling_mm_model"), _INKLING),
        **dict.fromkeys(("inkling2", "inkling2_text"), _INKLING),
        **dict.fromkeys(("inkling2_loop", "inkling2_loop_text"), f"{_INKLING}; {_CYCLES}"),
        **dict.fromkeys(
            ("muse_glimmer", "muse_glimmer_text"),
            "embeddings are normalised, and heads by norms without weights",
        ),
        "axk1": "a norm follows experts, and none the MLPs of dense layers",
        "axk2": "what norms make is multiplied by gates of each token (gated_norm_rank)",
        "kolibri1": "experts are chosen by logits plus a bias, rather than by scores plus a bias",
        "zaya": "attention mixes queries and keys by convolutions, and a router is an MLP",
        "olmo_hybrid": (
            "layers with linear attention have norms before, those with attention after, and "
            "states may change their sign"
        ),
        "lara_mini": "all projections of linear attention are one matrix in its files",
        **dict.fromkeys(
            ("apertus1p5", "apertus1p5_text"),
            "the output layer has fewer entries than the embedding (output_vocab_size)",
        ),
        "dory": f"states, queries and keys all have length one (nGPT), and {_CYCLES}",
        "hrm_text": _CYCLES,
        "bitnet": "attention and MLPs normalise what their last matrix reads",
        "dbrx": "all experts of a layer are one matrix in its files, turned as none are here",
        "diffllama": "attention is the difference of two softmaxes",
        "jetmoe": "attention has experts, too",
        "persimmon": "each head is normalised by a LayerNorm",
        "bamba": "layers with Mamba-2 have an MLP, too, which here is a layer of its own",
        **dict.fromkeys(("zamba", "zamba2"), "several layers share one attention"),
        "recurrent_gemma": "most layers have a gated linear recurrence (RG-LRU)",
        **dict.fromkeys(("rwkv", "xlstm"), "layers have a recurrence in place of attention"),
        "blt": "bytes are gathered in patches of varying length",
        "modernbert-decoder": (
            "the first layer has one norm, and a linear layer precedes the output layer"
        ),
        "falcon_h1": _BESIDE,
        **dict.fromkeys(("bloom", "mpt"), "attention knows positions by slopes (ALiBi)"),
        "phimoe": "its router chooses one expert after the other (SparseMixer)",
        "minimax": "most layers have lightning attention",
        "bailing_hybrid": "most layers have Kimi Delta Attention, whose decay is of each feature",
        "longcat_flash": "a layer has two attentions, and experts that compute nothing",
        **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), "layers have Mamba, not Mamba-2"),
    }
)
"""By their `model_type`."""
