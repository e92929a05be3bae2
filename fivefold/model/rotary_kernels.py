"""RoPE as one Triton kernel, which reads each head's features once.

Imported only where it runs, since Triton is. It is proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`). Shapes as in `rope.RotaryTables`: of D features, R are rotary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch

HEADS = 16
"""Heads that a program turns."""


def turn(x_BSND: Tensor, cos: Tensor, sin: Tensor, sign: float, first: int) -> Tensor:
    """`x_BSND` with R features from `first` on turned by the tables' angles times `sign`.

    Any strides; the result is contiguous. Computed in at least fp32.
    """
    x = x_BSND if x_BSND.stride(-1) == 1 else x_BSND.contiguous()
    batch, tokens, heads, features = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = sin.shape[-1]
    launch(
        _turn,
        (batch * tokens, triton.cdiv(heads, HEADS)),
        x,
        y,
        cos.contiguous(),
        sin.contiguous(),
        *x.stride()[:3],
        *(tokens, heads, features, half, first),
        backwards=sign < 0,
        wide=tl.float64 if x.dtype == torch.float64 else tl.float32,
        num_heads=HEADS,
        num_pairs=triton.next_power_of_2(half),
        num_features=triton.next_power_of_2(features),
    )
    return y


@triton.jit
def _turn(  # type: ignore[no-untyped-def]
    x,
    y,
    cos,
    sin,
    batch_step,
    token_step,
    head_step,
    tokens,
    heads,
    features,
    half,
    first,
    backwards: tl.constexpr,
    wide: tl.constexpr,
    num_heads: tl.constexpr,
    num_pairs: tl.constexpr,
    num_features: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * num_heads + tl.arange(0, num_heads)
    x += (token // tokens) * batch_step + (token % tokens) * token_step
    x += (head * head_step)[:, None]
    y += (token * heads + head)[:, None] * features
    here = (head < heads)[:, None]
    pair = tl.arange(0, num_pairs)
    turned = here & (pair < half)[None, :]
    c = tl.load(cos + token * 2 * half + pair, mask=pair < half, other=0.0).to(wide)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0).to(wide)[None, :]
    if backwards:
        s = -s
    one = tl.load(x + first + pair[None, :], mask=turned, other=0.0).to(wide)
    other = tl.load(x + first + half + pair[None, :], mask=turned, other=0.0).to(wide)
    kind = y.dtype.element_ty
    tl.store(y + first + pair[None, :], (one * c - other * s).to(kind), mask=turned)
    tl.store(y + first + half + pair[None, :], (other * c + one * s).to(kind), mask=turned)
    if features > 2 * half:  # the rest stays
        place = tl.arange(0, num_features)
        rest = (place < first) | ((place >= first + 2 * half) & (place < features))
        kept = here & rest[None, :]
        tl.store(y + place[None, :], tl.load(x + place[None, :], mask=kept), mask=kept)
