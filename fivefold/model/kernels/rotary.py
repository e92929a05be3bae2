"""RoPE as one Triton kernel, which reads each head's features once.

Imported only where it runs, since Triton is. It is proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`). Shapes as in `rope.RotaryTables`: of D features, R are rotary.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch

HEADS = 16
"""Heads that a program rotates."""


def turn(
    tensors: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    sign: float,
    first: int,
    *,
    interleaved: bool = False,
) -> list[Tensor]:
    """Rotate R features, from `first` on, of one or two tensors of the same tokens, in one kernel.

    Args:
        tensors: [B, S, N, D], each of any number of heads and any strides.
        cos, sin: the tables.
        sign: factor of their angles.
        first: first feature that is turned.
        interleaved: whether neighbours are pairs, or features of two halves.

    Returns:
        Contiguous tensors, computed in at least fp32.
    """
    given = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
    x, k = given[0], given[-1]
    batch, tokens, heads, features = x.shape
    half, more = sin.shape[-1], k.shape[2] if len(given) > 1 else 0
    operands = x, made[0], k, made[-1], cos.contiguous(), sin.contiguous()
    sizes = tokens, heads, more, features, half, first
    launch(
        _turn,
        (batch * tokens, triton.cdiv(heads, HEADS) + triton.cdiv(more, HEADS)),
        *operands,
        *x.stride()[:3],
        *k.stride()[:3],
        *sizes,
        backwards=sign < 0,
        interleaved=interleaved,
        wide=tl.float64 if x.dtype == torch.float64 else tl.float32,
        num_heads=HEADS,
        num_pairs=triton.next_power_of_2(half),
        num_features=triton.next_power_of_2(features),
    )
    return made


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x,
    y,
    more_x,
    more_y,
    cos,
    sin,
    batch_step,
    token_step,
    head_step,
    more_batch_step,
    more_token_step,
    more_head_step,
    tokens,
    heads,
    more_heads,
    features,
    half,
    first,
    backwards: tl.constexpr,
    interleaved: tl.constexpr,
    wide: tl.constexpr,
    num_heads: tl.constexpr,
    num_pairs: tl.constexpr,
    num_features: tl.constexpr,
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = token // tokens, token % tokens
    pair = tl.arange(0, num_pairs)
    step = 2 if interleaved else 1
    apart = 1 if interleaved else half
    c = tl.load(cos + token * 2 * half + pair * step, mask=pair < half, other=0.0).to(wide)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(wide)[None, :]
    if backwards:
        s = -s
    blocks = tl.cdiv(heads, num_heads)
    head = tl.arange(0, num_heads).to(tl.int64)
    sizes = features, half, first, step, apart
    # A branch for each, since Triton gives a size of 1, or a step that is large, another type.
    if block < blocks:
        x += row * batch_step + place * token_step
        y += token * heads * features
        _turn_heads(x, y, head_step, heads, head + block * num_heads, c, s, sizes, num_features)
    else:
        head += (block - blocks) * num_heads
        more_x += row * more_batch_step + place * more_token_step
        more_y += token * more_heads * features
        _turn_heads(more_x, more_y, more_head_step, more_heads, head, c, s, sizes, num_features)


@triton.jit
def _turn_heads(  # type: ignore[no-untyped-def]
    x, y, head_step, heads, head, c, s, sizes, num_features: tl.constexpr
):
    features, half, first, step, apart = sizes
    x += (head * head_step)[:, None]
    y += (head * features)[:, None]
    here = (head < heads)[:, None]
    pair = tl.arange(0, c.shape[1])[None, :]
    turned, at = here & (pair < half), first + pair * step
    one = tl.load(x + at, mask=turned, other=0.0).to(c.dtype)
    other = tl.load(x + at + apart, mask=turned, other=0.0).to(c.dtype)
    kind = y.dtype.element_ty
    tl.store(y + at, (one * c - other * s).to(kind), mask=turned)
    tl.store(y + at + apart, (other * c + one * s).to(kind), mask=turned)
    if features > 2 * half:  # the rest stays
        place = tl.arange(0, num_features)[None, :]
        rest = (place < first) | ((place >= first + 2 * half) & (place < features))
        tl.store(y + place, tl.load(x + place, mask=here & rest), mask=here & rest)
