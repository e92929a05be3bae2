"""The parameters of norms, linear layers and both ends, as descriptions list them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from fivefold.config.model import ModelConfig


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: name within the layer or the model.
        shape: global shape; [experts, out, in] for experts.
        split: dim that tensor-parallel ranks split; None: each rank holds the whole parameter.
        heads: number of heads in that dim, which are never split: if the number of ranks does not
            divide it, each rank holds all heads; 0: no heads.
        of_experts: whether the first dim is split over expert-parallel ranks, and `split` over
            expert-tensor-parallel ones.
        multiplies: whether it is the weight matrix of a linear layer.
        wide: whether it is multiplied in bf16 where others are in 8 bits: those of a wide layer.
        passes_on: whether what it multiplies gets a gradient; else it has no dX.
        trained: whether it is trained; False for all but adapters, where there are some.
        sees: what an unsplit weight is applied to: all "tokens", or this rank's "heads" or inner
            "features". Decides whether each tensor-parallel rank computes only part of its
            gradient.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: int = 0
    of_experts: bool = False
    multiplies: bool = False
    wide: bool = False
    passes_on: bool = True
    trained: bool = True
    sees: Literal["tokens", "heads", "features"] = "tokens"

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)

    def placed(self, tp: int) -> int | None:
        """The dim that `tp` ranks split; None if each holds the whole parameter."""
        return None if self.heads % tp else self.split

    def local(self, tp: int = 1, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
        """The shape on one rank, before data-parallel sharding."""
        shape, ranks = list(self.shape), etp if self.of_experts else tp
        if self.of_experts:
            shape[0] //= ep
        split = self.placed(tp)
        if split is not None:
            shape[split] //= ranks
        return tuple(shape)

    def is_partial(self, tp: int, *, sequence_parallel: bool) -> bool:
        """Whether each tensor-parallel rank computes only part of an unsplit weight's gradient."""
        if self.of_experts or self.placed(tp) is not None:
            return False
        return self.sees != "tokens" or self.split is not None or sequence_parallel


def norm_weights(name: str, model: ModelConfig, features: int | None = None) -> tuple[Weight, ...]:
    """Those of a norm, by default over the residual stream's features, which may have none."""
    if features is None and not model.norm_elementwise_affine:
        return ()
    biased = model.normalization == "LayerNorm" and model.layernorm_bias
    kinds = ("weight", "bias") if biased else ("weight",)
    return tuple(Weight(f"{name}.{kind}", (features or model.hidden_size,)) for kind in kinds)


def mlp_weights(
    name: str, model: ModelConfig, inner: int, features: int | None = None
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Those into the inner features of an MLP, and those out of them, by default of the residual
    stream's features."""
    h, bias = features or model.hidden_size, model.inner_bias
    names = ("gate_proj", "up_proj") if model.gated_linear_unit else ("up_proj",)
    first = tuple(w for each in names for w in column(f"{name}.{each}", h, inner, bias))
    return first, row(f"{name}.down_proj", inner, h, bias)


def column(name: str, inputs: int, outputs: int, bias: bool, heads: int = 0) -> tuple[Weight, ...]:
    """Those of a linear layer whose outputs tensor-parallel ranks split."""
    weight = Weight(f"{name}.weight", (outputs, inputs), 0, heads, multiplies=True)
    return weight, *([Weight(f"{name}.bias", (outputs,), 0, heads)] if bias else [])


def row(name: str, inputs: int, outputs: int, bias: bool) -> tuple[Weight, ...]:
    """Those of a linear layer whose inputs tensor-parallel ranks split."""
    weight = Weight(f"{name}.weight", (outputs, inputs), 1, multiplies=True)
    return weight, *([Weight(f"{name}.bias", (outputs,))] if bias else [])


def whole(name: str, inputs: int, outputs: int, bias: bool) -> tuple[Weight, ...]:
    """Those of a linear layer that each tensor-parallel rank holds whole."""
    weight = Weight(f"{name}.weight", (outputs, inputs), multiplies=True)
    return weight, *([Weight(f"{name}.bias", (outputs,))] if bias else [])


def of_experts(weight: Weight, experts: int) -> Weight:
    """A weight of one expert as that of all, in one tensor."""
    shape, split = (experts, *weight.shape), None if weight.split is None else weight.split + 1
    return Weight(weight.name, shape, split, of_experts=True, multiplies=weight.multiplies)


def frozen(weights: Sequence[Weight], model: ModelConfig) -> tuple[Weight, ...]:
    """Weights other than those of adapters: trained only if there are none."""
    return tuple(replace(weight, trained=model.trains_all) for weight in weights)


def embedding_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The parameters of the input embedding."""
    tokens = Weight("embed_tokens.weight", (model.padded_vocab_size, model.hidden_size), split=0)
    table = model.position_rows, model.hidden_size
    learned = model.position_embedding_type == "learned_absolute"
    positions = (Weight("embed_positions.weight", table),) if learned else ()
    norm = norm_weights("embed_norm", model) if model.embed_layernorm else ()
    return frozen((tokens, *positions, *norm), model)


def head_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """The parameters of the final norm, then of the output layer, including a tied weight."""
    output = column("lm_head", model.hidden_size, model.padded_vocab_size, model.lm_head_bias)
    return frozen((*norm_weights("norm", model), *output), model)
