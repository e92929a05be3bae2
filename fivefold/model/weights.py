"""The parameters of norms and linear layers, as descriptions of layers list them; torch-free."""

from fivefold.config.model import ModelConfig
from fivefold.model.operations import Weight


def norm_weights(name: str, model: ModelConfig, features: int | None = None) -> tuple[Weight, ...]:
    """Those of a norm, by default over the residual stream's features."""
    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    return tuple(Weight(f"{name}.{kind}", (features or model.hidden_size,)) for kind in kinds)


def mlp_weights(
    name: str, model: ModelConfig, inner: int
) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """Those into the inner features of an MLP, and those out of them."""
    h, bias = model.hidden_size, model.add_bias_linear
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
