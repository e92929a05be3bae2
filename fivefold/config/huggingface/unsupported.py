"""Families of transformers that Fivefold cannot read, each with the feature that it does not have.

A row is a sentence for the error message and the `model_type`s, separated by spaces, that it
applies to.
"""

from collections.abc import Mapping
from types import MappingProxyType

# Gemma 4 is read; these are features of its smaller models, E2B and E4B.
GEMMA4_SHARED_KV = (
    "E2B and E4B reuse keys and values of earlier layers, which pipeline stages would have to send"
)
GEMMA4_LAYER_EMBEDDINGS = (
    "E2B and E4B have a token embedding for each layer, by which the layer multiplies"
)

_HYPER_CONNECTIONS = "layers mix several residual streams (hyper-connections)"
_HEAD_GATES = "attention output has one gate for each head"
_WINDOW_HEADS = "sliding-window layers have a different number of heads"
_DISTANCE_BIAS = "attention adds a learned bias by the distance between tokens to its scores"
_LOOP = "layers are run several times in a loop"

_ATTENTION = (
    (_HEAD_GATES, "lfm3"),
    (
        f"{_HEAD_GATES}, by a softplus, and the number of heads may differ between layers",
        "laguna",
    ),
    (f"{_HEAD_GATES}, and {_WINDOW_HEADS}", "step3p7"),
    (
        f"{_WINDOW_HEADS}, and {_DISTANCE_BIAS}",
        "inkling_text inkling_mm_model inkling2 inkling2_text",
    ),
    (
        f"{_WINDOW_HEADS}, {_DISTANCE_BIAS}, and {_LOOP}",
        "inkling2_loop inkling2_loop_text",
    ),
    (
        "layers reuse the latents of earlier layers (kv_source_layers), and the tokens that the "
        "indexers of those have chosen",
        "mistral_large4 mistral_large4_text",
    ),
    (
        "an indexer chooses whole blocks of tokens for attention",
        "minimax_m3_vl minimax_m3_vl_text",
    ),
    ("attention is the difference of two softmaxes (differential attention)", "diffllama"),
    ("attention has experts, too", "jetmoe"),
    ("several layers share one attention block", "zamba zamba2"),
    ("attention encodes positions by linear biases (ALiBi)", "bloom mpt"),
    (
        "attention mixes queries and keys by convolutions, and the router is an MLP",
        "zaya",
    ),
)
_NORMS = (
    (
        "embeddings are normalised, and the norms of attention heads have no weights",
        "muse_glimmer muse_glimmer_text",
    ),
    ("a norm follows the experts, but none follows the MLPs of dense layers", "axk1"),
    ("the output of each norm is multiplied by a gate of each token (gated_norm_rank)", "axk2"),
    (f"hidden states, queries and keys are scaled to length one (nGPT), and {_LOOP}", "dory"),
    ("attention and MLP normalise the input of their last projection", "bitnet"),
    ("each head is normalised by a LayerNorm", "persimmon"),
    (
        "the first layer has one norm only, and a linear layer precedes the output layer",
        "modernbert-decoder",
    ),
)
_RECURRENCE = (
    (
        "layers with linear attention have norms before it and layers with attention after it, and "
        "the states of linear attention may change their sign",
        "olmo_hybrid",
    ),
    ("layers with Mamba-2 also have an MLP, which here is a layer of its own", "bamba"),
    ("most layers have a gated linear recurrence (RG-LRU)", "recurrent_gemma"),
    ("layers have a recurrence in place of attention", "rwkv xlstm"),
    ("attention and Mamba-2 read the same hidden state in parallel", "falcon_h1"),
    ("most layers have lightning attention", "minimax"),
    (
        "most layers have Kimi Delta Attention with a decay for each feature",
        "bailing_hybrid",
    ),
    ("layers have Mamba, not Mamba-2", "mamba falcon_mamba jamba"),
)
_EXPERTS = (
    ("the number of experts may differ between layers", "dots3_note dots3_note_text"),
    ("the router chooses by logits plus a bias, not by scores plus a bias", "kolibri1"),
    ("the router chooses one expert after the other (SparseMixer)", "phimoe"),
    ("a layer has two attention blocks, and some experts compute nothing", "longcat_flash"),
)
_RESIDUAL = (
    (
        _HYPER_CONNECTIONS,
        "hy_v4 hy_v4_vl qwen4_exp qwen4_exp_text glm5_next glm5_next_text",
    ),
    (
        f"{_HYPER_CONNECTIONS}, and attention reads keys that are compressed over several tokens",
        "deepseek_v4",
    ),
    (
        "layers mix several residual streams (AltUp), and MLPs keep only some of their features",
        "gemma3n gemma3n_text",
    ),
    (_LOOP, "hrm_text"),
)
_FILES = (
    (
        "transformers ignores logit_scale of the text model, whose results then differ",
        "aya_vision cohere2_vision",
    ),
    ("its files have all projections of linear attention in one matrix", "lara_mini"),
    ("its files have all experts of a layer in one matrix, transposed", "dbrx"),
    (
        "the output layer has fewer entries than the embedding (output_vocab_size)",
        "apertus1p5 apertus1p5_text",
    ),
    ("bytes are grouped in patches of varying length", "blt"),
)

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        family: feature
        for rows in (_ATTENTION, _NORMS, _RECURRENCE, _EXPERTS, _RESIDUAL, _FILES)
        for feature, families in rows
        for family in families.split()
    }
)
"""`model_type` -> the feature that Fivefold lacks, as a sentence for the error message."""
