"""How tensor-parallel ranks exchange tokens around their linears.

Every exchange gathers tokens before a product and sums products after it; each is the backward of
the other (f and g of Megatron-LM, see `tensor.linear`). Shapes: T tokens, t = T / tp, H and F
features.
"""

import platform
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # registers the operations in torch 2.11
from torch import Tensor

from fivefold.mesh.collectives import (
    Pending,
    all_reduce,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from fivefold.mesh.parts import Arriving, start_sum_of_parts
from fivefold.model.products import Kept, Products


class Factor(NamedTuple):
    """What tokens are multiplied by: x W^T + b in a forward, dY W for an input's gradient."""

    products: Products
    weight_FH: Tensor
    bias_F: Tensor | None = None
    of_gradient: bool = False

    @property
    def features(self) -> int:
        """Features of the result."""
        return self.weight_FH.shape[int(self.of_gradient)]

    @property
    def plain(self) -> Tensor | None:
        """The matrix that multiplies the tokens, if the product is nothing else."""
        if type(self.products) is not Products:
            return None
        return self.weight_FH if self.of_gradient else self.weight_FH.t()

    def read(self, x: Tensor) -> tuple[Kept, Kept]:
        """The forms of all tokens [T, F or H] that this product and dW need."""
        if not self.of_gradient:
            return self.products.input(x)
        grad = self.products.gradient(x)
        return grad, grad

    def taken(self, x: Tensor) -> Kept:
        """The form of some of the tokens, [T, F or H], that this product needs."""
        return self.products.gradient(x) if self.of_gradient else self.products.taken(x)

    def kept(self, x: Tensor) -> Kept:
        """The form of all tokens [T, F or H] that dW needs."""
        return self.products.gradient(x) if self.of_gradient else self.products.kept(x)

    @property
    def in_parts(self) -> "Factor":
        """The same factor for products of parts of the tokens."""
        products = self.products.in_parts(self.weight_FH, of_gradient=self.of_gradient)
        return self._replace(products=products)

    def times(self, taken: Kept, out: Tensor | None = None) -> Tensor:
        """The product of some tokens, [T, H] or [T, F], written into `out` if given."""
        if self.of_gradient:
            return self.products.input_gradient(taken, self.weight_FH, out_TH=out)
        return self.products.output(taken, self.weight_FH, self.bias_F, out)


Term = tuple[Kept, Factor]
"""The form of all tokens that a product needs, and its factor."""


def _sum_of(terms: Sequence[Term]) -> Tensor:
    """This rank's summands; several terms are input gradients."""
    (taken, factor), *others = terms
    total = factor.times(taken)
    for taken, factor in others:
        factor.products.input_gradient(taken, factor.weight_FH, onto_TH=total)
    return total


def _of_rows(terms: Sequence[Term], rows: slice) -> list[Term]:
    """Terms of some of the tokens; a scale shared by all tokens applies to these, too."""
    tokens = len(terms[0][0][0])
    return [
        (tuple(x[rows] if len(x) == tokens else x for x in taken), factor)
        for taken, factor in terms
    ]


@dataclass(frozen=True)
class Exchange:
    """Every rank has all tokens: nothing is gathered, and sums are all-reduces.

    Attributes:
        group: tensor-parallel group; None: one rank.
    """

    group: dist.ProcessGroup | None

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank has only its share of the tokens between linears."""
        return False

    def start_gather(self, x: Tensor) -> Pending:
        """[t, H] of each rank -> [T, H]."""
        return Pending([], lambda: x)

    def own(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [t, H], a copy unless it is the same: the rows of this rank's tokens."""
        return x_TH

    def gather_products(self, x: Tensor, factors: Sequence[Factor]) -> tuple[Kept, list[Tensor]]:
        """[t, H] of each rank -> the form of [T, H] that dW needs, and its products, a [T, F] per
        factor."""
        taken, kept = factors[0].read(self.start_gather(x).wait())
        return kept, [factor.times(taken) for factor in factors]

    def start_sum(self, terms: Sequence[Term]) -> Pending:
        """Sum products over the terms and the ranks: [T, F] each -> [t, H]."""
        return start_all_reduce(_sum_of(terms), self.group)


@dataclass(frozen=True)
class SplitTokens(Exchange):
    """Sequence parallelism: each rank has a range of the tokens (Korthikanti et al. 2022)."""

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank has only its share of the tokens between linears."""
        return True

    def start_gather(self, x: Tensor) -> Pending:
        """[t, H] of each rank -> [T, H]."""
        return start_all_gather(x, self.group)

    def own(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [t, H], a copy: the rows of this rank's tokens."""
        assert self.group is not None
        return x_TH.chunk(self.group.size())[self.group.rank()].clone(
            memory_format=torch.contiguous_format  # 8 bits may lie by columns
        )

    def start_sum(self, terms: Sequence[Term]) -> Pending:
        """Sum products over the terms and the ranks: [T, F] each -> [t, H]."""
        return start_reduce_scatter(_sum_of(terms), self.group)


@dataclass(frozen=True)
class TokensInParts(SplitTokens):
    """Multiplies each rank's tokens when they arrive, and sends them as soon as they are
    multiplied.

    The idea of Wang et al. (Overlap Communication with Dependent Computation via Decomposition,
    2023), with the exchanges of `mesh.parts`. Parts are those of the ranks, so each row of a
    product has the same terms as otherwise, and sums run in the order of the ranks.
    """

    group: dist.ProcessGroup

    by = "messages"
    """The means by which parts are sent."""

    def gather_products(self, x: Tensor, factors: Sequence[Factor]) -> tuple[Kept, list[Tensor]]:
        """[t, H] of each rank -> the form of [T, H] that dW needs, and its products, a [T, F] per
        factor."""
        arriving = Arriving(x, self.group)
        products = [x.new_empty(len(arriving.whole), factor.features) for factor in factors]
        each = [factor.in_parts for factor in factors]
        for rows in arriving:
            taken = factors[0].taken(arriving.whole[rows])
            for factor, product in zip(each, products, strict=True):
                factor.times(taken, product[rows])
        return factors[0].kept(arriving.whole), products

    def start_sum(self, terms: Sequence[Term]) -> Pending:
        """Sum products over the terms and the ranks: [T, F] each -> [t, H]."""
        length = len(terms[0][0][0])
        terms = [(taken, factor.in_parts) for taken, factor in terms]
        return start_sum_of_parts(lambda rows: _sum_of(_of_rows(terms, rows)), length, self.group)


@dataclass(frozen=True)
class TokensInSharedMemory(TokensInParts):
    """As in parts, by PyTorch's symmetric memory: GPUs of a host copy from each other's memory.

    A copy takes none of the multiprocessors that multiply. Sums of products with several weights
    and products in another arithmetic are exchanged as messages.
    """

    by = "symmetric memory"

    def gather_products(self, x: Tensor, factors: Sequence[Factor]) -> tuple[Kept, list[Tensor]]:
        """[t, H] of each rank -> the form of [T, H] that dW needs, and its products, a [T, F] per
        factor."""
        plain = [factor.plain for factor in factors]
        if any(matrix is None for matrix in plain):
            return super().gather_products(x, factors)
        x_TH, products = torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), plain, 0, self.group.group_name, return_A=True
        )
        for factor, product in zip(factors, products, strict=True):
            if factor.bias_F is not None:
                product += factor.bias_F
        return (x_TH,), products

    def start_sum(self, terms: Sequence[Term]) -> Pending:
        """Sum products over the terms and the ranks: [T, F] each -> [t, H]."""
        (taken, factor), *others = terms
        matrix = factor.plain
        if others or matrix is None or factor.bias_F is not None:
            return super().start_sum(terms)
        total: Any = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            taken[0].contiguous(), matrix, "sum", 0, self.group.group_name
        )
        return Pending([], lambda: total)


def exchange_of(
    group: dist.ProcessGroup | None, *, sequence_parallel: bool, overlaps: bool = False
) -> Exchange:
    """The exchange that settings ask for.

    Args:
        group: tensor-parallel group; None: one rank.
        sequence_parallel: whether each rank has its share of the tokens.
        overlaps: whether their messages travel while products are computed from other parts.
    """
    if group is None or not sequence_parallel:
        return Exchange(group)
    if not overlaps:
        return SplitTokens(group)
    return TokensInSharedMemory(group) if _shares_memory(group) else TokensInParts(group)


def _shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group can read each other's GPU memory; the same result on all."""
    if "nccl" not in dist.get_backend_config(group):
        return False
    device, rank, size = torch.cuda.current_device(), group.rank(), group.size()
    host = zlib.crc32(f"{platform.node()} {uuid.getnode()}".encode())
    places = torch.zeros(size, 2, dtype=torch.int64, device="cuda")
    places[rank] = torch.tensor([host, device])
    hosts, devices = all_reduce(places, group).t().tolist()
    reads = len(set(hosts)) == 1 and len(set(devices)) == size
    others = [other for other in devices if other != device] if reads else []
    reads = reads and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    missing = torch.tensor([not reads], dtype=torch.int64, device="cuda")
    return not all_reduce(missing, group).item()
