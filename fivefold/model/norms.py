"""Normalisations over the last dim, with RMSNorm for CPUs, where PyTorch does not fuse it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config.model import ModelConfig
from fivefold.mesh.device import uses_gpu_kernels
from fivefold.model.leaves import local
from fivefold.model.traced import result


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x divided by its root mean square over the last dim, times `weight`; in at least fp32."""
    y: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return y


class _RMSNorm(torch.autograd.Function):
    """RMSNorm for CPUs, where PyTorch does not fuse it: its backward is four times as fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).unsqueeze(-1)
        scale = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return result((wide * scale).mul_(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grad_y.to(scale.dtype)
        wide_weight = weight.to(scale.dtype)
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0)
        mean = (product @ wide_weight).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * wide_weight).addcmul_(normed, mean, value=-1.0).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class LayerNorm(nn.Module):
    """Layer normalisation over the last dim, with a bias."""

    def __init__(self, features: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x normalised over the last dim."""
        weight = local(self.weight)
        return F.layer_norm(x, weight.shape, weight, local(self.bias), self.epsilon)


class RMSNorm(nn.Module):
    """x divided by its root mean square over the last dim (Zhang and Sennrich 2019)."""

    def __init__(self, features: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x normalised over the last dim, with statistics in at least fp32."""
        weight = local(self.weight)
        if uses_gpu_kernels(x):
            return F.rms_norm(x, weight.shape, weight, self.epsilon)
        return rms_norm(x, weight, self.epsilon)

    def of_sum(self, x_TH: Tensor, onto_TH: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """onto + scale x, and that normalised, in one kernel of a GPU (`runs_triton`)."""
        from fivefold.model import norm_kernels

        return norm_kernels.sum_and_norm(x_TH, onto_TH, scale, local(self.weight), self.epsilon)


def make_norm(model: ModelConfig, features: int | None = None) -> LayerNorm | RMSNorm:
    """The model's kind of normalisation; by default over the residual stream's features."""
    kind = LayerNorm if model.normalization == "LayerNorm" else RMSNorm
    return kind(features or model.hidden_size, model.norm_epsilon)
