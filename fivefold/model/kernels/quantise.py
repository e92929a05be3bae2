"""Triton kernels that convert matrices to 8-bit floats with scales, bit-identical to
`model.eight_bit.fp8`.

Imported only where they run, since Triton is. They are proven without a GPU by Triton's
interpreter (`TRITON_INTERPRET=1`).

A program takes a tile of a matrix. Where blocks that share a scale lie within it, one kernel finds
their largest elements, scales and casts; blocks of a whole row, column or matrix take a first
kernel, in which the tiles' largest elements are compared. Shapes: M rows, K columns.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch
from fivefold.model.eight_bit.fp8 import TINY, Block

TILE = 128
"""Rows and columns of a tile: a multiple of the blocks that it holds."""
TINY_BITS = tl.constexpr(int(torch.tensor(TINY, device="cpu").view(torch.int32)))
"""The bits of `TINY` in fp32."""


def fits(block: Block) -> bool:
    """Whether tiles are made of such blocks, or blocks of tiles."""
    return all(each is None or TILE % each == 0 for each in block)


def quantise(
    x_MK: Tensor, block: Block, dtype: torch.dtype, *, powers_of_two: bool, by_columns: bool
) -> tuple[Tensor, Tensor]:
    """Bits [M, K], and inverse scales in fp32 [blocks of rows, blocks of columns].

    Args:
        x_MK: matrix of bf16, fp16 or fp32, with any strides; no dim may be empty.
        block: rows and columns that share a scale; None: all.
        dtype: 8-bit type.
        powers_of_two: whether to round scales down to powers of two.
        by_columns: whether to lay the bits out column by column.
    """
    bits = _empty_bits(x_MK, dtype, by_columns)
    counts = [1 if e is None else -(-size // e) for e, size in zip(block, x_MK.shape, strict=True)]
    inverse = torch.empty(counts, dtype=torch.float32, device=x_MK.device)
    found = None
    if None in block:
        found = torch.zeros(counts, dtype=torch.int32, device=x_MK.device)
        rows, columns = _sizes(block)
        arguments = *_shape(x_MK), found, counts[1], rows, columns
        launch(_largest, _grid(x_MK), x_MK, *arguments, **_tile(block))
    _cast_blocks(x_MK, bits, inverse, found, block, powers_of_two)
    return bits, inverse


def _cast_blocks(
    x: Tensor,
    bits: Tensor,
    inverse: Tensor,
    found: Tensor | None,
    block: Block,
    powers_of_two: bool,
) -> None:
    rows, columns = _sizes(block)
    operands = x, *_shape(x), bits, bits.stride(0), bits.stride(1)
    scales = inverse if found is None else found, inverse, inverse.shape[1]
    launch(
        _cast,
        _grid(x),
        *operands,
        *scales,
        limit=torch.finfo(bits.dtype).max,
        rows_each=rows,
        columns_each=columns,
        known=found is not None,
        powers=powers_of_two,
        **_tile(block),
    )


def narrowed(x_MK: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Bits [M, K] of elements times a known scale, and their largest element, fp32 [1, 1].

    Args:
        x_MK: as in `quantise`.
        scale: fp32, of one element.
        dtype: 8-bit type.
    """
    bits = _empty_bits(x_MK, dtype, False)
    found = torch.zeros(1, 1, dtype=torch.int32, device=x_MK.device)
    operands = x_MK, *_shape(x_MK), bits, bits.stride(0), bits.stride(1), scale, found
    launch(
        _narrow,
        _grid(x_MK),
        *operands,
        limit=torch.finfo(dtype).max,
        tile=TILE,
        num_warps=8,
    )
    return bits, found.view(torch.float32)


def by_rows(bits_MK: Tensor) -> Tensor:
    """The same 8-bit numbers with contiguous rows, copied from a matrix with contiguous columns."""
    taken = bits_MK.view(torch.uint8)
    laid_out = torch.empty(taken.shape, dtype=torch.uint8, device=taken.device)
    grid = triton.cdiv(taken.shape[1], TILE), triton.cdiv(taken.shape[0], TILE)
    launch(_copy, grid, taken, *_shape(taken), laid_out, tile=TILE, num_warps=8)
    return laid_out.view(bits_MK.dtype)


def _empty_bits(x: Tensor, dtype: torch.dtype, by_columns: bool) -> Tensor:
    if by_columns:
        return torch.empty(x.shape[::-1], dtype=dtype, device=x.device).t()
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _sizes(block: Block) -> tuple[int, int]:
    """Rows and columns of a block within a tile."""
    rows, columns = block
    return rows or TILE, columns or TILE


def _shape(x: Tensor) -> tuple[int, int, int, int]:
    return *x.shape, *x.stride()


def _grid(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[1], TILE), triton.cdiv(x.shape[0], TILE)


def _tile(block: Block) -> dict[str, Any]:
    """Whether all rows and all columns share a scale, and the size of programs."""
    return {
        "all_rows": block[0] is None,
        "all_columns": block[1] is None,
        "tile": TILE,
        "num_warps": 8,
    }


@triton.jit
def _load(x, rows, columns, row_step, column_step, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """A program's tile, zeros outside, with its places and which of them are inside."""
    row = tl.program_id(1).to(tl.int64) * tile + tl.arange(0, tile)[:, None]
    column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)[None, :]
    inside = (row < rows) & (column < columns)
    taken = tl.load(x + row * row_step + column * column_step, mask=inside, other=0)
    return taken, row, column, inside


@triton.jit
def _magnitude(x):  # type: ignore[no-untyped-def]
    """Bits of |x| in fp32, in whose order NaN is the largest of all."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest_of(  # type: ignore[no-untyped-def]
    bits, rows_each: tl.constexpr, columns_each: tl.constexpr, tile: tl.constexpr
):
    """The maximum of each block of a tile: [tile / rows_each, tile / columns_each]."""
    if rows_each == tile:
        bits = tl.max(bits, 0, keep_dims=True)
    elif rows_each > 1:
        bits = tl.max(tl.reshape(bits, (tile // rows_each, rows_each, tile)), 1)
    if columns_each == tile:
        bits = tl.max(bits, 1, keep_dims=True)
    elif columns_each > 1:
        parts: tl.constexpr = (tile // rows_each, tile // columns_each, columns_each)
        bits = tl.max(tl.reshape(bits, parts), 2)
    return bits


@triton.jit
def _spread(  # type: ignore[no-untyped-def]
    blocks, rows_each: tl.constexpr, columns_each: tl.constexpr, tile: tl.constexpr
):
    """For each element of a tile the value of its block; one row or column stands for all."""
    across: tl.constexpr = tile // columns_each
    if rows_each > 1 and rows_each < tile:
        parts: tl.constexpr = (tile // rows_each, rows_each, across)
        blocks = tl.reshape(tl.broadcast_to(blocks[:, None, :], parts), (tile, across))
    down: tl.constexpr = 1 if rows_each == tile else tile
    if columns_each > 1 and columns_each < tile:
        pieces: tl.constexpr = (down, across, columns_each)
        blocks = tl.reshape(tl.broadcast_to(blocks[:, :, None], pieces), (down, tile))
    return blocks


@triton.jit
def _places(  # type: ignore[no-untyped-def]
    rows,
    columns,
    across,
    rows_each: tl.constexpr,
    columns_each: tl.constexpr,
    all_rows: tl.constexpr,
    all_columns: tl.constexpr,
    tile: tl.constexpr,
):
    """Where the blocks of a tile are among all, and which of them are inside."""
    row = tl.arange(0, tile // rows_each)[:, None]
    column = tl.arange(0, tile // columns_each)[None, :]
    if not all_rows:
        row += tl.program_id(1) * (tile // rows_each)
    if not all_columns:
        column += tl.program_id(0) * (tile // columns_each)
    inside = (row * rows_each < rows) & (column * columns_each < columns)
    return row.to(tl.int64) * across + column, inside


@triton.jit
def _largest(  # type: ignore[no-untyped-def]
    x,
    rows,
    columns,
    row_step,
    column_step,
    found,
    across,
    rows_each: tl.constexpr,
    columns_each: tl.constexpr,
    all_rows: tl.constexpr,
    all_columns: tl.constexpr,
    tile: tl.constexpr,
):
    """Bits of the largest magnitude of each block, which was 0, in `across` columns."""
    taken, _, _, _ = _load(x, rows, columns, row_step, column_step, tile)
    bits = _largest_of(_magnitude(taken), rows_each, columns_each, tile)
    place, inside = _places(
        rows, columns, across, rows_each, columns_each, all_rows, all_columns, tile
    )
    tl.atomic_max(found + place, bits, mask=inside, sem="relaxed")


@triton.jit
def _narrow_to(y, bits, place, inside, limit: tl.constexpr):  # type: ignore[no-untyped-def]
    """Clamp to [-limit, limit], cast and store; NaN stays NaN."""
    fitting = tl.minimum(tl.maximum(y, -limit), limit)
    y = tl.where(y != y, y, fitting)
    tl.store(bits + place, y.to(bits.dtype.element_ty), mask=inside)


@triton.jit
def _cast(  # type: ignore[no-untyped-def]
    x,
    rows,
    columns,
    row_step,
    column_step,
    bits,
    bits_row_step,
    bits_column_step,
    found,
    inverse,
    across,
    limit: tl.constexpr,
    rows_each: tl.constexpr,
    columns_each: tl.constexpr,
    known: tl.constexpr,
    powers: tl.constexpr,
    all_rows: tl.constexpr,
    all_columns: tl.constexpr,
    tile: tl.constexpr,
):
    """A tile's bits and its blocks' inverse scales; `known`: their largest are in `found`."""
    taken, row, column, inside = _load(x, rows, columns, row_step, column_step, tile)
    place, held = _places(
        rows, columns, across, rows_each, columns_each, all_rows, all_columns, tile
    )
    if known:
        largest = tl.load(found + place, mask=held, other=0)
    else:
        largest = _largest_of(_magnitude(taken), rows_each, columns_each, tile)
    largest = tl.maximum(largest, TINY_BITS).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.full(largest.shape, limit, tl.float32), largest)
    if powers:
        exponent = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(scale != scale, scale, exponent)
    one = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(inverse + place, one, mask=held)  # programs that share a block store the same value
    y = taken.to(tl.float32) * _spread(scale, rows_each, columns_each, tile)
    _narrow_to(y, bits, row * bits_row_step + column * bits_column_step, inside, limit)


@triton.jit
def _narrow(  # type: ignore[no-untyped-def]
    x,
    rows,
    columns,
    row_step,
    column_step,
    bits,
    bits_row_step,
    bits_column_step,
    scale,
    found,
    limit: tl.constexpr,
    tile: tl.constexpr,
):
    """A tile's bits by a known scale, and the bits of the largest magnitude."""
    taken, row, column, inside = _load(x, rows, columns, row_step, column_step, tile)
    tl.atomic_max(found, tl.max(_magnitude(taken)), sem="relaxed")
    y = taken.to(tl.float32) * tl.load(scale)
    _narrow_to(y, bits, row * bits_row_step + column * bits_column_step, inside, limit)


@triton.jit
def _copy(x, rows, columns, row_step, column_step, copied, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy a tile of bytes into contiguous rows."""
    taken, row, column, inside = _load(x, rows, columns, row_step, column_step, tile)
    tl.store(copied + row * columns + column, taken, mask=inside)
