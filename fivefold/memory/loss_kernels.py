"""The passes of cross entropy over logits, each as one Triton kernel that reads them once.

Imported only where they are used, since Triton is. They are proven without a GPU by Triton's
interpreter (`TRITON_INTERPRET=1`).

Shapes: T tokens, v vocabulary entries of a range, `true` of them below the vocabulary's size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.mesh.device import launch
from fivefold.model.kernels.caps import capped, through_cap
from fivefold.tensor.vocabulary import Entries

AT_A_TIME = 4096
"""Entries that a program holds in registers."""
WARPS = 8


def statistics(entries: Entries, logits_Tv: Tensor, labels_T: Tensor) -> Tensor:
    """`Entries.statistics` by an online softmax (Milakov and Gimelshein 2018), in fp32."""
    tokens, held = logits_Tv.shape
    found = logits_Tv.new_empty(3 if entries.rule.smoothing else 2, tokens, dtype=torch.float32)
    arguments: tuple[Any, ...] = (logits_Tv, labels_T, found, logits_Tv.stride(0), tokens)
    launch(
        _statistics,
        (tokens,),
        *arguments,
        entries.first,
        held,
        true=entries.true(logits_Tv),  # nearly all ranges give the same
        smoothed=bool(entries.rule.smoothing),
        cap=entries.rule.cap or 0.0,
        size=AT_A_TIME,
        num_warps=WARPS,
    )
    return found


def overwrite(
    entries: Entries, logits_Tv: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor
) -> Tensor:
    """`Entries.gradient`, written over the logits, which it returns."""
    tokens, held = logits_Tv.shape
    arguments: tuple[Any, ...] = (logits_Tv, labels_T, lse_T, scale_T, logits_Tv.stride(0))
    launch(
        _overwrite,
        (tokens, triton.cdiv(held, AT_A_TIME)),
        *arguments,
        entries.true(logits_Tv),
        entries.first,
        held,
        entries.rule.smoothing / entries.rule.vocab_size,
        1.0 - entries.rule.smoothing,
        2.0 * entries.rule.z_coeff,
        cap=entries.rule.cap or 0.0,
        size=AT_A_TIME,
        num_warps=WARPS,
    )
    return logits_Tv


@triton.jit
def _statistics(  # type: ignore[no-untyped-def]
    logits,
    labels,
    found,
    stride,
    tokens,
    first,
    held,
    true: tl.constexpr,
    smoothed: tl.constexpr,
    cap: tl.constexpr,
    size: tl.constexpr,
):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    lanes = tl.arange(0, size)
    # A maximum and a sum for each lane: lanes meet once, at the end.
    most = tl.full((size,), float("-inf"), tl.float32)
    total = tl.zeros((size,), tl.float32)
    summed = tl.zeros((size,), tl.float32)
    for start in range(0, true, size):
        inside = start + lanes < true
        x = tl.load(logits + start + lanes, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(inside, capped(x, cap), float("-inf"))
        higher = tl.maximum(most, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = higher
        if smoothed:
            summed += tl.where(inside, x, 0.0)
    highest = tl.max(most, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(found + row, base + tl.log(tl.sum(total * tl.exp(most - base), 0)))
    own = tl.load(labels + row) - first
    here = (own >= 0) & (own < held)
    target = tl.load(logits + tl.where(here, own, 0), mask=here, other=0.0).to(tl.float32)
    tl.store(found + tokens + row, capped(target, cap))
    if smoothed:
        tl.store(found + 2 * tokens + row, tl.sum(summed, 0))


@triton.jit
def _overwrite(  # type: ignore[no-untyped-def]
    logits,
    labels,
    lse,
    scale,
    stride,
    true,
    first,
    held,
    spread,
    peak,
    slope,
    cap: tl.constexpr,
    size: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.program_id(1) * size + tl.arange(0, size)
    logits += row.to(tl.int64) * stride + place
    x = capped(tl.load(logits, mask=place < held, other=0.0).to(tl.float32), cap)
    norm = tl.load(lse + row)
    grad = tl.exp(x - norm) * (1.0 + slope * norm) - spread
    grad -= tl.where(place == tl.load(labels + row) - first, peak, 0.0)
    grad = through_cap(grad, x, cap)
    grad = tl.where(place < true, grad * tl.load(scale + row), 0.0)
    tl.store(logits, grad.to(logits.dtype.element_ty), mask=place < held)
