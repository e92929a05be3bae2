"""Normalisations over the last dimension, with an RMSNorm for CPUs, where PyTorch does not fuse
it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.mesh.device import runs_triton, uses_gpu_kernels
from fivefold.model.leaves import local
from fivefold.model.traced import result


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, offset: float = 0.0) -> Tensor:
    """x divided by its root mean square over the last dim, times offset + `weight`, if there is
    one; in at least fp32."""
    y: Tensor = _RMSNorm.apply(x, weight, epsilon, offset)
    return y


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for CPUs, where PyTorch does not fuse it: its backward is four times as fast."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, offset: float
    ) -> Tensor:
        wide, scale = _wide_and_scale(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.offset = offset
        if weight is None:
            return result((wide * scale).to(x.dtype))
        factor = weight.to(scale.dtype) + offset if offset else weight
        return result((wide * scale).mul_(factor).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad_y.to(scale.dtype)
        if weight is None:
            normed = x * scale
            mean = torch.linalg.vecdot(grad, normed).div_(x.shape[-1]).unsqueeze(-1)
            grad_x = grad.addcmul(normed, mean, value=-1.0).mul_(scale)
            return grad_x.to(x.dtype), None, None, None
        factor = weight.to(scale.dtype)
        factor = factor + ctx.offset if ctx.offset else factor
        normed = x * scale
        products = (grad * normed).flatten(0, -2)
        grad_weight = products.sum(0)
        mean = (products @ factor).div_(x.shape[-1]).view(scale.shape)
        grad_x = (grad * factor).addcmul_(normed, mean, value=-1.0).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None


def _wide_and_scale(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x in at least fp32, and one over its root mean square over the last dim, [..., 1]."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide, inverse_root_mean_square(wide, epsilon)


def inverse_root_mean_square(x: Tensor, epsilon: float) -> Tensor:
    """[..., 1]: one over the root mean square of x over the last dim."""
    mean_square = torch.linalg.vecdot(x, x).div_(x.shape[-1]).unsqueeze(-1)
    return mean_square.add_(epsilon).rsqrt_()


def unit_norm(x: Tensor, epsilon: float) -> Tensor:
    """x divided by its root mean square over the last dim; statistics in at least fp32."""
    y: Tensor = _UnitNorm.apply(x, epsilon)
    return y


class _UnitNorm(torch.autograd.Function):
    """Saves its result, which attention keeps anyway, instead of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float) -> Tensor:
        wide, scale = _wide_and_scale(x, epsilon)
        y = result((wide * scale).to(x.dtype))
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        grad, normed = grad_y.to(scale.dtype), y.to(scale.dtype)
        mean = torch.linalg.vecdot(grad, normed).div_(y.shape[-1]).unsqueeze(-1)
        return grad.addcmul(normed, mean, value=-1.0).mul_(scale).to(grad_y.dtype), None


class LayerNorm(nn.Module):
    """Layer normalisation over the last dim, with a weight and a bias or without.

    Attributes:
        offset: number added to the weight.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        features: int,
        epsilon: float,
        offset: float = 0.0,
        *,
        weighted: bool = True,
        biased: bool = True,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features)) if weighted else None
        self.bias = nn.Parameter(torch.empty(features)) if biased else None
        self.epsilon, self.offset = epsilon, offset

    def forward(self, x: Tensor) -> Tensor:
        """x normalised over the last dim."""
        weight = None if self.weight is None else local(self.weight)
        factor = weight + self.offset if weight is not None and self.offset else weight
        bias = None if self.bias is None else local(self.bias)
        return F.layer_norm(x, x.shape[-1:], factor, bias, self.epsilon)


class RMSNorm(nn.Module):
    """x divided by its root mean square over the last dim (Zhang and Sennrich 2019).

    Attributes:
        weight: [F], what that is multiplied by; None: nothing.
        offset: number added to the weight, in the type of the statistics.
    """

    weight: nn.Parameter | None

    def __init__(
        self, features: int, epsilon: float, offset: float = 0.0, *, weighted: bool = True
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features)) if weighted else None
        self.epsilon, self.offset = epsilon, offset

    @property
    def factor(self) -> Tensor | None:
        """The weight on this rank."""
        return None if self.weight is None else local(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x normalised over the last dim, with statistics in at least fp32."""
        weight = self.factor
        if not self.offset and uses_gpu_kernels(x):
            return F.rms_norm(x, x.shape[-1:], weight, self.epsilon)
        if runs_triton(x):
            from fivefold.model.kernels import norms as norm_kernels

            return norm_kernels.norm(x, weight, self.epsilon, self.offset)
        return rms_norm(x, weight, self.epsilon, self.offset)

    def of_sum(self, x_TH: Tensor, onto_TH: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """onto + scale x, and the norm of that, in one GPU kernel (`runs_triton`)."""
        from fivefold.model.kernels import norms as norm_kernels

        rest = self.epsilon, self.offset, scale
        return norm_kernels.sum_and_norm(x_TH, onto_TH, self.factor, *rest)


def make_norm(model: ModelConfig) -> LayerNorm | RMSNorm:
    """The model's kind of normalisation over the residual stream's features."""
    return _norm_of(model, model.hidden_size, model.norm_epsilon, model.norm_elementwise_affine)


def latent_norm(model: ModelConfig, features: int) -> LayerNorm | RMSNorm:
    """The model's kind of normalisation over the features of a latent."""
    return _norm_of(model, features, model.latent_epsilon, True)


def key_norm(model: ModelConfig, features: int) -> LayerNorm:
    """The norm of an indexer's keys, a LayerNorm in every model."""
    return LayerNorm(features, model.latent_epsilon, _offset(model))


def _norm_of(
    model: ModelConfig, features: int, epsilon: float, weighted: bool
) -> LayerNorm | RMSNorm:
    of = features, epsilon, _offset(model)
    if model.normalization == "RMSNorm":
        return RMSNorm(*of, weighted=weighted)
    return LayerNorm(*of, weighted=weighted, biased=weighted and model.layernorm_bias)


def rms_norm_of(model: ModelConfig, features: int) -> RMSNorm:
    """An RMSNorm, as the norms of queries and keys always are."""
    return RMSNorm(features, model.norm_epsilon, _offset(model))


def _offset(model: ModelConfig) -> float:
    return 1.0 if model.apply_layernorm_1p else 0.0
