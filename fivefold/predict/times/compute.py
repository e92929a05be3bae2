"""Predicts the times of kernels: multiplications, attention, and elementwise kernels.

A multiplication [m, k] x [k, n] is cut into tiles, which run on the multiprocessors in waves. Its
time is the larger of the time of the arithmetic, with the last wave partly empty, and the time to
read its operands from memory. The time of an elementwise kernel follows from its memory traffic.
"""

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.config.model import ModelConfig
from fivefold.config.training import ELEMENT_BYTES
from fivefold.hardware import Gpu

V = TypeVar("V", float, NDArray[np.float64])
"""Seconds or bytes: of one layout, or arrays of many, whose bounds are computed by these functions.
"""

# Tiles that libraries choose from, (rows, columns, share of the full rate that they reach).
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
_EXPONENTIAL = 32  # features of a head whose products take as long as a score's exponential
_ALIGNED = 16  # bytes that tensor cores read at once
_PADDED_HEAD = 32  # fused attention has kernels for its multiples, as in FlashAttention's source
_FILL = 2.8e-6  # seconds in which a tile's pipeline fills and drains, whatever the rate between
_UNFUSED_GATE = 5 / 3  # activation, then product, as separate kernels
_XIELU = 23.0, 44.0  # PyTorch's kernels in turn, as `model.xielu` has them: nothing fuses them
ELEMENT: Mapping[str, float] = {**ELEMENT_BYTES, "fp8": 1.0, "fp4": 0.5}
RECIPE_RATE = {
    "delayed": 1.0,
    "tensorwise": 1.0,
    "mxfp8": 0.95,
    "blockwise": 0.85,
    "rowwise": 0.6,
    "nvfp4": 0.8,
}
"""Rate of each 8- or 4-bit recipe, relative to one scale per tensor in the same format."""
CAST = {
    "delayed": 4.0,
    "tensorwise": 5.0,
    "mxfp8": 4.0,
    "blockwise": 4.0,
    "rowwise": 5.0,
    "nvfp4": 6.0,
}
"""Bytes to narrow an element of an operand: read in bf16, written along and across. The largest of
its tensor or row, where earlier steps do not tell it, is half found by the kernel before; four bits
take a rotation."""


class Phases(NamedTuple):
    """Seconds of a microbatch: forward, dX and dW; a tuple, since a search makes a million."""

    forward: float = 0.0
    dx: float = 0.0
    dw: float = 0.0

    def __add__(self, other: "Phases") -> "Phases":  # type: ignore[override]
        (forward, dx, dw), (more, also, too) = self, other
        return Phases(forward + more, dx + also, dw + too)

    def __mul__(self, times: float) -> "Phases":  # type: ignore[override]
        return Phases(self.forward * times, self.dx * times, self.dw * times)

    @property
    def total(self) -> float:
        """The sum of all three phases."""
        return self.forward + self.dx + self.dw


@lru_cache(maxsize=1 << 16)
def matmul(
    gpu: Gpu, m: int, n: int, k: int, precision: str, batch: int = 1, result: float = 2.0
) -> float:
    """Seconds of `batch` multiplications [m, k] x [k, n] that run as one kernel.

    Args:
        gpu: the GPU.
        m: rows of the result.
        n: columns of the result.
        k: depth.
        precision: precision of the operands: bf16, fp16, fp8, fp4, fp32, fp64.
        batch: number of equal multiplications (of experts, for example).
        result: bytes read and written for each element of the result.
    """
    if not min(m, n, k, batch):
        return 0.0
    units = gpu.multiprocessors
    best = 0.0
    for rows, columns, share in _TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        waves = ceil(tiles / units)
        filled = batch * m * n / (waves * units * rows * columns)
        best = max(best, filled * share)
    size = ELEMENT[precision]
    sustained = gpu.sustained_narrow if size < 2 else gpu.sustained
    rate = gpu.matmul.of(precision) * sustained
    depth = _FILL * rate / units / (2 * _TILES[0][0] * _TILES[0][1])  # features of k, in that time
    rate *= best * k / (k + depth)
    traffic = batch * ((m + n) * k * size + m * n * result)
    arithmetic = 2.0 * batch * m * n * k / rate
    return max(arithmetic, traffic / _memory_rate(gpu)) + gpu.launch


def elementwise(gpu: Gpu, size: V, kernels: int = 1) -> V:
    """Seconds to move `size` bytes to and from memory in this number of kernels."""
    return size / _memory_rate(gpu) + kernels * gpu.launch


def activation_traffic(model: ModelConfig) -> tuple[float, float, float | None]:
    """Elements read and written per result of an MLP's activation, forward and backward, if fused;
    and the factor if it is not (None: the usual factor)."""
    if model.activation_func == "xielu":
        return *_XIELU, 1.0
    return (3, 5, _UNFUSED_GATE) if model.gated_linear_unit else (2, 3, None)


def _memory_rate(gpu: Gpu) -> float:
    return gpu.memory_bandwidth * gpu.memory_efficiency


def attention_share(length: int, head: float) -> float:
    """The rate of attention, relative to long sequences with heads of 128 features.

    Besides its multiplications every score costs an exponential, which matters more for smaller
    heads, and short sequences do not fill the device. Both effects follow the figures of
    FlashAttention-3 (Shah et al., 2024).

    Args:
        length: length of the queries that a kernel sees, in tokens.
        head: features of a head, the mean of queries' and values'.
    """
    multiplied = head / (head + _EXPONENTIAL) * (128 + _EXPONENTIAL) / 128
    return multiplied * length / (length + 384)


def attention(
    gpu: Gpu, flops: float, length: int, precision: str = "bf16", head: float = 128
) -> Phases:
    """Seconds of fused attention; its backward does 2.5 times the arithmetic.

    Args:
        gpu: the GPU.
        flops: FLOPs of the forward; causal attention counts half.
        length: length of the queries that a kernel sees, in tokens.
        precision: precision of the operands, in 16 bits at least; bf16 where others have fewer.
        head: features of a head, the mean of queries' and values'; smaller ones are padded.
    """
    flops *= ceil(head / _PADDED_HEAD) * _PADDED_HEAD / head
    peak = gpu.peak.of(precision) * attention_share(length, head)
    forward = flops / (peak * gpu.attention_forward) + gpu.launch
    backward = 2.5 * flops / (peak * gpu.attention_backward) + 2 * gpu.launch
    return Phases(forward, backward)


def score_matrices(
    gpu: Gpu, batch: int, length: int, dims: tuple[int, int], precision: str
) -> Phases:
    """Attention with its [S, S] scores in memory: products, masked softmax, dropout.

    Args:
        gpu: the GPU.
        batch: number of score matrices: sequences times heads.
        length: length of a sequence, in tokens.
        dims: features of a head of queries, and of values.
        precision: precision of the operands.
    """
    query, value = dims
    aligned = all(size * ELEMENT[precision] % _ALIGNED == 0 for size in dims)
    kind = precision if aligned else "fp32"  # no tensor cores: the units of fp32 multiply
    scores = matmul(gpu, length, length, query, kind, batch)
    mixed = matmul(gpu, length, value, length, kind, batch)
    size = batch * float(length) ** 2
    forward = scores + mixed + elementwise(gpu, 9 * size, 2)
    backward = 2 * (scores + mixed) + elementwise(gpu, 11 * size, 2)
    return Phases(forward, backward)


def overlapped(gpu: Gpu, work: V, hidden: V) -> V:
    """Seconds by which overlapping with `hidden` seconds of communication lengthens `work`.

    It is convex: of sums over parts it is at most the sum of what it is of each part.
    """
    beside = lesser(work, hidden)
    return hidden - beside + gpu.overlap_slowdown * beside


def lesser(a: V, b: V) -> V:
    """The minimum of two numbers, or elementwise of two arrays."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) else min(a, b)


def greater(a: V, b: V | float) -> V:
    """The maximum of two numbers, or elementwise of an array and the other."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) else max(a, b)
