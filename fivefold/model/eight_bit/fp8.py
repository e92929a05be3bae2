"""Matrices in 8-bit floats with scales, and their products: by kernels and in plain code.

A recipe says which elements of an operand share a scale. Quantising gives the same bits on every
device, on a GPU by kernels of ours (`model.kernels.quantise`). What differs is how a product of
quantised operands is summed: GPUs that multiply 8-bit floats do it with `torch._scaled_mm`,
everything else multiplies what the bits stand for (the twin).

Shapes: T tokens, F output features, H input features; M, N, K rows, columns and depth of a product.
"""

from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.mesh.device import runs_triton, without_waiting
from fivefold.model.eight_bit.rules import ADA, BLACKWELL

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
OF_GRADIENTS = MappingProxyType({"hybrid": E5M2, "e4m3": E4M3})
"""The type of gradients, by the value of --fp8-format."""
TINY = 1e-30
"""Smallest largest element for which a scale is made, so that zeros get a finite scale."""
MX = 32
"""Elements of a block of mxfp8."""
_MULTIPLE = 16  # kernels need operand dims that are multiples of this
_EXPONENT = 0x7F800000  # bits of an fp32
_BY_TILES = torch.bfloat16, torch.float16, torch.float32  # types that kernels of ours quantise

Block = tuple[int | None, int | None]
"""Rows and columns that share a scale; None: all of them."""


@dataclass(frozen=True)
class Recipe:
    """Which elements share a scale.

    Attributes:
        along: elements of the dim that a product sums over; None: all.
        across: elements of the other dim of an input or a gradient.
        weight_across: elements of the other dim of a weight.
        powers_of_two: whether scales are rounded down to powers of two, which change no mantissa.
        exponents: whether they are kept as 8-bit exponents (E8M0) instead of fp32.
    """

    along: int | None
    across: int | None
    weight_across: int | None
    powers_of_two: bool
    exponents: bool = False

    @property
    def reads_both_ways(self) -> bool:
        """Whether one quantised tensor serves products over its rows and over its columns."""
        return self.along == self.across


RECIPES = {
    "tensorwise": Recipe(None, None, None, powers_of_two=False),
    "rowwise": Recipe(None, 1, 1, powers_of_two=True),
    "blockwise": Recipe(128, 1, 128, powers_of_two=True),
    "mxfp8": Recipe(MX, 1, 1, powers_of_two=True, exponents=True),
}
"""By the value of --fp8-recipe. tensorwise is Transformer Engine's Float8CurrentScaling, rowwise
that of torchao, blockwise DeepSeek-V3's (2024, section 3.3), mxfp8 the Open Compute Project's
(Microscaling Formats v1.0, 2023), scaled such that nothing overflows (Mishra et al. 2025). delayed
has the blocks of tensorwise, and scales of `model.eight_bit.delayed`."""

EACH_ELEMENT = Recipe(1, 1, 1, powers_of_two=True)
"""A scale for every element, which no cut of a matrix changes: what `verify` compares with."""


@dataclass(frozen=True)
class Scaled:
    """A matrix in 8 bits.

    Attributes:
        bits: [M, K] 8-bit floats.
        inverse: fp32 or E8M0 [blocks of rows, blocks of columns], what the elements of a block
            stand for multiples of.
        block: rows and columns of a block; the last one in a dim may be smaller.
    """

    bits: Tensor
    inverse: Tensor
    block: Block

    def t(self) -> "Scaled":
        """Its transpose, a view."""
        return Scaled(self.bits.t(), self.inverse.t(), (self.block[1], self.block[0]))

    def by_rows(self, ends: list[int]) -> list["Scaled"]:
        """Groups of rows with scales of their own, by the end row of each."""
        assert self.block[0] == 1, "rows share scales"
        parts = (x.tensor_split(ends)[: len(ends)] for x in (self.bits, self.inverse))
        return [Scaled(bits, inverse, self.block) for bits, inverse in zip(*parts, strict=True)]

    def wide(self, dtype: torch.dtype) -> Tensor:
        """[M, K] in `dtype`, of at least 32 bits: the values that the bits represent."""
        scale = self.inverse.to(dtype)
        for dim, (size, each) in enumerate(zip(self.bits.shape, self.block, strict=True)):
            if each is not None and each > 1:
                scale = scale.repeat_interleave(each, dim).narrow(dim, 0, size)
        return self.bits.to(dtype) * scale


def quantise(
    x_MK: Tensor,
    block: Block,
    dtype: torch.dtype,
    *,
    powers_of_two: bool = False,
    exponents: bool = False,
) -> Scaled:
    """A matrix in 8 bits, with the scale of each block such that its largest element just fits.

    Args:
        x_MK: matrix; empty dims are allowed.
        block: rows and columns of a block.
        dtype: 8-bit type. Elements are rounded to nearest, ties to even. A block with an element
            that is not finite becomes NaN where that element is.
        powers_of_two: whether to round scales down to powers of two.
        exponents: whether to keep these as E8M0, in which infinity is NaN, too.
    """
    if _by_tiles(x_MK):
        from fivefold.model.kernels import quantise as kernels

        if kernels.fits(block):
            along = block[1] == 1 != block[0]  # the product then sums over rows
            how = {"powers_of_two": powers_of_two, "by_columns": along}
            bits, inverse = kernels.quantise(x_MK, block, dtype, **how)
            return Scaled(bits, inverse.to(E8M0) if exponents else inverse, block)
    rows, columns = x_MK.shape
    m, k = (each or max(size, 1) for each, size in zip(block, x_MK.shape, strict=True))
    padding = -columns % k, -rows % m
    padded = F.pad(x_MK, (0, padding[0], 0, padding[1])) if any(padding) else x_MK
    shape = padded.shape[0] // m, m, padded.shape[1] // k, k
    blocks = padded.reshape(shape)
    scale = scales(largest(blocks), dtype, powers_of_two=powers_of_two)
    bits = narrowed(blocks, scale[:, None, :, None], dtype).reshape(padded.shape)
    if any(padding):  # a copy, so that the padding is not kept with it
        bits = bits[:rows, :columns].clone(memory_format=torch.contiguous_format)
    inverse = over(1.0, scale)
    return Scaled(bits, inverse.to(E8M0) if exponents else inverse, block)


def narrowed_and_largest(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits by a known scale ([1, 1] in fp32), and its largest magnitude, shaped like
    `scale`."""
    if _by_tiles(x_MK):
        from fivefold.model.kernels import quantise as kernels

        return kernels.narrowed(x_MK, scale, dtype)
    return narrowed(x_MK, scale, dtype), largest(x_MK[None, :, None, :])


def _by_tiles(x_MK: Tensor) -> bool:
    """Whether our kernels quantise it; Triton has the 8-bit types of Ada and later GPUs."""
    if not (x_MK.dtype in _BY_TILES and all(x_MK.shape) and runs_triton(x_MK)):
        return False
    return not x_MK.is_cuda or torch.cuda.get_device_capability(x_MK.device) >= ADA


def narrowed(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements times their scales, rounded to an 8-bit type."""
    limit = torch.finfo(dtype).max
    return (x * scale).clamp_(-limit, limit).to(dtype)


def largest(blocks: Tensor) -> Tensor:
    """The largest magnitude of each block in fp32: [blocks, m, blocks, k] -> [blocks, blocks]."""
    if not blocks.numel():
        return blocks.new_zeros(blocks.shape[0], blocks.shape[2], dtype=torch.float32)
    return torch.linalg.vector_norm(blocks, inf, dim=(1, 3)).float()


def scales(amax: Tensor, dtype: torch.dtype, *, powers_of_two: bool) -> Tensor:
    """The fp32 factor that maps each largest element to the largest number of a type."""
    scale = over(torch.finfo(dtype).max, amax.clamp(min=TINY))
    if not powers_of_two:
        return scale
    rounded = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    return torch.where(scale.isnan(), scale, rounded)


def over(number: float, x: Tensor) -> Tensor:
    """A number divided by each element, rounded once: Python's / multiplies by the reciprocal."""
    return torch.div(x.new_full((), number), x)


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a b^T of [M, K] and [N, K], summed in at least fp32: [M, N] in `dtype`.

    Args:
        a: left operand.
        b: right operand, transposed.
        dtype: type of the result.
        fast: whether sums may keep fewer bits on the way, as Hopper's tensor cores like to.
    """
    if a.bits.is_cuda and dtype == torch.bfloat16 and _has_kernel(a, b):
        return by_kernel(a, b, fast=fast)
    wide = torch.promote_types(dtype, torch.float32)
    product = a.wide(wide) @ b.wide(wide).t()
    # A copy, since torch 2.11 compiles what `to` returns unchanged as if it needed no gradient.
    return product if wide == dtype else product.to(dtype)


def has_some_kernel(a: Scaled, b: Scaled) -> bool:
    """Whether some GPU multiplies these types with these scales; block scales exist for E4M3
    only."""
    return a.block[1] is None or a.bits.dtype == b.bits.dtype == E4M3


def _has_kernel(a: Scaled, b: Scaled) -> bool:
    """Whether this GPU multiplies 8-bit floats, with scales of such blocks."""
    capability = torch.cuda.get_device_capability(a.bits.device)
    if not (all((*a.bits.shape, *b.bits.shape)) and has_some_kernel(a, b)):
        return False
    if a.block == (None, None):
        return capability >= ADA
    if a.block[1] is None:
        return capability[0] in (9, 10)  # others would call cuBLAS, which lacks these products
    if a.block[1] == MX:
        return capability >= BLACKWELL
    return capability == (9, 0) and a.block[1] == 128


def by_kernel(a: Scaled, b: Scaled, *, fast: bool) -> Tensor:
    """`multiply` in bf16 by PyTorch's kernel, with operands padded with zeros to the sizes that it
    needs."""
    left, right = _aligned(a), _aligned(b)
    right_scale = _laid_out(right)
    operands = left.bits, right.bits.t(), _laid_out(left)
    kinds = _KINDS[left.block].value, _KINDS[right.block].value
    product = _product if not torch.compiler.is_compiling() else _traced_product
    made = product(
        *operands,
        right_scale.t() if right.block == (1, None) else right_scale,
        *kinds,
        swizzled=a.block[1] == MX,
        fast=fast and a.block[1] is None,
    )
    # NCCL sends no tensor with gaps, and ranks sum these products.
    return made[: len(a.bits), : len(b.bits)].contiguous()


def _product(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    left_kind: int,
    right_kind: int,
    swizzled: bool,
    fast: bool,
) -> Tensor:
    swizzle = F.SwizzleType.SWIZZLE_32_4_4 if swizzled else F.SwizzleType.NO_SWIZZLE
    return F.scaled_mm(
        left,
        right,
        scale_a=left_scale,
        scale_recipe_a=F.ScalingType(left_kind),
        scale_b=right_scale,
        scale_recipe_b=F.ScalingType(right_kind),
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


_traced_product = torch.library.custom_op(
    "fivefold::scaled_product", _product, mutates_args=(), device_types="cuda"
)  # torch 2.11's own operation breaks the graph of a compiled layer


@_traced_product.register_fake
def _(left: Tensor, right: Tensor, *_: Any, **__: Any) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.bfloat16)


def multiplies_groups(a: Scaled, weight_ENK: Tensor, dtype: torch.dtype) -> bool:
    """Whether this GPU multiplies groups of rows with a weight each in one call."""
    if not (a.bits.is_cuda and dtype == torch.bfloat16 and a.block == (1, None)):
        return False
    if a.bits.dtype != E4M3:  # the kernel takes no gradients in E5M2
        return False
    fits = len(a.bits) and not any(size % _MULTIPLE for size in weight_ENK.shape[1:])
    return bool(fits) and torch.cuda.get_device_capability(a.bits.device) == (9, 0)


def multiply_groups(a: Scaled, b: Scaled, ends: list[int], *, fast: bool) -> Tensor:
    """a_e b_e^T of the rows of each group, in one call: [T, N] bf16.

    Args:
        a: [T, K], rows sorted by group.
        b: [E * N, K], the weights of all groups.
        ends: end row of each group.
        fast: as in `multiply`.
    """
    weights_ENK = b.bits.view(len(ends), -1, b.bits.shape[1])
    product: Tensor = torch._scaled_grouped_mm(
        a.bits,
        weights_ENK.transpose(1, 2),
        a.inverse.flatten(),
        b.inverse.view(len(ends), -1),
        offs=without_waiting(torch.tensor(ends, dtype=torch.int32), a.bits.device),
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product


_KINDS = {
    (None, None): F.ScalingType.TensorWise,
    (1, None): F.ScalingType.RowWise,
    (1, 128): F.ScalingType.BlockWise1x128,
    (128, 128): F.ScalingType.BlockWise128x128,
    (1, MX): F.ScalingType.BlockWise1x32,
}


def _aligned(x: Scaled) -> Scaled:
    """The matrix with rows and depth padded to multiples that the kernel needs, and contiguous
    depth."""
    each = _MULTIPLE, MX if x.block[1] == MX else _MULTIPLE
    rows, depth = (-size % multiple for size, multiple in zip(x.bits.shape, each, strict=True))
    bits = _by_rows(x.bits)
    if rows or depth:
        bits = F.pad(bits.view(torch.uint8), (0, depth, 0, rows)).view(x.bits.dtype)
    inverse = x.inverse
    if x.block[0] == 1 and inverse.dtype != E8M0:  # others are padded as they are laid out
        inverse = F.pad(inverse, (0, 0, 0, rows), value=1.0)
    return Scaled(bits, inverse, x.block)


def _by_rows(bits_MK: Tensor) -> Tensor:
    """The same, with contiguous rows."""
    if bits_MK.is_contiguous() or not runs_triton(bits_MK):
        return bits_MK.contiguous()
    from fivefold.model.kernels import quantise as kernels

    return kernels.by_rows(bits_MK)


def _laid_out(x: Scaled) -> Tensor:
    """The scales in cuBLAS's layout: scales of one depth contiguous for 1 x 128, columns padded to
    a multiple of 4 for 128 x 128, tiles for 1 x 32."""
    if x.block == (1, 128):
        return _by_columns(x.inverse)
    if x.block == (128, 128):
        return _by_columns(F.pad(x.inverse, (0, -x.inverse.shape[1] % 4)).t())
    if x.block == (1, MX):
        return tiled_scales(x.inverse)
    return x.inverse.contiguous()


def _by_columns(x_MK: Tensor) -> Tensor:
    """The same with strides (1, M), which PyTorch compares even if a dim has one element, where
    `contiguous` leaves any."""
    rows, columns = x_MK.shape
    return x_MK.t().reshape(-1).view(columns, rows).t()


def tiled_scales(inverse: Tensor) -> Tensor:
    """E8M0 [M, K] in the order in which Blackwell's tensor cores read them, flat.

    A tile is 128 rows of 4 scales; within it, row r lies at 16 (r mod 32) + 4 (r // 32) (cuBLAS,
    "1D block scaling factors layout"). Rows and columns that are not there are 2 ** -127.
    """
    bits = inverse.contiguous().view(torch.uint8)
    rows, columns = bits.shape
    bits = F.pad(bits, (0, -columns % 4, 0, -rows % 128))
    tiles = bits.view(len(bits) // 128, 4, 32, bits.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(E8M0)
