"""The products of linear layers: of an input, of its gradient, and of that of a weight.

Shapes: T tokens, H input features, F output features.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh.device import uses_gpu_kernels

Kept = tuple[Tensor, ...]
"""What a product takes of an operand."""


class Products:
    """The three products of a linear layer with W [F, H], in the dtype of its input.

    An arithmetic converts each operand once: an input for all linear layers that read it (the first
    layer's products do so), a gradient for both products of the backward. The first two products
    may be computed for all tokens at once or in parts, with the same result.

    Attributes:
        keeps_input: whether dW takes the input itself.
    """

    keeps_input: bool = True

    @staticmethod
    def apply(
        products: "Sequence[Products]",
        x_TH: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear layer of an input, under autograd."""
        return outputs(products, (x_TH,), weights, biases)

    def reading_as(self, first: "Products") -> "Products":
        """The same products, for an input that another linear layer's products have already
        read."""
        return self

    def input(self, x_TH: Tensor) -> tuple[Kept, Kept]:
        """The operands for `output` and for `weight_gradient`, made from an input; each begins with
        its rows."""
        return self.taken(x_TH), self.kept(x_TH)

    def taken(self, x_TH: Tensor) -> Kept:
        """The operand of `output` for some of the tokens, one row per token."""
        return (x_TH,)

    def kept(self, x_TH: Tensor) -> Kept:
        """The operands of `weight_gradient`, made from an input; the first has its rows."""
        return (x_TH,)

    def in_parts(self, weight_FH: Tensor, *, of_gradient: bool) -> "Products":
        """The same, for several products of parts of the tokens with this weight.

        Args:
            weight_FH: weight.
            of_gradient: whether they are those of `input_gradient`, or of `output`.
        """
        return self

    def gradient(self, grad_TF: Tensor) -> Kept:
        """The operands of both products of a backward, made from the gradient of a result."""
        return (grad_TF,)

    def output(
        self, x: Kept, weight_FH: Tensor, bias_F: Tensor | None = None, out_TF: Tensor | None = None
    ) -> Tensor:
        """[T, H] -> [T, F], written into `out_TF` if there is one."""
        (x_TH,) = x
        if out_TF is None:
            return F.linear(x_TH, weight_FH, bias_F)
        if bias_F is None:
            return torch.mm(x_TH, weight_FH.t(), out=out_TF)
        return torch.addmm(bias_F, x_TH, weight_FH.t(), out=out_TF)

    def input_gradient(
        self,
        grad: Kept,
        weight_FH: Tensor,
        onto_TH: Tensor | None = None,
        out_TH: Tensor | None = None,
    ) -> Tensor:
        """[T, F] -> [T, H], added to `onto_TH` or written into `out_TH` if there is one."""
        (grad_TF,) = grad
        if onto_TH is not None:
            return onto_TH.addmm_(grad_TF, weight_FH)
        return torch.mm(grad_TF, weight_FH, out=out_TH)

    def weight_gradient(self, grad: Kept, kept: Kept, onto_FH: Tensor | None = None) -> Tensor:
        """[F, H], added to `onto_FH` in place, in its dtype, if there is one."""
        (grad_TF,), (x_TH,) = grad, kept
        return grad_TF.t() @ x_TH if onto_FH is None else add_product(onto_FH, grad_TF.t(), x_TH)

    def write_weight_gradient(self, grad: Kept, kept: Kept, out_FH: Tensor) -> None:
        """`weight_gradient` into `out_FH`, in its dtype; what was there does not count."""
        if type(self) is Products:
            (grad_TF,), (x_TH,) = grad, kept
            add_product(out_FH, grad_TF.t(), x_TH, beta=0)
        else:
            out_FH.copy_(self.weight_gradient(grad, kept))


def of_one_input(products: Sequence[Products]) -> Sequence[Products]:
    """The products of linear layers that share an input, which all read it as the first does."""
    if len(products) == 1:
        return products
    first = products[0]
    return [first, *[each.reading_as(first) for each in products[1:]]]


def outputs(
    products: Sequence[Products],
    x: Kept,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """One [T, F] per linear layer of an input."""
    each = zip(products, weights, biases, strict=True)
    return tuple([product.output(x, weight_FH, bias_F) for product, weight_FH, bias_F in each])


def input_gradients(
    products: Sequence[Products], grads: Sequence[Kept], weights: Sequence[Tensor]
) -> Tensor:
    """The sum over the linear layers of an input, [T, H]."""
    (own, first, weight), *others = zip(products, grads, weights, strict=True)
    total_TH = own.input_gradient(first, weight)
    for product, grad, weight_FH in others:
        product.input_gradient(grad, weight_FH, onto_TH=total_TH)
    return total_TH


def add_product(onto: Tensor, left: Tensor, right: Tensor, *, beta: int = 1) -> Tensor:
    """Add a product to a sum of the same or a wider dtype, in one kernel except for narrow types on
    CPUs.

    With a `beta` of 0 the product takes the place of the sum.
    """
    if onto.dtype == left.dtype:
        return onto.addmm_(left, right, beta=beta)
    if not uses_gpu_kernels(left):
        return onto.add_(left @ right) if beta else onto.copy_(left @ right)
    add: Any = torch.ops.aten.addmm.dtype_out
    added: Tensor = add(onto, left, right, onto.dtype, beta=beta, out=onto)
    return added
