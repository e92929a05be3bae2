"""Linear layers that multiply 8-bit floats; their parameters and results keep their dtype.

Each of a layer's three products sums over another dim: the output over H, dX over F, dW over T.
Where a scale belongs to part of that dim, an operand is quantised once for each of the products
that read it. Shapes: T tokens, H input features, F output features, E groups of rows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fivefold.config.training import TrainingConfig
from fivefold.model.fp8 import E4M3, E5M2, RECIPES, Block, Recipe, Scaled, multiply, quantise
from fivefold.model.grouped import group_ends
from fivefold.model.layers import Kept, Linear, Products
from fivefold.model.transformer import Stage


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
    """

    recipe: Recipe
    dtype: torch.dtype
    gradients: torch.dtype = E4M3
    keeps_input: bool = False

    def apply(
        self, x_TH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per weight, under autograd."""
        products: tuple[Tensor, ...] = _Multiplied.apply(x_TH, self, *weights)
        return _with_biases(products, biases)

    def forward(
        self, x_TH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """The results [T, F], and the input for dW: its bits [T, H], and their scales."""
        x = self._quantised(x_TH, self._across, E4M3)
        products = tuple(
            multiply(x, self._weight(weight), self.dtype, fast=True) for weight in weights
        )
        outputs = _with_biases(products, biases)
        if self.keeps_input:
            return outputs, (x_TH,)
        if not self.recipe.reads_both_ways:
            x = self._quantised(x_TH, self._along, E4M3)
        return outputs, (x.bits, x.inverse)

    def gradient(self, grad_TF: Tensor) -> Kept:
        """Its bits and scales, if one pair serves dX and dW."""
        if not self.recipe.reads_both_ways:
            return (grad_TF,)
        grad = self._quantised(grad_TF, self._across, self.gradients)
        return grad.bits, grad.inverse

    def input_gradient(self, grads: Sequence[Kept], weights: Sequence[Tensor]) -> Tensor:
        """The sum over the linear layers, [T, H]."""
        total = None
        for grad, weight_FH in zip(grads, weights, strict=True):
            left = self._read(grad, self._across, self.gradients)
            one_TH = multiply(left, self._weight(weight_FH.t()), self.dtype)
            total = one_TH if total is None else total.add_(one_TH)
        assert total is not None, "no linear layer"
        return total

    def weight_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        """[F, H]."""
        x = self._read(kept, self._along, E4M3)
        return multiply(self._read(grad, self._along, self.gradients).t(), x.t(), self.dtype)

    @property
    def _across(self) -> Block:
        """Blocks of a matrix [T, ...] for a product that sums over its columns."""
        return self.recipe.across, self.recipe.along

    @property
    def _along(self) -> Block:
        """Blocks of a matrix [T, ...] for a product that sums over the tokens."""
        return self.recipe.along, self.recipe.across

    def _quantised(self, x: Tensor, block: Block, dtype: torch.dtype) -> Scaled:
        return quantise(x, block, dtype, powers_of_two=self.recipe.powers_of_two)

    def _read(self, kept: Kept, block: Block, dtype: torch.dtype) -> Scaled:
        """What was kept of a matrix, quantised if it is the matrix itself."""
        if len(kept) > 1:
            return Scaled(kept[0], kept[1], block)
        return self._quantised(kept[0], block, dtype)

    def _weight(self, weight: Tensor) -> Scaled:
        """A weight whose columns a product sums over."""
        return self._quantised(weight, (self.recipe.weight_across, self.recipe.along), E4M3)


@dataclass(frozen=True)
class EightBitGroups(Products):
    """The same for linear layers with W [E, F, H]: each group of rows with its own, as if alone.

    Attributes:
        each: products of a group.
        ends: end row of each group.
    """

    each: EightBit
    ends: list[int]

    def apply(
        self, x_TH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per weight, under autograd; biases are added elsewhere."""
        ys: tuple[Tensor, ...] = _Multiplied.apply(x_TH, self, *weights)
        return ys

    def forward(
        self, x_TH: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[tuple[Tensor, ...], Kept]:
        """The results [T, F], and what each group keeps of its rows."""
        none = (None,) * len(weights)
        groups = zip(self._split(x_TH), zip(*weights, strict=True), strict=True)
        found = [self.each.forward(x, of_one, none) for x, of_one in groups]
        outputs = (torch.cat(ys) for ys in zip(*(ys for ys, _ in found), strict=True))
        return tuple(outputs), tuple(kept for _, of_one in found for kept in of_one)

    def gradient(self, grad_TF: Tensor) -> Kept:
        """What the products of each group take, one after the other."""
        return tuple(kept for grad in self._split(grad_TF) for kept in self.each.gradient(grad))

    def input_gradient(self, grads: Sequence[Kept], weights: Sequence[Tensor]) -> Tensor:
        """The sum over the linear layers, [T, H]."""
        taken = zip(*map(self._groups, grads), strict=True)
        groups = zip(taken, zip(*weights, strict=True), strict=True)
        return torch.cat([self.each.input_gradient(grad, of_one) for grad, of_one in groups])

    def weight_gradient(self, grad: Kept, kept: Kept) -> Tensor:
        """[E, F, H], zero for groups without rows."""
        each = zip(self._groups(grad), self._groups(kept), strict=True)
        return torch.stack([self.each.weight_gradient(taken, x) for taken, x in each])

    def _split(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.tensor_split(self.ends)[: len(self.ends)]

    def _groups(self, kept: Kept) -> list[Kept]:
        """What was kept of all groups, by group."""
        size = len(kept) // len(self.ends)
        return [tuple(kept[at : at + size]) for at in range(0, len(kept), size)]


@dataclass(frozen=True)
class EightBitExperts:
    """The `products` seam of grouped linear layers.

    Attributes:
        each: products of a group.
    """

    each: EightBit

    def __call__(self, x_TH: Tensor, rows_E: Tensor) -> EightBitGroups:
        """The products of these rows; the host waits for their numbers."""
        return EightBitGroups(self.each, group_ends(rows_E))


def eight_bit(training: TrainingConfig, dtype: torch.dtype) -> EightBit | None:
    """The products that --fp8-format and --fp8-recipe ask for; None: those of the dtype."""
    if training.fp8_format is None:
        return None
    gradients = E5M2 if training.fp8_format == "hybrid" else E4M3
    return EightBit(RECIPES[training.fp8_recipe], dtype, gradients)


def install_eight_bit(stage: Stage, products: EightBit, remade: Sequence[str]) -> None:
    """Put products in the seams of every linear layer of a stage's blocks, as Megatron-LM does.

    Routers, gates of shared experts and the output layer keep the dtype.

    Args:
        stage: stage whose parameters may still be on the meta device.
        products: the products.
        remade: modules (Megatron's names) that the backward makes again. Layers that read what is
            discarded keep nothing else of it.
    """
    again = replace(products, keeps_input=True)
    for block in stage.blocks:
        after_norm = again if "layernorm" in remade else products
        for name, linear in block.named_children():
            if isinstance(linear, Linear) and name != "shared_expert_gate":
                linear.multiply = products if name in _NOT_AFTER_THE_NORM else after_norm
    for prediction in stage.predictions:
        prediction.eh_proj.multiply = products
    for mixture in stage.mixtures:
        experts = mixture.experts
        for grouped in experts.into:
            grouped.products = EightBitExperts(products)
        after_act = again if "moe_act" in remade else products
        experts.down_proj.products = EightBitExperts(after_act)


_NOT_AFTER_THE_NORM = frozenset({"o_proj", "down_proj", "q_b_proj", "kv_b_proj"})


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, products: Products, *weights: Tensor) -> tuple[Tensor, ...]:
        outputs, kept = products.forward(x, weights, (None,) * len(weights))
        ctx.save_for_backward(*weights, *kept)
        ctx.products, ctx.count = products, len(weights)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        products, saved = ctx.products, ctx.saved_tensors
        weights, kept = saved[: ctx.count], saved[ctx.count :]
        taken = [products.gradient(grad) for grad in grads]
        grad_x = products.input_gradient(taken, weights) if ctx.needs_input_grad[0] else None
        return grad_x, None, *(products.weight_gradient(grad, kept) for grad in taken)


def _with_biases(products: Iterable[Tensor], biases: Iterable[Tensor | None]) -> tuple[Tensor, ...]:
    each = zip(products, biases, strict=True)
    return tuple(y if bias is None else y + bias for y, bias in each)
