"""Triton functions for tiles of queries and keys: loads, visibility, products.

Tokens of a piece are counted from its first.
"""

import triton
import triton.language as tl

from fivefold.model.kernels.dropout import random_bits


@triton.jit
def piece_of(starts):  # type: ignore[no-untyped-def]
    """Offset of this program's piece as int64, and its length."""
    piece = tl.program_id(0)
    first = tl.load(starts + piece)
    return first.to(tl.int64), tl.load(starts + piece + 1) - first


@triton.jit
def keys_of(  # type: ignore[no-untyped-def]
    start, keys, shift, window, causal: tl.constexpr, windowed: tl.constexpr, rows: tl.constexpr
):
    """The first key that a tile of queries sees, and the end of those."""
    low, high = keys * 0, keys
    if windowed:
        low = tl.maximum(start + shift - window, 0)
    if causal:
        high = tl.minimum(start + rows + shift, keys)
    return low, high


@triton.jit
def queries_of(  # type: ignore[no-untyped-def]
    start, queries, shift, window, causal: tl.constexpr, windowed: tl.constexpr, rows: tl.constexpr
):
    """The first query that sees a tile of keys, and the end of those."""
    low, high = queries * 0, queries
    if causal:
        low = tl.maximum(start - shift, 0)
    if windowed:
        high = tl.minimum(start + rows + window - shift, queries)
    return low, high


@triton.jit
def visible_to(  # type: ignore[no-untyped-def]
    i, j, queries, keys, shift, window, causal: tl.constexpr, windowed: tl.constexpr
):
    """Which of the keys j each of the queries i sees, see `kernels.attention.Seen`."""
    visible = (i < queries)[:, None] & (j < keys)[None, :]
    back = i[:, None] + shift - j[None, :]
    if causal:
        visible &= back >= 0
    if windowed:
        visible &= back <= window
    return visible


@triton.jit
def kept_of(rows, columns, key, threshold):  # type: ignore[no-untyped-def]
    """Whether the probabilities between queries and keys with these ids are kept by dropout."""
    return random_bits(rows, columns, key).to(tl.int64, bitcast=True) >= threshold


@triton.jit
def product(a, b, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """a @ b without rounding the operands, summed in a wide type."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=wide)


@triton.jit
def ids_of(ids, first, at, count):  # type: ignore[no-untyped-def]
    """Ids of tokens `at` of a piece."""
    return tl.load(ids + first + at, mask=at < count, other=0)


@triton.jit
def tile_of(  # type: ignore[no-untyped-def]
    x, first, at, count, heads, head, features: tl.constexpr, size: tl.constexpr
):
    """Load tokens `at` of a piece, of one head of x [tokens, heads, features]; zeros beyond."""
    lanes = tl.arange(0, size)
    place = ((first + at) * heads + head)[:, None] * features + lanes[None, :]
    inside = (at < count)[:, None] & (lanes < features)[None, :]
    return tl.load(x + place, mask=inside, other=0.0)


@triton.jit
def store_tile(  # type: ignore[no-untyped-def]
    x, tile, first, at, count, heads, head, features: tl.constexpr, size: tl.constexpr
):
    """Store a tile in the layout of `tile_of`."""
    lanes = tl.arange(0, size)
    place = ((first + at) * heads + head)[:, None] * features + lanes[None, :]
    inside = (at < count)[:, None] & (lanes < features)[None, :]
    tl.store(x + place, tile.to(x.dtype.element_ty), mask=inside)
