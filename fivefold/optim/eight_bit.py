"""Moments in 8 bits: blocks of a row with a scale each, rounded stochastically.

A scale is a power of two (as in the OCP's Microscaling Formats, 2023), so that multiplying by it
rounds nothing. The first moment is in e4m3. The second moment spans twice as many powers of two,
since it is a square, and is in e5m2 (Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
ICLR 2022, and Peng et al., FP8-LM, 2023, say what happens where small ones become 0: steps
explode). So none becomes 0: what is less than the smallest number of its block becomes that number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fivefold.config.training import BLOCK

_BIAS = 127  # of exponents of fp32, and of scales
_FRACTION = 23  # bits of fp32 that are no exponent


@dataclass(frozen=True)
class EightBits:
    """A format of moments.

    Attributes:
        dtype: torch's name of it.
        fraction: bits of a number besides sign and exponent.
        least: exponent of the smallest number with all its bits.
        top: exponent of the largest number of a block, with room to round up.
        keeps_positive: whether no positive number becomes 0.
    """

    dtype: torch.dtype
    fraction: int
    least: int
    top: int
    keeps_positive: bool

    def pack(self, x_RC: Tensor, bits_RC: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows stochastically.

        Args:
            x_RC: floating point; fp64 is first rounded to fp32. Its first column starts a block.
            bits_RC: int64, of which the last 16 bits are random.

        Returns:
            [R, C] numbers in `dtype`, and [R, C / BLOCK] scales, as exponents of 2 plus 127, uint8.
        """
        wide_RC = x_RC.float()
        exponent_RB = _exponent(_blocks(wide_RC.abs()).amax(-1)) - self.top
        scales_RB = (exponent_RB + _BIAS).clamp_(1, 2 * _BIAS)
        scaled_RC = wide_RC / _spread(_power(scales_RB - _BIAS), x_RC.shape[1])
        size_RC = scaled_RC.abs()
        unit_RC = _power(_exponent(size_RC).clamp_(min=self.least) - self.fraction)
        random_RC = (bits_RC & 0xFFFF).float() * 2.0**-16
        found_RC = ((size_RC / unit_RC) + random_RC).floor_().mul_(unit_RC)
        if self.keeps_positive:
            smallest = 2.0 ** (self.least - self.fraction)
            found_RC = torch.where((found_RC == 0) & (wide_RC != 0), smallest, found_RC)
        found_RC = torch.where(size_RC.isfinite(), found_RC.copysign(scaled_RC), scaled_RC)
        return found_RC.to(self.dtype), scales_RB.to(torch.uint8)

    def unpack(self, packed_RC: Tensor, scales_RB: Tensor) -> Tensor:
        """[R, C] in fp32."""
        scales = _power(scales_RB.int() - _BIAS)
        return packed_RC.float() * _spread(scales, packed_RC.shape[1])


FORMATS = {
    "exp_avg": EightBits(torch.float8_e4m3fn, 3, least=-6, top=7, keeps_positive=False),
    "exp_avg_sq": EightBits(torch.float8_e5m2, 2, least=-14, top=14, keeps_positive=True),
}


def _blocks(x_RC: Tensor) -> Tensor:
    """[R, B, BLOCK], padded with zeros."""
    rest = -x_RC.shape[1] % BLOCK
    return (pad(x_RC, (0, rest)) if rest else x_RC).unflatten(1, (-1, BLOCK))


def _spread(scales_RB: Tensor, columns: int) -> Tensor:
    """[R, C]: the scale of each element's block."""
    return scales_RB.repeat_interleave(BLOCK, 1)[:, :columns]


def _exponent(x: Tensor) -> Tensor:
    """Exponents of positive numbers of fp32, int32; that of 0 is -127."""
    return (x.view(torch.int32) >> _FRACTION) - _BIAS


def _power(exponent: Tensor) -> Tensor:
    """2 to the given int32 powers, from -126 to 127."""
    return ((exponent + _BIAS) << _FRACTION).view(torch.float32)
