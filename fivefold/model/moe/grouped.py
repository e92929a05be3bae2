"""Grouped linear layers: one weight per group of rows, as experts need.

Shapes: E groups, T rows sorted by group, H input features, F output features.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fivefold.mesh.device import uses_gpu_kernels
from fivefold.model.leaves import local
from fivefold.model.products import Kept, Products, add_product, of_one_input, outputs
from fivefold.model.traced import result

GROUPING = (9, 10)
"""Compute capabilities of GPUs with a grouped kernel, by their first number (torch 2.11)."""
ROWS, COLUMNS = 256, 1024
"""Rows that a GPU adds up one by one, beside others, and features of which it has wide copies."""


class GroupedLinear(nn.Module):
    """y = x W_e^T + b_e for the rows of each group e, with W [E, out, in]; uninitialised.

    Attributes:
        products: seam around the products, of the same kind for all linears of one input.
        multiply: seam around the multiplication of one input with several linears.
    """

    bias: nn.Parameter | None

    def __init__(
        self, groups: int, in_features: int, out_features: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(groups, out_features)) if bias else None
        self.products: GroupArithmetic = PlainGroups()
        self.multiply: GroupedMultiplication = plain_multiply

    def forward(
        self,
        x_TH: Tensor,
        rows_E: Tensor,
        weights_T: Tensor | None = None,
        *,
        adds_bias: bool = True,
    ) -> Tensor:
        """[T, in] -> [T, out].

        Args:
            x_TH: rows sorted by group.
            rows_E: int64 number of rows per group, possibly 0.
            weights_T: weight of each row's bias; None: all 1.
            adds_bias: whether to add the bias; its gradient is the same either way.
        """
        (y_TF,) = self.multiply(x_TH, rows_E, self)
        return self.biased(y_TF, rows_E, weights_T, adds_bias=adds_bias)

    def biased(
        self,
        y_TF: Tensor,
        rows_E: Tensor,
        weights_T: Tensor | None = None,
        *,
        adds_bias: bool = True,
    ) -> Tensor:
        """[T, out] with the biases of the rows, if there are any; arguments as in `forward`."""
        if self.bias is None:
            return y_TF
        bias_EF = local(self.bias)
        out_TF: Tensor = _Biased.apply(y_TF, bias_EF, rows_E, weights_T, adds_bias)
        return out_TF


class _Biased(torch.autograd.Function):
    """[T, F] with the bias [E, F] of each row's group, times the row's weight; or without it.

    Saves nothing of the size of the rows, of which autograd would keep one, and has no wide copies
    of all features. The gradient of the bias is summed in at least fp32: a GPU would add rows of
    bf16 one by one in any order, which rounds away all but the first few hundred.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y_TF: Tensor,
        bias_EF: Tensor,
        rows_E: Tensor,
        weights_T: Tensor | None,
        adds_bias: bool,
    ) -> Tensor:
        ctx.save_for_backward(bias_EF, rows_E, weights_T)
        ctx.adds_bias = adds_bias
        if not adds_bias:
            return y_TF.clone()  # FSDP2 ties a backward to it, and warns of a view
        out_TF = _of_rows(bias_EF, rows_E, len(y_TF))
        if weights_T is not None:
            out_TF.mul_(weights_T[:, None])
        return result(out_TF.add_(y_TF))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> tuple[Tensor | None, ...]:
        bias_EF, rows_E, weights_T = ctx.saved_tensors
        grad_EF = grad_T = None
        if ctx.needs_input_grad[1]:
            grad_EF = sums_of_groups(grad_TF, rows_E, weights_T).to(bias_EF.dtype)
        if ctx.needs_input_grad[3] and ctx.adds_bias:
            wide = torch.promote_types(grad_TF.dtype, torch.float32)
            parts = zip(grad_TF.split(COLUMNS, 1), bias_EF.split(COLUMNS, 1), strict=True)
            rows = ((grad, _of_rows(bias, rows_E, len(grad)).to(wide)) for grad, bias in parts)
            each = [wide_TF.mul_(grad).sum(1) for grad, wide_TF in rows]
            grad_T = torch.stack(each).sum(0).to(weights_T.dtype)
        return grad_TF, grad_EF, None, grad_T, None


def _of_rows(bias_EF: Tensor, rows_E: Tensor, rows: int) -> Tensor:
    """[T, F] the bias of each row's group; nothing waits for the device."""
    return bias_EF.repeat_interleave(rows_E, 0, output_size=rows)


def sums_of_groups(x_TF: Tensor, rows_E: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """The sum of the rows of each group, times their weights: [E, F] in at least fp32.

    Groups are cut where `ROWS` divides the number of a row, and their parts added up: so the device
    has much to do at once, however few groups there are. Nothing waits for it.
    """
    wide, ends_E = torch.promote_types(x_TF.dtype, torch.float32), rows_E.cumsum(0)
    cuts = torch.arange(0, len(x_TF), ROWS, device=x_TF.device)
    cuts = torch.cat([cuts, ends_E.new_zeros(1), ends_E]).sort().values
    parts_E = torch.searchsorted(cuts, ends_E, right=True).diff(prepend=ends_E.new_ones(1))

    def added(x: Tensor, lengths: Tensor) -> Tensor:
        return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True)

    def widened(x: Tensor) -> Tensor:
        return x.to(wide) if weights_T is None else x * weights_T[:, None].to(wide)

    each = (added(widened(x), cuts.diff()) for x in x_TF.split(COLUMNS, 1))
    return torch.cat([added(sums, parts_E) for sums in each], 1)


GroupedMultiplication = Callable[..., tuple[Tensor, ...]]
"""(rows [T, H], rows per group, *grouped linears) -> one [T, F] per linear, without biases."""


def plain_multiply(x_TH: Tensor, rows_E: Tensor, *linears: GroupedLinear) -> tuple[Tensor, ...]:
    """Grouped multiplication under autograd; replaced when weight gradients are deferred."""
    weights = [local(linear.weight) for linear in linears]
    ends = linears[0].products.ends(x_TH, rows_E, weights)
    products = of_one_input([linear.products.products(rows_E, ends) for linear in linears])
    return products[0].apply(products, x_TH, weights, (None,) * len(weights))


class GroupArithmetic(Protocol):
    """How groups of rows are multiplied."""

    def ends(self, x_TH: Tensor, rows_E: Tensor, weights: Sequence[Tensor]) -> list[int] | None:
        """The group ends that the host needs before it can multiply such groups; waits for the
        device.

        Args:
            x_TH: rows sorted by group.
            rows_E: number of rows per group.
            weights: weights that will multiply them, [E, F, H] each.
        """

    def products(self, rows_E: Tensor, ends: list[int] | None) -> Products:
        """The products of such groups; the linears save `rows_E` for the backward."""


@dataclass(frozen=True)
class GroupedProducts(Products):
    """The products of linear layers with W [E, F, H], each group of rows with its own.

    Attributes:
        rows_E: rows per group.
        ends: end row of each group; None where the kernel does not need it.
    """

    rows_E: Tensor
    ends: list[int] | None

    @staticmethod
    def apply(
        products: Sequence[Products],
        x_TH: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
    ) -> tuple[Tensor, ...]:
        """[T, H] -> one [T, F] per linear layer, under autograd; biases are added elsewhere."""
        first = products[0]
        assert isinstance(first, GroupedProducts)
        if first.ends is None:
            return outputs(products, (x_TH,), weights, biases)
        rows = x_TH.tensor_split(first.ends)[: len(first.ends)]
        return tuple(
            torch.cat([x @ one.t() for x, one in zip(rows, weight_EFH.unbind(), strict=True)])
            for weight_EFH in weights
        )

    def output(self, x: Kept, weight_EFH: Tensor, *_: Tensor | None) -> Tensor:
        """[T, H] -> [T, F], without a bias."""
        return grouped_linear(x[0], weight_EFH, self.rows_E, self.ends)

    def input_gradient(
        self, grad: Kept, weight_EFH: Tensor, onto_TH: Tensor | None = None, *_: Tensor | None
    ) -> Tensor:
        """[T, F] -> [T, H], added to `onto_TH` if there is one."""
        grad_TH = grouped_linear(grad[0], weight_EFH.transpose(1, 2), self.rows_E, self.ends)
        return grad_TH if onto_TH is None else onto_TH.add_(grad_TH)

    def weight_gradient(self, grad: Kept, kept: Kept, onto_EFH: Tensor | None = None) -> Tensor:
        """[E, F, H], added to `onto_EFH` in place, in its dtype, if there is one."""
        return grouped_weight_gradient(grad[0], kept[0], self.rows_E, self.ends, onto_EFH)

    def write_weight_gradient(self, grad: Kept, kept: Kept, out_EFH: Tensor) -> None:
        """`weight_gradient` into `out_EFH`, in its dtype; what was there does not count."""
        grouped_weight_gradient(grad[0], kept[0], self.rows_E, self.ends, out_EFH, beta=0)


class PlainGroups:
    """The `products` seam of grouped linears in the dtype of their input."""

    def ends(self, x_TH: Tensor, rows_E: Tensor, weights: Sequence[Tensor]) -> list[int] | None:
        """End row of each group; None where the kernel does not need it."""
        return None if has_kernel(x_TH, weights) else group_ends(rows_E)

    def products(self, rows_E: Tensor, ends: list[int] | None) -> GroupedProducts:
        """The products of these groups."""
        return GroupedProducts(rows_E, ends)


def group_ends(rows_E: Tensor) -> list[int]:
    """End row of each group; the host waits for the device."""
    return list(accumulate(rows_E.tolist()))


def copy_groups(each: Iterable[Tensor], out_EFH: Tensor) -> Tensor:
    """Copy the matrices of all groups into one tensor, as they arrive, and return it."""
    for out_FH, one_FH in zip(out_EFH.unbind(), each, strict=True):
        out_FH.copy_(one_FH)
    return out_EFH


def grouped_linear(
    x_TH: Tensor, weight_EFH: Tensor, rows_E: Tensor, ends: list[int] | None
) -> Tensor:
    """x W_e^T per group, without autograd: [T, H] -> [T, F]; `ends` as in `GroupedProducts`."""
    if ends is None:
        return torch._grouped_mm(x_TH, weight_EFH.transpose(1, 2), offs=_ends(rows_E))
    y_TF = x_TH.new_empty(len(x_TH), weight_EFH.shape[1])
    for weight, start, end in zip(weight_EFH, [0, *ends], ends, strict=False):
        torch.mm(x_TH[start:end], weight.t(), out=y_TF[start:end])
    return y_TF


def grouped_weight_gradient(
    grad_TF: Tensor,
    x_TH: Tensor,
    rows_E: Tensor,
    ends: list[int] | None,
    onto_EFH: Tensor | None = None,
    beta: int = 1,
) -> Tensor:
    """Weight gradient [E, F, H], zero for empty groups; `ends` as in `GroupedProducts`.

    Added to `beta` times `onto_EFH` in place, in its dtype, if there is one: by the products
    themselves where there is no kernel for all groups.
    """
    if ends is None:
        grad = torch._grouped_mm(grad_TF.t(), x_TH, offs=_ends(rows_E))
        if leaves_out_empty_groups(x_TH):
            grad.masked_fill_((rows_E == 0)[:, None, None], 0.0)
        if onto_EFH is None:
            return grad
        return onto_EFH.add_(grad) if beta else onto_EFH.copy_(grad)
    if onto_EFH is None:
        onto_EFH, beta = x_TH.new_empty(len(ends), grad_TF.shape[1], x_TH.shape[1]), 0
    for one, start, end in zip(onto_EFH, [0, *ends], ends, strict=False):
        add_product(one, grad_TF[start:end].t(), x_TH[start:end], beta=beta)
    return onto_EFH


def has_kernel(x_TH: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether PyTorch has a grouped kernel: bf16 on a GPU, some rows of a multiple of 16 bytes.

    The rows are also those of the results, whose gradients are multiplied. On other GPUs it would
    multiply group by group, and have the host wait for their ends in each product.
    """
    if not uses_gpu_kernels(x_TH) or x_TH.dtype != torch.bfloat16 or x_TH.shape[0] == 0:
        return False
    if x_TH.is_cuda and torch.cuda.get_device_capability(x_TH.device)[0] not in GROUPING:
        return False
    return all(size % 8 == 0 for weight in weights for size in weight.shape[1:])


def leaves_out_empty_groups(x_TH: Tensor) -> bool:
    """Whether the grouped kernel writes no weight gradient for a group without rows.

    On GPUs of capability 10 what was in its memory stays (pytorch issue 172439).
    """
    return x_TH.is_cuda and torch.cuda.get_device_capability(x_TH.device)[0] == 10


def _ends(rows_E: Tensor) -> Tensor:
    """End row of each group on the device, without synchronising."""
    return rows_E.cumsum(0, dtype=torch.int32)
