"""Rotary position embedding (Su et al. 2021), with the frequency scaling of Llama 3.1, YaRN,
LongRoPE and dynamic NTK.

Of R rotary features, feature i is paired with feature i + R/2, as in Hugging Face's Llama, or with
its neighbour, as in the paper (`rotary_interleaved`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, floor, log, pi
from sys import float_info
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.config.model import ModelConfig
from fivefold.config.stretched_rope import base_at, is_long, longrope_scale
from fivefold.mesh.device import runs_triton
from fivefold.model.traced import result


def frequencies(
    model: ModelConfig, device: torch.device | None = None, factors: Tensor | None = None
) -> Tensor:
    """Angle per position of each rotary feature pair, in radians, fp64.

    Llama 3.1's scaling divides the frequencies of wavelengths longer than the original context by
    a factor, keeps short wavelengths, and interpolates in between. For YaRN see `_yarn`. LongRoPE
    (Ding et al. 2024) divides each by a factor of its own, of two lists. Proportional RoPE (Gemma
    4) has the frequencies of a whole head, of which the last ones are 0.

    Args:
        model: the architecture.
        device: where to make it.
        factors: LongRoPE's, fp64 on that device; None without it.
    """
    features = model.rotary_dim
    exponents = torch.arange(0, features, 2, dtype=torch.float64, device=device)
    plain = model.rotary_base ** (-exponents / features)
    if model.rope_type == "proportional":
        plain[int(model.rotary_percent * features // 2) :] = 0.0
    if model.rotary_seq_len_interpolation_factor is not None:
        plain = plain / model.rotary_seq_len_interpolation_factor
    if model.rope_type == "yarn":
        return _yarn(model, plain)
    if model.rope_type == "longrope":
        assert factors is not None, "of one of its two lists"
        return plain / factors
    if not model.use_rope_scaling:
        return plain
    turns_in_context = model.rope_original_max_position_embeddings * plain / (2 * pi)
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    # Where both are one number, as in Llama 4 Scout, each frequency is kept, or stretched fully.
    kept = ((turns_in_context - low) / max(high - low, float_info.min)).clamp(0.0, 1.0)
    return plain * (kept + (1.0 - kept) / model.rope_scaling_factor)


def _yarn(model: ModelConfig, plain: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023): a linear ramp over the pairs, from unscaled to fully scaled."""

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` rotations within the original context."""
        length = model.original_max_position_embeddings / (2 * pi * turns)
        return model.rotary_dim * log(length) / (2 * log(model.rotary_base))

    first, last = pair_of(model.beta_fast), pair_of(model.beta_slow)
    if model.yarn_correction_range_round_to_int:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, model.rotary_dim - 1)
    pairs = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
    stretched = ((pairs - first) / ((last - first) or 1e-3)).clamp(0.0, 1.0)
    return plain * ((1.0 - stretched) + stretched / model.rotary_scaling_factor)


def rotary_scale(model: ModelConfig) -> float:
    """Factor on rotary features: YaRN and LongRoPE sharpen attention over the longer context."""
    if model.rope_type == "longrope":
        return longrope_scale(model)
    if model.rope_type != "yarn":
        return 1.0
    return _growth(model, model.mscale) / _growth(model, model.mscale_all_dim)


def score_scale(model: ModelConfig) -> float:
    """Factor on MLA's scores: YaRN also sharpens the features without positions."""
    return _growth(model, model.mscale_all_dim) ** 2 if model.rope_type == "yarn" else 1.0


def _growth(model: ModelConfig, share: float) -> float:
    return 1.0 + 0.1 * share * log(max(model.rotary_scaling_factor, 1.0))


def temperature(model: ModelConfig, positions_BS: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors [B, S, 1, 1] of queries (`attn_temperature_tuning`), in at least fp32.

    Scalable softmax (Nakanishi 2025), in the steps of Llama 4: attention of later tokens, over more
    keys, stays as sharp.
    """
    wide = torch.promote_types(dtype, torch.float32)
    first = 0 if model.attn_temperature_rotated else 1
    steps = ((positions_BS + first) // model.floor_scale).to(wide)
    return steps.log1p_().mul_(model.attn_scale).add_(1.0)[:, :, None, None]


@dataclass(frozen=True)
class RotaryTables:
    """Tables of every token's angles, for R rotary features; computed in fp64, then cast.

    Attributes:
        cos: [B, S, 1, R].
        sin: [B, S, 1, R/2].
        fused: whether one kernel of a GPU turns all features (`rope_fusion`).
        interleaved: whether neighbours are pairs.
    """

    cos: Tensor
    sin: Tensor
    fused: bool = False
    interleaved: bool = False

    @staticmethod
    def at(
        model: ModelConfig,
        positions_BS: Tensor,
        dtype: torch.dtype,
        fused: bool = False,
        factors: Tensor | None = None,
    ) -> "RotaryTables":
        """The tables for these positions; `factors` as in `frequencies`."""
        turns = frequencies(model, positions_BS.device, factors)
        angles = positions_BS[:, :, None, None] * turns
        scale = rotary_scale(model)
        cos, sin = angles.cos().mul_(scale).to(dtype), angles.sin().mul_(scale).to(dtype)
        both = cos.repeat_interleave(2, -1) if model.rotary_interleaved else cos.repeat(1, 1, 1, 2)
        return RotaryTables(both, sin, fused, model.rotary_interleaved)

    def rotate(self, x_BSND: Tensor, first: int = 0) -> Tensor:
        """Rotate feature pairs of each head, from feature `first` on, by its token's angle."""
        return self._rotated(first, x_BSND, None)[0]

    def rotate_both(self, q_BSND: Tensor, k_BSGD: Tensor) -> tuple[Tensor, Tensor]:
        """`rotate` for queries and keys in one autograd function, so that Python is called once in
        each direction."""
        q, k = self._rotated(0, q_BSND, k_BSGD)
        assert k is not None
        return q, k

    def _rotated(self, first: int, x: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor | None]:
        one, other = _Rotate.apply(self.cos, self.sin, first, self.fused, self.interleaved, x, y)
        return one, other


class Rotary:
    """The rotary positions of a stage.

    Args:
        model: the architecture.
        kinds: kinds of layers that it has, see `shape.rotations`.
        seq_length: tokens of whole rows, by which LongRoPE chooses one of its two lists, and
            dynamic NTK its base: short documents, or prompts, of a model that runs on long rows are
            turned as these are.
    """

    def __init__(self, model: ModelConfig, kinds: Iterable[bool], seq_length: int) -> None:
        each = {local: model.attention_of(local) for local in kinds}
        self._models = {
            local: replace(own, rotary_base=base_at(own, seq_length)) for local, own in each.items()
        }
        long = is_long(model, seq_length)
        self._factors = model.longrope_long_factor if long else model.longrope_short_factor
        self._on_device: Tensor | None = None

    def tables(
        self, positions_BS: Tensor, dtype: torch.dtype, fused: bool
    ) -> dict[bool, RotaryTables]:
        """The tables of each kind of layer: False, or True for those of `is_local`."""
        factors = self._factors_on(positions_BS.device)
        return {
            local: RotaryTables.at(own, positions_BS, dtype, fused, factors)
            for local, own in self._models.items()
        }

    def _factors_on(self, device: torch.device) -> Tensor | None:
        """LongRoPE's factors, copied to the device once: a copy makes the host wait, and a CUDA
        graph cannot record it."""
        if not self._factors:
            return None
        if self._on_device is None or self._on_device.device != device:
            self._on_device = torch.tensor(self._factors, dtype=torch.float64, device=device)
        return self._on_device


class _Rotate(torch.autograd.Function):
    """Saves no input: the gradient is rotated back by the same angle.

    Of one tensor, or two: torch 2.11 does not compile a forward of any number of them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        cos: Tensor,
        sin: Tensor,
        first: int,
        fused: bool,
        interleaved: bool,
        x: Tensor,
        y: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(cos, sin)
        ctx.where = where = _Where(first, interleaved, fused)
        turned = _turn([x] if y is None else [x, y], cos, sin, 1.0, where)
        return result(turned[0]), None if y is None else result(turned[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        there = [grad for grad in grads if grad is not None]
        turned = iter(_turn(there, cos, sin, -1.0, ctx.where))
        return *(None,) * 5, *(grad if grad is None else next(turned) for grad in grads)


class _Where(NamedTuple):
    """First rotary feature, whether neighbours are pairs, and whether one kernel turns them."""

    first: int
    interleaved: bool
    fused: bool


def _turn(
    tensors: list[Tensor], cos: Tensor, sin: Tensor, sign: float, where: _Where
) -> list[Tensor]:
    first, interleaved, fused = where
    if fused and runs_triton(tensors[0]):
        from fivefold.model.kernels import rotary as rotary_kernels

        return rotary_kernels.turn(tensors, cos, sin, sign, first, interleaved=interleaved)
    return [_turn_plainly(x, cos, sin, sign, first, interleaved) for x in tensors]


def _turn_plainly(
    x: Tensor, cos: Tensor, sin: Tensor, sign: float, first: int, interleaved: bool
) -> Tensor:
    features = cos.shape[-1]
    if features == x.shape[-1]:
        y = x * cos
        pairs, y_pairs = x, y
    else:  # features outside the rotary ones stay unchanged
        y, turned = x.clone(), slice(first, first + features)
        pairs, y_pairs = x[..., turned], y[..., turned]
        y_pairs.mul_(cos)
    (one, other), (y_one, y_other) = _of_pairs(pairs, interleaved), _of_pairs(y_pairs, interleaved)
    y_one.addcmul_(other, sin, value=-sign)
    y_other.addcmul_(one, sin, value=sign)
    return y


def _of_pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first feature of each pair, and the second; views."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    one, other = x.chunk(2, dim=-1)
    return one, other
