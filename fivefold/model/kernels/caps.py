"""Caps of scores and logits, c tanh(x / c), within Triton kernels."""

import triton
import triton.language as tl


@triton.jit
def capped(x, cap: tl.constexpr):  # type: ignore[no-untyped-def]
    """c tanh(x / c) for a cap c; 0: no cap."""
    if cap != 0.0:
        shrunk = tl.exp(-2.0 * tl.abs(x / cap))  # never overflows: the exponent is <= 0
        bound = cap * ((1.0 - shrunk) / (1.0 + shrunk))
        x = tl.where(x < 0.0, -bound, bound)
    return x


@triton.jit
def through_cap(grad, x, cap: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of the uncapped number, given that of the result `x`."""
    if cap != 0.0:
        share = x / cap
        grad = grad * (1.0 - share * share)
    return grad
