"""A Triton kernel of AdamW for narrow weights and moments, equivalent to `rounding`.

Imported only where it runs, since Triton is. It is proven without a GPU by Triton's interpreter
(`TRITON_INTERPRET=1`). As in Transformer Engine's FusedAdam, each number is read and written once.

Numbers of bf16 and of 8 bits are taken apart by their bits, which no GPU rounds. Shapes: R rows and
C columns of a parameter, blocks of BLOCK columns.
"""

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fivefold.config.training import BLOCK
from fivefold.mesh.device import launch
from fivefold.model.kernels.dropout import random_bits

if TYPE_CHECKING:
    from fivefold.optim.rounding import Master, Moment

ELEMENTS = 1024
"""Elements per Triton program."""
_NEVER = -1e30
"""Stands for the logarithm of 0."""
Ids = tuple[Tensor, Tensor]


def update(
    master: "Master",
    grads_RC: Tensor,
    moments: "Sequence[Moment]",
    ids: Ids,
    key: int,
    step: Tensor,
    found_inf: Tensor | None,
    group: Mapping[str, Any],
) -> None:
    """Update a weight and its moments, and round them.

    Args:
        master: the weight.
        grads_RC: its gradient.
        moments: the first and the second.
        ids: int64 of rows and columns, by which random bits are made.
        key: key of the parameter and the step.
        step: fp32 scalar, this step's number, from 1 on.
        found_inf: fp32 scalar; where it is 1, no bit changes.
        group: the optimizer's settings.
    """
    rows, columns = master.matrix.shape
    device, (beta1, beta2) = grads_RC.device, group["betas"]
    wide = torch.promote_types(master.matrix.dtype, torch.float32)
    across = min(ELEMENTS, max(BLOCK, triton.next_power_of_2(columns)))
    down = ELEMENTS // across
    parts = [tensor for moment in moments for tensor in _parts(moment)]
    launch(
        _update,
        (triton.cdiv(rows, down), triton.cdiv(columns, across)),
        _bits(master.matrix),
        master.matrix if master.remainder is None else master.remainder,
        grads_RC,
        *parts,
        *ids,
        torch.full((), key, dtype=torch.int64, device=device),
        torch.full((), group["lr"], dtype=torch.float64, device=device),
        torch.full((), group["lr"] * group["weight_decay"], dtype=torch.float64, device=device),
        step,
        step if found_inf is None else found_inf,
        rows,
        columns,
        beta1=beta1,
        beta2=beta2,
        log_beta1=log(beta1) if beta1 else _NEVER,
        log_beta2=log(beta2) if beta2 else _NEVER,
        epsilon=group["eps"],
        divided=master.remainder is not None,
        narrow=master.matrix.dtype != wide,
        narrow1=moments[0].matrix.dtype == torch.bfloat16 != wide,
        narrow2=moments[1].matrix.dtype == torch.bfloat16 != wide,
        **_format(moments[0], 1),
        **_format(moments[1], 2),
        stoppable=found_inf is not None,
        wide=tl.float64 if wide == torch.float64 else tl.float32,
        num_rows=down,
        num_columns=across,
        block=BLOCK,
    )


def _bits(matrix: Tensor) -> Tensor:
    """Narrow numbers viewed as integers."""
    narrow = {torch.bfloat16: torch.int16}
    narrow |= dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2), torch.uint8)
    return matrix.view(narrow.get(matrix.dtype, matrix.dtype))


def _parts(moment: "Moment") -> tuple[Tensor, Tensor]:
    scales = moment.matrix if moment.scales is None else moment.scales
    return _bits(moment.matrix), _bits(scales)


def _format(moment: "Moment", number: int) -> dict[str, Any]:
    """The kernel's parameters of a moment's format; no fraction bits: not an 8-bit format."""
    form = moment.form
    return {
        f"fraction{number}": 0 if moment.scales is None else form.fraction,
        f"least{number}": form.least,
        f"top{number}": form.top,
        f"keeps{number}": form.keeps_positive,
    }


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    weight,
    remainder,
    grad,
    first,
    first_scales,
    second,
    second_scales,
    row_ids,
    column_ids,
    key,
    rate,
    shrinks,
    step,
    found_inf,
    rows,
    columns,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    log_beta1: tl.constexpr,
    log_beta2: tl.constexpr,
    epsilon: tl.constexpr,
    divided: tl.constexpr,
    narrow: tl.constexpr,
    narrow1: tl.constexpr,
    narrow2: tl.constexpr,
    fraction1: tl.constexpr,
    least1: tl.constexpr,
    top1: tl.constexpr,
    keeps1: tl.constexpr,
    fraction2: tl.constexpr,
    least2: tl.constexpr,
    top2: tl.constexpr,
    keeps2: tl.constexpr,
    stoppable: tl.constexpr,
    wide: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
    block: tl.constexpr,
):
    if stoppable:  # no row is read or written
        rows *= 1 - tl.load(found_inf).to(tl.int32)
    row = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    column = tl.program_id(1).to(tl.int64) * num_columns + tl.arange(0, num_columns)
    here, there = row < rows, column < columns
    inside = here[:, None] & there[None, :]
    place = row[:, None] * columns + column[None, :]
    num_blocks: tl.constexpr = num_columns // block
    group = tl.program_id(1).to(tl.int64) * num_blocks + tl.arange(0, num_blocks)
    scaled = row[:, None] * tl.cdiv(columns, block) + group[None, :]
    with_scale = here[:, None] & (group * block < columns)[None, :]

    w = _read(weight, place, inside, narrow, wide)
    if divided:
        lacking = tl.load(remainder + place, mask=inside, other=0).to(tl.int32)
        w = (w.to(tl.int32, bitcast=True) + lacking).to(tl.float32, bitcast=True)
    g = tl.load(grad + place, mask=inside, other=0.0).to(wide)
    m = _moment(
        first, place, inside, first_scales, scaled, with_scale, fraction1, least1, narrow1, wide
    )
    v = _moment(
        second, place, inside, second_scales, scaled, with_scale, fraction2, least2, narrow2, wide
    )

    taken, lr = tl.load(step).to(tl.float64), tl.load(rate)
    pace = (lr / (1.0 - tl.exp(taken * log_beta1))).to(wide)
    root = tl.sqrt(1.0 - tl.exp(taken * log_beta2)).to(wide)
    w -= tl.load(shrinks).to(wide) * w
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w -= pace * m / (tl.sqrt(v) / root + epsilon)

    ids = tl.load(row_ids + row, mask=here, other=0)
    names = tl.load(column_ids + column, mask=there, other=0)
    bits = random_bits(ids, names, tl.load(key))
    if divided:
        whole = w.to(tl.int32, bitcast=True)
        lacking = (whole << 16) >> 16
        tl.store(remainder + place, lacking.to(tl.int16), mask=inside)
        tl.store(weight + place, ((whole - lacking) >> 16).to(tl.int16), mask=inside)
    else:
        _keep(weight, place, inside, w, bits >> 32, narrow)
    if fraction1:
        scales = _pack(first, place, inside, m, bits, fraction1, least1, top1, keeps1, block)
        tl.store(first_scales + scaled, scales, mask=with_scale)
    else:
        _keep(first, place, inside, m, bits, narrow1)
    if fraction2:
        scales = _pack(second, place, inside, v, bits >> 16, fraction2, least2, top2, keeps2, block)
        tl.store(second_scales + scaled, scales, mask=with_scale)
    else:
        _keep(second, place, inside, v, bits >> 16, narrow2)


@triton.jit
def _moment(  # type: ignore[no-untyped-def]
    x,
    place,
    inside,
    scales,
    scaled,
    with_scale,
    fraction: tl.constexpr,
    least: tl.constexpr,
    narrow: tl.constexpr,
    wide: tl.constexpr,
):
    """A moment in a wide type; `fraction`: bits of one in 8 bits, or 0."""
    if fraction:
        byte = tl.load(x + place, mask=inside, other=0).to(tl.int32)
        exponents = tl.load(scales + scaled, mask=with_scale, other=0)
        found = (_unpacked(byte, fraction, least) * _spread(exponents, byte)).to(wide)
    else:
        found = _read(x, place, inside, narrow, wide)
    return found


@triton.jit
def _read(x, place, inside, narrow: tl.constexpr, wide: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers in a wide type; narrow ones are bf16, given by their bits."""
    found = tl.load(x + place, mask=inside, other=0)
    if narrow:
        found = (found.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return found.to(wide)


@triton.jit
def _keep(x, place, inside, new, bits, narrow: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store numbers; narrow ones are rounded as by `rounding.rounded`, with the last 16 of the
    bits."""
    if narrow:
        own = new.to(tl.float32).to(tl.int32, bitcast=True)
        magnitude = own & 0x7FFFFFFF
        nudged = own + (bits & 0xFFFF).to(tl.int32)
        nan = tl.where(magnitude > 0x7F800000, 0x400000, 0)  # keeps a NaN from losing its bits
        found = tl.where(magnitude < 0x7F800000, nudged, own | nan)
        tl.store(x + place, (found >> 16).to(tl.int16), mask=inside)
    else:
        tl.store(x + place, new, mask=inside)


@triton.jit
def _spread(scales, like):  # type: ignore[no-untyped-def]
    """[R, C]: the power of two of each element's block, from [R, C / block] exponents and 127."""
    powers = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    block: tl.constexpr = like.shape[1] // scales.shape[1]
    whole = tl.broadcast_to(powers[:, :, None], (scales.shape[0], scales.shape[1], block))
    return tl.reshape(whole, like.shape)


@triton.jit
def _unpacked(byte, fraction: tl.constexpr, least: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `EightBits.unpack`, without the scales."""
    size, rest = byte & 0x7F, byte & ((1 << fraction) - 1)
    exponent = size >> fraction
    normal = ((exponent + (least + 126)) << 23) | (rest << (23 - fraction))
    tiny = rest.to(tl.float32) * 2.0 ** (least - fraction)
    found = tl.where(exponent > 0, normal.to(tl.float32, bitcast=True), tiny)
    if fraction == 3:
        found = tl.where(size == 0x7F, float("nan"), found)
    else:
        found = tl.where(size == 0x7C, float("inf"), found)
        found = tl.where(size > 0x7C, float("nan"), found)
    return tl.where(byte > 0x7F, -found, found)


@triton.jit
def _pack(  # type: ignore[no-untyped-def]
    x,
    place,
    inside,
    new,
    bits,
    fraction: tl.constexpr,
    least: tl.constexpr,
    top: tl.constexpr,
    keeps: tl.constexpr,
    block: tl.constexpr,
):
    """As `EightBits.pack`: stores the numbers, and returns the scales."""
    own = tl.where(inside, new.to(tl.float32), 0.0)
    magnitude = own.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # NaN has the largest
    num_blocks: tl.constexpr = own.shape[1] // block
    largest = tl.max(tl.reshape(magnitude, (own.shape[0], num_blocks, block)), 2)
    scale = tl.minimum(tl.maximum((largest >> 23) - top, 1), 254)
    size = tl.div_rn(magnitude.to(tl.float32, bitcast=True), _spread(scale, own))
    finite = magnitude < 0x7F800000
    size = tl.where(finite, size, 0.0)
    exponent = (size.to(tl.int32, bitcast=True) >> 23) - 127
    unit = ((tl.maximum(exponent, least) - fraction + 127) << 23).to(tl.float32, bitcast=True)
    part = (bits & 0xFFFF).to(tl.int32).to(tl.float32) * 2.0**-16
    found = tl.floor(tl.div_rn(size, unit) + part) * unit
    smallest: tl.constexpr = 2.0 ** (least - fraction)
    if keeps:
        found = tl.where((found == 0.0) & (magnitude != 0), smallest, found)
    whole = found.to(tl.int32, bitcast=True)
    normal = (whole >> (23 - fraction)) - ((126 + least) << fraction)
    tiny = (found * 2.0 ** (fraction - least)).to(tl.int32)
    code = tl.where((whole >> 23) - 127 >= least, normal, tiny)
    infinite = 0x7F if fraction == 3 else 0x7C
    code = tl.where(finite, code, tl.where(magnitude > 0x7F800000, 0x7F, infinite))
    code |= tl.where(own.to(tl.int32, bitcast=True) < 0, 0x80, 0)
    tl.store(x + place, code.to(tl.uint8), mask=inside)
    return scale.to(tl.uint8)
