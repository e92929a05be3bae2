"""Linear layers that multiply 8-bit floats; their parameters and results keep their dtype.

Each of a layer's three products sums over another dim: the output over H, dX over F, dW over T.
Where a scale belongs to part of that dim, an operand is quantised once for each of the products
that read it. Shapes: T tokens, H input features, F output features, E groups of rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold.model.eight_bit.delayed import GRADIENT, INPUT, WEIGHT, OperandScales
from fivefold.model.eight_bit.fp8 import (
    E4M3,
    Block,
    Recipe,
    Scaled,
    multiplies_groups,
    multiply,
    multiply_groups,
    quantise,
)
from fivefold.model.eight_bit.step_weights import StepWeights
from fivefold.model.products import Kept, Products, input_gradients, outputs


@dataclass(frozen=True)
class EightBit(Products):
    """The products of linear layers with 8-bit operands.

    What is kept of the input for dW is 8 bits wide, too: all of a rank's tokens share scales.

    Attributes:
        recipe: which elements share a scale.
        dtype: dtype of inputs, weights and results.
        gradients: 8-bit type of the gradients of results; inputs and weights are E4M3.
        keeps_input: whether to keep the input itself and to quantise it again: where it is made
            again, or kept for another reader.
        weight: the weight of the next products, already quantised; None: as they come.
        delayed: scales that are known before; None: those of the operands' own largest elements.
        kept_weights: where weights are kept for the microbatches of a step; None: nowhere.
        place: whose weight it is, to tell it from others that are kept there.
    """

    recipe: Recipe
    dtype: torch.dtype
    gradients: torch.dtype = E4M3
    keeps_input: bool = False
    weight: Scaled | None = None
    delayed: OperandScales | None = None
    kept_weights: StepWeights | None = None
    place: tuple[int | str, ...] = ()

    @staticmethod
    def apply(
        products: Sequence[Products],
        x_TH: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear layer, under autograd."""
        ys: tuple[Tensor, ...] = _Multiplied.apply(x_TH, tuple(products), *weights)
        return _with_biases(ys, biases)

    def reading_as(self, first: Products) -> "EightBit":
        """The same, with the scales with which the first linear layer reads their input."""
        if self.delayed is None or not isinstance(first, EightBit):
            return self
        return replace(self, delayed=replace(self.delayed, of_input=first.delayed))

    def input(self, x_TH: Tensor) -> tuple[Kept, Kept]:
        """Bits [T, H] and scales: for the results, and for dW unless that takes the input."""
        taken = self.taken(x_TH)
        shared = self.recipe.reads_both_ways and not self.keeps_input
        return taken, taken if shared else self.kept(x_TH)

    def taken(self, x_TH: Tensor) -> Kept:
        """Bits [T, H] and scales for the results."""
        x = self._quantised(x_TH, self._across, INPUT)
        return x.bits, x.inverse

    def kept(self, x_TH: Tensor) -> Kept:
        """Bits [T, H] and scales for dW, or the input."""
        if self.keeps_input:
            return (x_TH,)
        x = self._quantised(x_TH, self._along, INPUT)
        return x.bits, x.inverse

    def in_parts(self, weight_FH: Tensor, *, of_gradient: bool) -> "EightBit":
        """The same, with a weight that is quantised once for all parts of the tokens."""
        known = self.recipe.across == 1 or self.delayed is not None
        assert known, "some of the tokens have other scales than all of them"
        return replace(self, weight=self._weight(weight_FH, of_gradient=of_gradient))

    def gradient(self, grad_TF: Tensor) -> Kept:
        """The gradient's bits and scales, if one pair serves dX and dW."""
        if not self.recipe.reads_both_ways:
            return (grad_TF,)
        grad = self._quantised(grad_TF, self._across, GRADIENT)
        return grad.bits, grad.inverse

    def output(
        self,
        x: Kept,
        weight_FH: Tensor | Scaled,
        bias_F: Tensor | None = None,
        out_TF: Tensor | None = None,
    ) -> Tensor:
        """[T, H] -> [T, F]."""
        left = self._read(x, self._across, INPUT)
        y_TF = multiply(left, self._weight(weight_FH), self.dtype, fast=True)
        y_TF = y_TF if bias_F is None else y_TF + bias_F
        return y_TF if out_TF is None else out_TF.copy_(y_TF)

    def input_gradient(
        self,
        grad: Kept,
        weight_FH: Tensor | Scaled,
        onto_TH: Tensor | None = None,
        out_TH: Tensor | None = None,
    ) -> Tensor:
        """[T, F] -> [T, H], added to `onto_TH` or written into `out_TH` if there is one."""
        left = self._read(grad, self._across, GRADIENT)
        grad_TH = multiply(left, self._weight(weight_FH, of_gradient=True), self.dtype)
        if onto_TH is not None:
            return onto_TH.add_(grad_TH)
        return grad_TH if out_TH is None else out_TH.copy_(grad_TH)

    def weight_gradient(self, grad: Kept, kept: Kept, onto_FH: Tensor | None = None) -> Tensor:
        """[F, H], added to `onto_FH` in place, in its dtype, if there is one."""
        x = self._read(kept, self._along, INPUT)
        left = self._read(grad, self._along, GRADIENT).t()
        grad_FH = multiply(left, x.t(), self.dtype)
        return grad_FH if onto_FH is None else onto_FH.add_(grad_FH)

    def groups_output(self, x: Kept, weight_EFH: Tensor, ends: list[int]) -> Tensor:
        """`output` for groups of rows [T, H] with a weight each, where rows have scales alone."""
        return self._of_groups(self._read(x, self._across, INPUT), weight_EFH, ends)

    def groups_gradient(self, grad: Kept, weight_EFH: Tensor, ends: list[int]) -> Tensor:
        """`input_gradient` for the same groups."""
        left = self._read(grad, self._across, GRADIENT)
        return self._of_groups(left, weight_EFH, ends, of_gradient=True)

    def _of_groups(
        self, left: Scaled, weight_EFH: Tensor, ends: list[int], *, of_gradient: bool = False
    ) -> Tensor:
        weight_ENK = weight_EFH.transpose(1, 2) if of_gradient else weight_EFH
        if multiplies_groups(left, weight_ENK, self.dtype):
            weights = weight_ENK.reshape(-1, weight_ENK.shape[2])
            right = self._once("all groups", weights, of_gradient=of_gradient)
            return multiply_groups(left, right, ends, fast=not of_gradient)
        rights = (
            self.of_group(group)._weight(one, of_gradient=of_gradient)
            for group, one in enumerate(self.by_group(weight_EFH))
        )
        # Each product is freed before the next: together they are as large as what they become.
        product = left.bits.new_empty(ends[-1], weight_ENK.shape[1], dtype=self.dtype)
        parts = product.tensor_split(ends)[: len(ends)]
        for rows, one, right in zip(parts, left.by_rows(ends), rights, strict=True):
            rows.copy_(multiply(one, right, self.dtype, fast=not of_gradient))
        return product

    def of_group(self, group: int) -> "EightBit":
        """The products of one group."""
        delayed = None if self.delayed is None else self.delayed.of_group(group)
        return replace(self, delayed=delayed, place=(*self.place, group))

    def by_group(self, weight_EFH: Tensor) -> Sequence[Tensor | Scaled]:
        """The weight of each group, in 8 bits if that is how they were gathered."""
        if weight_EFH.dtype != E4M3:
            return weight_EFH.unbind()
        each = zip(weight_EFH.detach(), inverse_of(weight_EFH), strict=True)
        return [Scaled(bits, inverse, self.weight_block) for bits, inverse in each]

    @property
    def weight_block(self) -> Block:
        """Blocks of a weight [F, H] for a product that sums over its columns."""
        return self.recipe.weight_across, self.recipe.along

    @property
    def _across(self) -> Block:
        """Blocks of a matrix [T, ...] for a product that sums over its columns."""
        return self.recipe.across, self.recipe.along

    @property
    def _along(self) -> Block:
        """Blocks of a matrix [T, ...] for a product that sums over the tokens."""
        return self.recipe.along, self.recipe.across

    def _quantised(self, x: Tensor, block: Block, operand: int) -> Scaled:
        recipe, dtype = self.recipe, self.gradients if operand == GRADIENT else E4M3
        if self.delayed is not None:
            return self.delayed.quantised(x, operand, dtype)
        how = {"powers_of_two": recipe.powers_of_two, "exponents": recipe.exponents}
        return quantise(x, block, dtype, **how)

    def _read(self, kept: Kept, block: Block, operand: int) -> Scaled:
        """A kept matrix, quantised if it was kept unquantised."""
        if len(kept) > 1:
            return Scaled(kept[0], kept[1], block)
        return self._quantised(kept[0], block, operand)

    def _weight(self, weight: Tensor | Scaled, *, of_gradient: bool = False) -> Scaled:
        """A weight [F, H] in the form that a product needs: over H, or over F for the input's
        gradient.

        One that was gathered in 8 bits serves both: its blocks are as long as they are wide.
        """
        if self.weight is not None:
            return self.weight
        if isinstance(weight, Tensor) and weight.dtype == E4M3:
            weight = Scaled(weight.detach(), inverse_of(weight)[0], self.weight_block)
        if isinstance(weight, Scaled):
            return weight.t() if of_gradient else weight
        weight = weight.t() if of_gradient else weight
        return self._once("weight", weight, of_gradient=of_gradient)

    def _once(self, what: str, weight: Tensor, *, of_gradient: bool) -> Scaled:
        """A weight in 8 bits, for a product that sums over its columns."""
        make = partial(self._quantised, weight, self.weight_block, WEIGHT)
        if self.kept_weights is None:
            return make()
        return self.kept_weights.once((*self.place, what, of_gradient), make)


def inverse_of(weight: Tensor) -> Tensor:
    """fp32 [groups, blocks of rows, blocks of columns]: the inverse scales of a weight that was
    gathered in 8 bits; one group for a single linear layer."""
    inverse: Tensor | None = getattr(weight, "inverse_scales", None)
    assert inverse is not None, "8-bit weights are read as they were gathered, not in part"
    return inverse


def save_linears(ctx: Any, weights: Sequence[Tensor], kept: Kept) -> None:
    """Save for the backward the weights of linear layers with one input, and the kept input.

    Autograd does not save what comes with weights that were gathered in 8 bits, their scales. The
    weights of one input are all gathered so, or none is.
    """
    ctx.save_for_backward(*weights, *kept)
    ctx.weights = len(weights)
    ctx.scales = tuple(map(inverse_of, weights)) if weights[0].dtype == E4M3 else ()


def saved_linears(ctx: Any) -> tuple[Sequence[Tensor], Kept]:
    """What `save_linears` saved; recomputation replaces weights by its own tensors."""
    saved: Kept = ctx.saved_tensors
    weights = saved[: ctx.weights]
    if ctx.scales:
        for weight, inverse in zip(weights, ctx.scales, strict=True):
            weight.inverse_scales = inverse  # type: ignore[attr-defined]
    return weights, saved[ctx.weights :]


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, products: tuple[Products, ...], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        taken, kept = products[0].input(x)
        ys = outputs(products, taken, weights, (None,) * len(weights))
        save_linears(ctx, weights, kept)
        ctx.products = products
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        products, (weights, kept) = ctx.products, saved_linears(ctx)
        taken = [each.gradient(grad) for each, grad in zip(products, grads, strict=True)]
        grad_x = input_gradients(products, taken, weights) if ctx.needs_input_grad[0] else None
        of_weights = zip(products, taken, strict=True)
        return grad_x, None, *(each.weight_gradient(grad, kept) for each, grad in of_weights)


def _with_biases(products: Iterable[Tensor], biases: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    each = zip(products, biases, strict=True)
    return tuple(y if bias is None else y + bias for y, bias in each)
