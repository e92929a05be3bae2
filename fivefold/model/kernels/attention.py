"""FlashAttention with dropout by hash, caps or recorded scores, as Triton kernels; no scores or
masks are held.

The algorithm is that of FlashAttention-2 (Dao 2023), for pieces of several lengths that lie end to
end; a probability's mask is made in registers from its names, forward and backward. Imported only
where they run, since Triton is. They are proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`).

Shapes: C pieces, T queries and L keys over all pieces, N query heads, G key/value heads that groups
of them share, D features of queries and keys, Dv of values.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch
from fivefold.model.attention.scores import USUAL, Scores
from fivefold.model.dropout import PairDropout, threshold
from fivefold.model.kernels.attention_tiles import (
    ids_of,
    kept_of,
    keys_of,
    piece_of,
    product,
    queries_of,
    store_tile,
    tile_of,
    visible_to,
)
from fivefold.model.kernels.caps import capped, through_cap

MOST_ROWS = 64
"""Queries or keys of a tile of up to 128 features in 16 bits, of which some six fit into the shared
memory of a multiprocessor. Wider numbers are multiplied out of registers, which hold fewer."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Pieces, and which keys of its own piece a query sees.

    Query i sees key j if j <= i + shift and i + shift - j <= window.

    Attributes:
        starts_q: [C + 1] int32 on the device, offset of each piece's queries, then T.
        starts_k: the same of keys, then L.
        longest: most queries and most keys of a piece.
        causal: whether the first condition holds; False: later keys are seen, too.
        shift: position of a piece's first query minus that of its first key.
        window: tokens before itself that a query sees; None: all.
    """

    starts_q: Tensor
    starts_k: Tensor
    longest: tuple[int, int]
    causal: bool
    shift: int = 0
    window: int | None = None


def forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, drop: PairDropout | None, scores: Scores = USUAL
) -> tuple[Tensor, Tensor]:
    """Output [T, N, Dv], and log-sum-exp [N, T] of what is seen before dropout, at least fp32.

    Args:
        q: queries [T, N, D]; sums are made in at least fp32.
        k: keys [L, G, D].
        v: values [L, G, Dv].
        seen: which keys each query sees, at least one.
        drop: dropout of the probabilities; in order, its ids are those of all queries and keys.
        scores: how scores are made of q k^T.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), _by_query(q)
    largest = None if scores.largest is None else _by_query(q)
    numbers, constants = _common(q, k, v, seen, drop, scores)
    grid = _grid(seen, seen.longest[0], q.shape[1], constants["rows"])
    launch(_forward, grid, q, k, v, out, lse, largest, *numbers, **constants)
    if largest is not None:
        scores.note(largest[None])
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Seen,
    drop: PairDropout | None,
    scores: Scores = USUAL,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` may be over more keys than these."""
    grad, q, k, v, out, lse = (x.contiguous() for x in (grad, q, k, v, out, lse))
    dq, dk, dv, given = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), _by_query(q)
    numbers, constants = _common(q, k, v, seen, drop, scores)
    grid = _grid(seen, seen.longest[0], q.shape[1], constants["rows"])
    launch(_of_queries, grid, q, k, v, grad, lse, given, out, dq, *numbers, **constants)
    grid = _grid(seen, seen.longest[1], k.shape[1], constants["rows"])
    launch(_of_keys, grid, q, k, v, grad, lse, given, dk, dv, *numbers, **constants)
    return dq, dk, dv


def _by_query(q: Tensor) -> Tensor:
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape[1], q.shape[0], dtype=wide)


def _grid(seen: Seen, longest: int, heads: int, rows: int) -> tuple[int, int, int]:
    return len(seen.starts_q) - 1, triton.cdiv(longest, rows), heads


def _padded(features: int) -> int:
    """Size for Triton: a power of 2, at least 16, which GPU products need."""
    return max(16, triton.next_power_of_2(features))


def _common(
    q: Tensor, k: Tensor, v: Tensor, seen: Seen, drop: PairDropout | None, scores: Scores
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and constants that all kernels share."""
    names: tuple[Any, ...] = None, None, None
    dropping, kept_scale = (0, 0, 0), 1.0
    if drop is not None:
        heads, kept_scale = drop.heads, 1.0 / (1.0 - drop.heads.p)
        names = drop.ids_Bq.reshape(-1), drop.ids_Bk.reshape(-1), heads.key
        dropping = threshold(heads.p), heads.first_head, heads.all_heads
    sizes = *q.shape[:2], k.shape[1], seen.shift, seen.window or 0
    numbers = seen.starts_q, seen.starts_k, *names, *sizes, *dropping
    size, value_size = _padded(q.shape[2]), _padded(v.shape[2])
    row = max(size, value_size) * q.itemsize
    return numbers, {
        # factors are constants, since Triton makes fp32 of numbers that it is given
        "scale": scores.factor(q.shape[2]),
        "cap": scores.cap or 0.0,
        "drops": drop is not None,
        "kept_scale": kept_scale,
        "causal": seen.causal,
        "windowed": seen.window is not None,
        "wide": tl.float64 if q.dtype == torch.float64 else tl.float32,
        "features": q.shape[2],
        "values": v.shape[2],
        "size": size,
        "value_size": value_size,
        "rows": max(16, min(MOST_ROWS, MOST_ROWS * 512 // (row * q.itemsize))),
        "num_stages": 2,
        "num_warps": 8 if row >= 256 else 4,
    }


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    largest,
    starts_q,
    starts_k,
    ids_q,
    ids_k,
    drop_key,
    all_queries,
    heads,
    groups,
    shift,
    window,
    threshold,
    first_head,
    all_heads,
    scale: tl.constexpr,
    cap: tl.constexpr,
    drops: tl.constexpr,
    kept_scale: tl.constexpr,
    causal: tl.constexpr,
    windowed: tl.constexpr,
    wide: tl.constexpr,
    features: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    rows: tl.constexpr,
):
    """A program computes the output of one head's tile of queries."""
    first_q, queries = piece_of(starts_q)
    first_k, keys = piece_of(starts_k)
    start, head = tl.program_id(1) * rows, tl.program_id(2)
    if start >= queries:
        return
    group = head // (heads // groups)
    i = start + tl.arange(0, rows)
    query = tile_of(q, first_q, i, queries, heads, head, features, size)
    if drops:
        key = tl.load(drop_key)
        names = ids_of(ids_q, first_q, i, queries) * all_heads + first_head + head
    most = tl.full((rows,), float("-inf"), wide)
    total = tl.zeros((rows,), wide)
    found = tl.zeros((rows, value_size), wide)
    low, high = keys_of(start, keys, shift, window, causal, windowed, rows)
    for at in range(low, high, rows):
        j = at + tl.arange(0, rows)
        keyed = tile_of(k, first_k, j, keys, groups, group, features, size)
        visible = visible_to(i, j, queries, keys, shift, window, causal, windowed)
        scores = capped(product(query, tl.trans(keyed), wide) * scale, cap)
        scores = tl.where(visible, scores, float("-inf"))
        more = tl.maximum(most, tl.max(scores, 1))
        base = tl.where(more == float("-inf"), 0.0, more)  # of a query that has seen no key yet
        p = tl.exp(scores - base[:, None])
        before = tl.exp(most - base)
        total = total * before + tl.sum(p, 1)
        if drops:
            kept = kept_of(names, ids_of(ids_k, first_k, j, keys), key, threshold)
            p = tl.where(kept, p * kept_scale, 0.0)
        value = tile_of(v, first_k, j, keys, groups, group, values, value_size)
        added = product(p.to(value.dtype), value, wide)
        found = found * before[:, None] + added
        most = more
    store_tile(out, found / total[:, None], first_q, i, queries, heads, head, values, value_size)
    place = first_q + i + head * all_queries
    tl.store(lse + place, most + tl.log(total), mask=i < queries)
    if largest is not None:
        tl.store(largest + place, most, mask=i < queries)


@triton.jit
def _of_queries(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad,
    lse,
    given,
    out,
    dq,
    starts_q,
    starts_k,
    ids_q,
    ids_k,
    drop_key,
    all_queries,
    heads,
    groups,
    shift,
    window,
    threshold,
    first_head,
    all_heads,
    scale: tl.constexpr,
    cap: tl.constexpr,
    drops: tl.constexpr,
    kept_scale: tl.constexpr,
    causal: tl.constexpr,
    windowed: tl.constexpr,
    wide: tl.constexpr,
    features: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    rows: tl.constexpr,
):
    """A program computes the gradient of one head's tile of queries, and grad x out of each for the
    other kernel."""
    first_q, queries = piece_of(starts_q)
    first_k, keys = piece_of(starts_k)
    start, head = tl.program_id(1) * rows, tl.program_id(2)
    if start >= queries:
        return
    group = head // (heads // groups)
    i = start + tl.arange(0, rows)
    query = tile_of(q, first_q, i, queries, heads, head, features, size)
    asked = tile_of(grad, first_q, i, queries, heads, head, values, value_size)
    made = tile_of(out, first_q, i, queries, heads, head, values, value_size)
    if drops:
        key = tl.load(drop_key)
        names = ids_of(ids_q, first_q, i, queries) * all_heads + first_head + head
    place = first_q + i + head * all_queries
    logs = tl.load(lse + place, mask=i < queries, other=0.0)
    both = tl.sum(asked.to(wide) * made.to(wide), 1)
    tl.store(given + place, both, mask=i < queries)
    found = tl.zeros((rows, size), wide)
    low, high = keys_of(start, keys, shift, window, causal, windowed, rows)
    for at in range(low, high, rows):
        j = at + tl.arange(0, rows)
        keyed = tile_of(k, first_k, j, keys, groups, group, features, size)
        value = tile_of(v, first_k, j, keys, groups, group, values, value_size)
        visible = visible_to(i, j, queries, keys, shift, window, causal, windowed)
        scores = capped(product(query, tl.trans(keyed), wide) * scale, cap)
        p = tl.exp(tl.where(visible, scores, float("-inf")) - logs[:, None])
        dp = product(asked, tl.trans(value), wide)
        if drops:
            kept = kept_of(names, ids_of(ids_k, first_k, j, keys), key, threshold)
            dp = tl.where(kept, dp * kept_scale, 0.0)
        ds = through_cap(p * (dp - both[:, None]) * scale, scores, cap).to(keyed.dtype)
        found += product(ds, keyed, wide)
    store_tile(dq, found, first_q, i, queries, heads, head, features, size)


@triton.jit
def _of_keys(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    grad,
    lse,
    given,
    dk,
    dv,
    starts_q,
    starts_k,
    ids_q,
    ids_k,
    drop_key,
    all_queries,
    heads,
    groups,
    shift,
    window,
    threshold,
    first_head,
    all_heads,
    scale: tl.constexpr,
    cap: tl.constexpr,
    drops: tl.constexpr,
    kept_scale: tl.constexpr,
    causal: tl.constexpr,
    windowed: tl.constexpr,
    wide: tl.constexpr,
    features: tl.constexpr,
    values: tl.constexpr,
    size: tl.constexpr,
    value_size: tl.constexpr,
    rows: tl.constexpr,
):
    """A program computes the gradients of one head's tile of keys and values, over all query heads
    that share it."""
    first_q, queries = piece_of(starts_q)
    first_k, keys = piece_of(starts_k)
    start, group = tl.program_id(1) * rows, tl.program_id(2)
    if start >= keys:
        return
    shared = heads // groups
    j = start + tl.arange(0, rows)
    keyed = tile_of(k, first_k, j, keys, groups, group, features, size)
    value = tile_of(v, first_k, j, keys, groups, group, values, value_size)
    if drops:
        key, columns = tl.load(drop_key), ids_of(ids_k, first_k, j, keys)
    of_key = tl.zeros((rows, size), wide)
    of_value = tl.zeros((rows, value_size), wide)
    low, high = queries_of(start, queries, shift, window, causal, windowed, rows)
    for head in range(group * shared, group * shared + shared):
        for at in range(low, high, rows):
            i = at + tl.arange(0, rows)
            query = tile_of(q, first_q, i, queries, heads, head, features, size)
            asked = tile_of(grad, first_q, i, queries, heads, head, values, value_size)
            place = first_q + i + head * all_queries
            logs = tl.load(lse + place, mask=i < queries, other=0.0)
            both = tl.load(given + place, mask=i < queries, other=0.0)
            visible = visible_to(i, j, queries, keys, shift, window, causal, windowed)
            scores = capped(product(query, tl.trans(keyed), wide) * scale, cap)
            p = tl.exp(tl.where(visible, scores, float("-inf")) - logs[:, None])
            stays, dp = p, product(asked, tl.trans(value), wide)
            if drops:
                names = ids_of(ids_q, first_q, i, queries) * all_heads + first_head + head
                kept = kept_of(names, columns, key, threshold)
                stays = tl.where(kept, p * kept_scale, 0.0)
                dp = tl.where(kept, dp * kept_scale, 0.0)
            of_value += product(tl.trans(stays.to(asked.dtype)), asked, wide)
            ds = through_cap(p * (dp - both[:, None]) * scale, scores, cap).to(query.dtype)
            of_key += product(tl.trans(ds), query, wide)
    store_tile(dk, of_key, first_k, j, keys, groups, group, features, size)
    store_tile(dv, of_value, first_k, j, keys, groups, group, values, value_size)
