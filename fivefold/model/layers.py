"""The basic modules of the model, and the plain versions of its seams.

A seam is an attribute that holds a plain callable. Tensor parallelism replaces `plain_column`,
`plain_row` and `plain_lookup` with its own and leaves everything else unchanged. Shapes: T tokens,
H input features, F output features, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.model.dora import Summed, plain_sum, rescaled, rescaled_beside, squared_lengths
from fivefold.model.dropout import NO_DROPS, Drops
from fivefold.model.leaves import local
from fivefold.model.products import Products, of_one_input


class Linear(nn.Module):
    """y = x W^T + b, with W [out, in]. Parameters are left uninitialised.

    Attributes:
        lora_A, lora_B: its adapter, which the block that holds it runs; None: it has none.
        lora_magnitude_vector: lengths to which rows of both are scaled (`model.dora`); None: not.
        lora_name, lora_scale: its name in its block, and the factor of what the adapter makes.
        used: rows of the weight that this rank multiplies with; None: all it holds.
        multiply: seam around the products, of the same kind for all linears of one input; another
            arithmetic replaces them.
    """

    bias: nn.Parameter | None
    lora_A: "Linear | None"
    lora_B: "Linear | None"
    lora_magnitude_vector: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.lora_A = self.lora_B = self.lora_magnitude_vector = None
        self.lora_name, self.lora_scale = "", 0.0
        self.used: slice | None = None
        self.multiply = Products()

    @property
    def product_bias(self) -> nn.Parameter | None:
        """The bias that the product itself adds; with magnitudes (DoRA) the bias is added after
        them."""
        return self.bias if self.lora_magnitude_vector is None else None

    def adapt(self, name: str, rank: int, scale: float, *, magnitudes: bool) -> None:
        """Attach an adapter (`model.lora`)."""
        outputs, inputs = self.weight.shape
        self.lora_A, self.lora_B = Linear(inputs, rank), Linear(rank, outputs)
        self.lora_name, self.lora_scale = name, scale
        if magnitudes:
            self.lora_magnitude_vector = nn.Parameter(torch.empty(outputs))

    def use(self, rows: slice) -> None:
        """Multiply with these rows of the weight only."""
        self.used = rows
        if self.lora_B is not None:
            self.lora_B.used = rows

    def part(self, parameter: Tensor) -> Tensor:
        """The rows of a parameter's local part that this rank multiplies with."""
        return local(parameter) if self.used is None else local(parameter)[self.used]

    def adapted(
        self,
        made_TF: Tensor,
        added_TF: Tensor,
        dropped_TF: Tensor | None = None,
        summed: Summed = plain_sum,
    ) -> Tensor:
        """What its weight makes, overwritten, with what its adapter adds.

        Args:
            made_TF: product of the weight, with `product_bias`.
            added_TF: product of the adapter.
            dropped_TF: product of the weight with what the adapter reads, if it has dropout and
                there are magnitudes.
            summed: sums over the ranks that split the rows of the weight.
        """
        magnitudes, down, up = self.lora_magnitude_vector, self.lora_A, self.lora_B
        if magnitudes is None:
            return made_TF.add_(added_TF)
        assert down is not None and up is not None
        weight, low, high = self.part(self.weight), local(down.weight), self.part(up.weight)
        squares = squared_lengths(weight.detach(), low.detach(), high.detach(), self.lora_scale)
        scales = self.part(magnitudes), summed(squares).sqrt()
        bias = None if self.bias is None else self.part(self.bias)
        if dropped_TF is None:
            return rescaled(made_TF.add_(added_TF), *scales, bias)
        return rescaled_beside(made_TF, dropped_TF, added_TF, *scales, bias)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        bias = None if self.product_bias is None else local(self.product_bias)
        return self.multiply.apply((self.multiply,), x_TH, (local(self.weight),), (bias,))[0]


class Column(Protocol):
    """Several linears of one input; under tensor parallelism each returns this rank's features."""

    def __call__(self, x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
        """[T, in] -> one [T, out] per linear."""


Row = Callable[[Tensor, Linear], Tensor]
"""A linear of this rank's input features, summed over the ranks before its bias is added."""


def plain_column(x_TH: Tensor, *linears: Linear) -> tuple[Tensor, ...]:
    """Apply every linear to the same input; replaced by column (output-sharded) parallelism."""
    weights = [local(linear.weight) for linear in linears]
    added = [linear.product_bias for linear in linears]
    biases = [None if bias is None else local(bias) for bias in added]
    products = of_one_input([linear.multiply for linear in linears])
    return products[0].apply(products, x_TH, weights, biases)


Spread = Callable[[Tensor], Tensor]
"""[T of this rank, F] -> [T of all tensor-parallel ranks, F], for features all heads share."""


def plain_spread(x_TF: Tensor) -> Tensor:
    """Returns the features unchanged; replaced where ranks split the heads."""
    return x_TF


def plain_row(x_TF: Tensor, linear: Linear) -> Tensor:
    """Apply the linear; replaced by row (input-sharded) parallelism."""
    y_TH: Tensor = linear(x_TF)
    return y_TH


class LayerBlock(nn.Module):
    """Base of attention and MLP: follows a norm and is added to the residual stream.

    Attributes:
        column: seam around the linears that read the hidden states.
        row: seam around the linear that returns to the residual stream.
        whole: seam around linears of the hidden states that every rank holds whole.
        spread: seam around features that all heads share and no column-parallel linear reads.
        summed: seam around numbers of which ranks that split the inputs of `row` have parts.
        place: place of this rank among these.
        recomputed_as: name in recompute_modules that reruns this block; empty: none.
        recomputed_with_norm: name that reruns it with the norm before it; empty: none.
        discards_norm: names that recompute the norm's output.
        compiles: whether torch.compile can trace it as a whole.
    """

    recomputed_as = ""
    recomputed_with_norm = ""
    discards_norm = frozenset({"layernorm"})
    compiles = True

    def __init__(self) -> None:
        super().__init__()
        self.column: Column = plain_column
        self.row: Row = plain_row
        self.whole: Column = plain_column
        self.spread: Spread = plain_spread
        self.summed: Summed = plain_sum
        self.place = 0

    def split(self, rank: int, ranks: int) -> None:
        """Take one rank's heads where `ranks` split them; blocks without heads ignore it."""

    def project(
        self, x_TH: Tensor, *linears: Linear, drops: Drops = NO_DROPS
    ) -> tuple[Tensor, ...]:
        """`column` with what adapters add: [T, H] -> one [T, F] per linear."""
        return self._adapted(self.column, x_TH, linears, drops)

    def project_whole(self, x_TH: Tensor, *linears: Linear, drops: Drops) -> tuple[Tensor, ...]:
        """`whole` with what adapters add."""
        return self._adapted(self.whole, x_TH, linears, drops)

    def project_back(self, x_TF: Tensor, linear: Linear, drops: Drops = NO_DROPS) -> Tensor:
        """`row` with what an adapter adds: [T, F] -> [T, H]."""
        if linear.lora_A is None or linear.lora_B is None:
            return self.row(x_TF, linear)
        read_TF, dropped_TH = x_TF, None
        if drops:
            read_TF = drops[linear.lora_name].part(x_TF, self.place * x_TF.shape[1])
            apart = linear.lora_magnitude_vector is not None
            dropped_TH = self.row(read_TF, linear) if apart else None
        low_TR = self.row(read_TF, linear.lora_A) * linear.lora_scale
        (added_TH,) = self.whole(low_TR, linear.lora_B)
        return linear.adapted(self.row(x_TF, linear), added_TH, dropped_TH, self.summed)

    def _adapted(
        self, column: Column, x_TH: Tensor, linears: Sequence[Linear], drops: Drops
    ) -> tuple[Tensor, ...]:
        """Runs adapters first, so that a recomputed block that ends in a frozen linear need not run
        it again.

        Few features are scaled, not the sum by `add`'s alpha, which inductor loses (torch 2.13).
        """
        first = [linear.lora_A for linear in linears if linear.lora_A is not None]
        if not first:
            return column(x_TH, *linears)
        low = iter(() if drops else self.whole(x_TH, *first))
        added: list[tuple[Tensor, Tensor | None] | None] = []
        for of in linears:
            if of.lora_A is None or of.lora_B is None:
                added.append(None)
                continue
            read_TH = drops[of.lora_name].whole(x_TH) if drops else x_TH
            low_TR = self.whole(read_TH, of.lora_A)[0] if drops else next(low)
            (added_TF,) = column(low_TR * of.lora_scale, of.lora_B)
            apart = drops and of.lora_magnitude_vector is not None
            added.append((added_TF, column(read_TH, of)[0] if apart else None))
        made = column(x_TH, *linears)
        return tuple(
            y if more is None else of.adapted(y, *more)
            for of, y, more in zip(linears, made, added, strict=True)
        )


class Embedding(nn.Module):
    """A table of rows, looked up by index. Parameters are left uninitialised.

    Attributes:
        scale: factor of what is looked up.
    """

    def __init__(self, rows: int, features: int, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, features))
        self.scale = scale
        self.lookup: Callable[[Tensor, Embedding], Tensor] = plain_lookup

    def forward(self, indices_T: Tensor) -> Tensor:
        """[T] int64 -> [T, features]."""
        found_TH = self.lookup(indices_T, self)
        return found_TH if self.scale == 1.0 else found_TH.mul_(self.scale)  # no one keeps it


def plain_lookup(indices_T: Tensor, embedding: Embedding) -> Tensor:
    """Look up rows of the table; replaced when the vocabulary is sharded."""
    return F.embedding(indices_T, local(embedding.weight))
