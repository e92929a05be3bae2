"""Dropout as one Triton kernel: an element's mask is made in registers, where it is applied.

Imported only where it runs, since Triton is. It is proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`). Shapes: B rows of a batch, N heads, q and k tokens or features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch

ROWS, COLUMNS = 16, 256
"""Rows and columns of a program, which hashes each of them once."""


def drop(
    x: Tensor,
    onto: Tensor | None,
    ids_Bq: Tensor,
    ids_Bk: Tensor | None,
    key: Tensor,
    threshold: int,
    scale: float,
    heads: tuple[int, int],
) -> Tensor:
    """`x` where its random bits reach the threshold, times `scale`, added to `onto`.

    Args:
        x: [B, N, q, k] or [q, k] in any floating dtype; computed in at least fp32.
        onto: what is added to, of the same shape and dtype; None: nothing.
        ids_Bq: int64 ids of rows.
        ids_Bk: int64 ids of columns; None: 0 .. k - 1.
        key: int64 scalar.
        threshold: bits below it, as int64, drop.
        scale: factor of what stays.
        heads: index of the first head, and the heads of the model.
    """
    x, adds = x.contiguous(), onto is not None
    onto = x if onto is None else onto.contiguous()
    columns = ids_Bq if ids_Bk is None else ids_Bk
    y = torch.empty_like(x)
    (batch, num_heads), (rows, features) = x.shape[:-2] or (1, 1), x.shape[-2:]
    grid = triton.cdiv(rows, ROWS), triton.cdiv(features, COLUMNS), batch * num_heads
    ids = ids_Bq, columns, key, *ids_Bq.stride()[:2], *columns.stride()[:2]
    sizes = threshold, *heads, num_heads, rows, features
    launch(
        _drop,
        grid,
        x,
        onto,
        y,
        *ids,
        *sizes,
        scale=scale,  # a constant, since Triton makes fp32 of numbers that it is given
        adds=adds,
        named=ids_Bk is not None,
        wide=tl.float64 if x.dtype == torch.float64 else tl.float32,
        num_rows=ROWS,
        num_columns=COLUMNS,
    )
    return y


@triton.jit
def _drop(  # type: ignore[no-untyped-def]
    x,
    onto,
    y,
    row_ids,
    column_ids,
    key,
    row_batch,
    row_step,
    column_batch,
    column_step,
    threshold,
    first_head,
    all_heads,
    num_heads,
    rows,
    columns,
    scale: tl.constexpr,
    adds: tl.constexpr,
    named: tl.constexpr,
    wide: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
):
    block = tl.program_id(2).to(tl.int64)
    batch, head = block // num_heads, block % num_heads
    row = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    column = tl.program_id(1) * num_columns + tl.arange(0, num_columns)
    here = row < rows
    there = column < columns
    ids = tl.load(row_ids + batch * row_batch + row * row_step, mask=here, other=0)
    ids = ids * all_heads + first_head + head
    names = column.to(tl.int64)
    if named:
        place = column_ids + batch * column_batch + column * column_step
        names = tl.load(place, mask=there, other=0)
    bits = random_bits(ids, names, tl.load(key))
    kept = bits.to(tl.int64, bitcast=True) >= threshold
    both = here[:, None] & there[None, :]
    at = (block * rows + row)[:, None] * columns + column[None, :]
    found = tl.load(x + at, mask=both, other=0.0).to(wide)
    found = tl.where(kept, found * scale, 0.0)
    if adds:
        found += tl.load(onto + at, mask=both, other=0.0).to(wide)
    tl.store(y + at, found.to(y.dtype.element_ty), mask=both)


@triton.jit
def random_bits(rows, columns, key):  # type: ignore[no-untyped-def]
    """`model.random_bits` of each row and column, as uint64."""
    hashed = _hash(rows.to(tl.uint64, bitcast=True) ^ key.to(tl.uint64, bitcast=True))
    bits = hashed[:, None] ^ _hash(columns.to(tl.uint64, bitcast=True))[None, :]
    bits *= 0xBF58476D1CE4E5B9
    return (bits ^ (bits >> 32)) * 0x94D049BB133111EB


@triton.jit
def _hash(bits):  # type: ignore[no-untyped-def]
    """`model.random_bits.hash64`."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)
