"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1.

Features are paired as Hugging Face pairs them: feature i with feature i + D/2.
"""

from dataclasses import dataclass
from math import pi
from typing import Any

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig


def frequencies(model: ModelConfig, device: torch.device | None = None) -> Tensor:
    """Angle per position of each of the D/2 feature pairs, in radians, fp64.

    Llama 3.1's scaling divides the frequencies of wavelengths longer than the original context by
    a factor, leaves short wavelengths alone, and interpolates in between.
    """
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float64, device=device)
    plain = model.rotary_base ** (-exponents / model.head_dim)
    if not model.use_rope_scaling:
        return plain
    turns_in_context = model.rope_original_max_position_embeddings * plain / (2 * pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    kept = ((turns_in_context - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (kept + (1.0 - kept) / model.rope_scaling_factor)


@dataclass(frozen=True)
class RotaryTables:
    """cos [B, S, 1, D] and sin [B, S, 1, D/2] of every token's angles; made in fp64, then cast."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def at(model: ModelConfig, positions_BS: Tensor, dtype: torch.dtype) -> "RotaryTables":
        """The tables for these positions."""
        angles = positions_BS[:, :, None, None] * frequencies(model, positions_BS.device)
        return RotaryTables(angles.cos().to(dtype).repeat(1, 1, 1, 2), angles.sin().to(dtype))

    def rotate(self, x_BSND: Tensor) -> Tensor:
        """Turn each feature pair of each head by its token's angle."""
        rotated: Tensor = _Rotate.apply(x_BSND, self.cos, self.sin)
        return rotated


class _Rotate(torch.autograd.Function):
    """A rotation needs nothing of its input for the backward: it is turned back by the angle."""

    @staticmethod
    def forward(ctx: Any, x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x_BSND, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad_BSND: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad_BSND, cos, sin, -1.0), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    y = x * cos
    y_first, y_second = y.chunk(2, dim=-1)
    y_first.addcmul_(second, sin, value=-sign)
    y_second.addcmul_(first, sin, value=sign)
    return y
