"""A family of Hugging Face models: one record from which everything else follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fivefold.config.huggingface.reader import Reader
from fivefold.config.model import ModelConfig

Fields = dict[str, Any]
Names = Mapping[str, str]
"""Substitutions in our names of tensors, in this order; `{e}` stands for the index of an expert."""
EACH: Names = MappingProxyType({".experts.": ".experts.{e}."})
"""Names of experts that have tensors of their own."""
GATE_UP: Names = MappingProxyType(
    {".mlp.gate_proj.": ".mlp.gate_up_proj.", ".mlp.up_proj.": ".mlp.gate_up_proj."}
)
"""Names of an MLP whose gate and up projections are one linear layer."""
TOGETHER: Names = MappingProxyType(
    {
        ".mlp.experts.gate_proj.weight": ".mlp.experts.gate_up_proj",
        ".mlp.experts.up_proj.weight": ".mlp.experts.gate_up_proj",
        ".mlp.experts.down_proj.weight": ".mlp.experts.down_proj",
    }
)
"""Of weights of experts that are kept together."""
SINKS: Names = MappingProxyType({".self_attn.sinks.weight": ".self_attn.sinks"})
"""Of attention sinks."""
AFTER: Names = MappingProxyType(
    {
        ".post_self_attn_layernorm.": ".post_attention_layernorm.",
        ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
    }
)
"""Of norms after attention and MLP."""


@dataclass(frozen=True)
class Tensors:
    """How files hold tensors, in the form in which models are published.

    Attributes:
        names: how they are named.
        renamed: whether transformers' modules, and so adapters, are named otherwise.
        base: prefix of all names but the output layer's.
        last: name of the last norm.
        two_norms: more substitutions, where attention and MLP are side by side after two norms.
        joint_qkv: how queries, keys and values follow one another in one linear layer: all of each,
            those of one head of keys, or queries, values and keys of each quarter of the heads;
            None: they are three.
        joint_mlp: whether gate and up are one linear layer.
        experts: how weights of experts lie: each by itself, or together: as here, with gate and up
            after one another; transposed; transposed, with gate and up alternating.
        also: how else they may lie: together, or not transposed; or where else dense MLPs may.
        apart: linear layers of ours that are several there: these, in order.
        pairs: whether rotary features are stored as pairs of neighbours, not as two halves; None:
            `rope_interleave` of the config.json says so.
        turns_back: whether rotary features are turned by the opposite angles there, which makes the
            second half of a head our first.
        index_pairs: whether those of an indexer are.
        transposed: whether linear layers are.
        bias_in_row: whether a router's bias is the one row of a matrix.
        linear: module of linear attention in a layer that has it.
        predicts: whether there may be layers of multi-token prediction after the last.
        further: how their names begin, if they have numbers of their own; empty: those that follow
            the last layer's.
        left_out: how names begin, after the base, of what is left out.
        constants: how names end, after the base, of what has no effect.
        numbers: how names end of numbers that transformers wants beside a tensor: how that one's
            does, and the number.
    """

    names: Names = field(default_factory=dict)
    renamed: bool = False
    base: str = "model."
    last: str = "norm."
    two_norms: Names = field(default_factory=dict)
    joint_qkv: Literal["in_turn", "by_head", "by_quarter"] | None = None
    joint_mlp: bool = False
    experts: Literal["each", "together", "transposed", "alternating"] = "each"
    also: Literal["together", "untransposed", "mixtures"] | None = None
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pairs: bool | None = False
    turns_back: bool = False
    index_pairs: bool = False
    transposed: bool = False
    bias_in_row: bool = False
    linear: str = ".linear_attn."
    predicts: bool = False
    further: str = ""
    left_out: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    numbers: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        kind: the `model_type` of its config.json.
        architecture: transformers' class of the causal language model.
        read: the architecture that a config.json describes.
        write: the fields of a config.json that describes an architecture, as far as the family can;
            None: another family's can say the same.
        tensors: how its files hold tensors.
    """

    kind: str
    architecture: str
    read: Callable[[Reader], ModelConfig]
    write: Callable[[ModelConfig], Fields] | None
    tensors: Tensors = field(default_factory=Tensors)
