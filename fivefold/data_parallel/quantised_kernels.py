"""Triton kernels for ZeRO++'s messages, bit-identical to `quantised.Blocks`.

Imported only where they run, since Triton is. They are proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`).

A program takes some blocks of one message. Shapes: P messages that are added up, A x B = R messages
of the same ranks, N elements of one, M bytes of one.
"""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fivefold.data_parallel.blocks import SCALE_BYTES
from fivefold.data_parallel.quantised import SIGN, TINY, Blocks
from fivefold.mesh.device import launch

TILE = 4096
"""Elements per Triton program."""


def pack(form: Blocks, runs: Sequence[Tensor], sent_RM: Tensor) -> None:
    """As `Blocks.pack` of all runs side by side, into `sent_RM`.

    Args:
        form: how numbers become blocks.
        runs: fp32, bf16 or fp16 [A, B, N]; all but the last are whole blocks.
        sent_RM: the messages.
    """
    blocks = _blocks(form, sum(run.shape[2] for run in runs))
    before = 0
    for run in runs:
        own, inner = run.shape[2], run.shape[1]
        launch(
            _pack,
            (triton.cdiv(_blocks(form, own), _tile(form)), len(sent_RM)),
            run,
            own,
            inner,
            run.stride(0),
            run.stride(1),
            sent_RM,
            sent_RM.stride(0),
            blocks,
            before,
            most=2 ** (form.bits - 1) - 1,
            powers=form.powers_of_two,
            tiny=TINY,
            **_sizes(form),
        )
        before += _blocks(form, own)


def unpack(form: Blocks, sent_PRM: Tensor, runs: Sequence[Tensor]) -> None:
    """As `Blocks.unpack`, added up over P in order, into runs that lie side by side.

    Args:
        form: how numbers became blocks.
        sent_PRM: messages.
        runs: fp32, bf16 or fp16 [R, N].
    """
    blocks = _blocks(form, sum(run.shape[1] for run in runs))
    start = 0
    for run in runs:
        end = start + run.shape[1]
        tiles = triton.cdiv(_blocks(form, end) - start // form.size, _tile(form))
        launch(
            _unpack,
            (tiles, len(run)),
            run,
            run.stride(0),
            start,
            end,
            sent_PRM,
            *sent_PRM.stride()[:2],
            blocks,
            messages=len(sent_PRM),
            enable_fp_fusion=False,  # a product is rounded before it is added
            **_sizes(form),
        )
        start = end


def _blocks(form: Blocks, elements: int) -> int:
    return triton.cdiv(elements, form.size)


def _tile(form: Blocks) -> int:
    """Blocks per Triton program."""
    return max(TILE // form.size, 1)


def _sizes(form: Blocks) -> dict[str, Any]:
    return {
        "sign": SIGN if form.bits == 4 else 0,
        "tile": _tile(form),
        "size": form.size,
        "scale_bytes": SCALE_BYTES,
        "num_warps": 8,
    }


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    x,
    elements,
    inner,
    outer_step,
    inner_step,
    sent,
    message_step,
    blocks,
    before,
    most: tl.constexpr,
    powers: tl.constexpr,
    tiny: tl.constexpr,
    sign: tl.constexpr,
    tile: tl.constexpr,
    size: tl.constexpr,
    scale_bytes: tl.constexpr,
):
    """Packs blocks of a run; `before`: number of blocks before it; `sign`: 0 for 8 bits."""
    row = tl.program_id(1).to(tl.int64)
    x += row // inner * outer_step + row % inner * inner_step
    sent += row * message_step
    block = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    lanes = tl.arange(0, size)[None, :]
    place = block[:, None] * size + lanes
    taken = tl.load(x + place, mask=place < elements, other=0).to(tl.float32)
    magnitude = taken.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of which NaN is the largest
    largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    step = tl.div_rn(largest, tl.full(largest.shape, most, tl.float32))
    step = tl.where(step < tiny, tiny, step)
    if powers:
        power = (step.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.where(step > power, power * 2, step)
    exists = block * size < elements
    block += before
    bits = step.to(tl.int32, bitcast=True)
    for byte in tl.static_range(scale_bytes):  # a message need not be aligned
        at = sent + block * scale_bytes + byte
        tl.store(at, ((bits >> 8 * byte) & 0xFF).to(tl.uint8), mask=exists)
    y = tl.div_rn(taken, tl.broadcast_to(step[:, None], taken.shape))
    y = tl.where(y == y, tl.minimum(tl.maximum(y, -most), most), 0.0)
    # Floats near this constant are 1 apart, so adding it rounds to the nearest even integer.
    whole = (y + 12582912.0 - 12582912.0).to(tl.int32)
    sent += scale_bytes * blocks
    if sign:
        low, high = tl.split(tl.reshape(whole + sign, (tile, size // 2, 2)))
        pair = block[:, None] * (size // 2) + tl.arange(0, size // 2)[None, :]
        tl.store(sent + pair, (low + high * 16).to(tl.uint8), mask=exists[:, None])
    else:
        place = block[:, None] * size + lanes
        tl.store(sent + place, (whole & 0xFF).to(tl.uint8), mask=exists[:, None])


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    out,
    out_step,
    start,
    end,
    sent,
    messages_step,
    message_step,
    blocks,
    messages: tl.constexpr,
    sign: tl.constexpr,
    tile: tl.constexpr,
    size: tl.constexpr,
    scale_bytes: tl.constexpr,
):
    """Unpacks the blocks that contain elements from `start` to `end`."""
    row = tl.program_id(1).to(tl.int64)
    sent += row * message_step
    block = start // size + tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    place = block[:, None] * size + tl.arange(0, size)[None, :]
    inside = (place >= start) & (place < end)
    total = tl.zeros((tile, size), tl.float32)
    for _ in range(messages):
        bits = tl.zeros((tile,), tl.int32)
        for byte in tl.static_range(scale_bytes):
            at = sent + block * scale_bytes + byte
            bits |= tl.load(at, mask=block < blocks, other=0).to(tl.int32) << 8 * byte
        integers = sent + scale_bytes * blocks
        if sign:
            pair = block[:, None] * (size // 2) + tl.arange(0, size // 2)[None, :]
            both = tl.load(integers + pair, mask=block[:, None] < blocks, other=0).to(tl.int32)
            whole = tl.reshape(tl.join(both & 15, both >> 4), (tile, size)) - sign
        else:
            whole = tl.load(integers + place, mask=inside, other=0).to(tl.int8, bitcast=True)
        each = whole.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
        each = each.to(out.dtype.element_ty).to(tl.float32)
        total = (total + each).to(out.dtype.element_ty).to(tl.float32)
        sent += messages_step
    tl.store(out + row * out_step + place - start, total.to(out.dtype.element_ty), mask=inside)
