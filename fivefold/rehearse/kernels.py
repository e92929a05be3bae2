"""Runs on shapes, as one operation, what a GPU kernel computes; and in parts what needs several."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.audit.watch import replaced
from fivefold.model.eight_bit import linear as eight_bit
from fivefold.model.eight_bit.fp8 import Scaled, has_some_kernel, multiply


@contextmanager
def one_kernel_each() -> Iterator[None]:
    """Keeps torch from decomposing operations for which a GPU has one kernel, as it would on a CPU.

    The parts would need memory and launches that a GPU does not need. A log-sum-exp of rows is
    decomposed, however, since torch holds the exponentials of all its inputs.
    """
    with (
        replaced(F, "rms_norm", _rms_norm),
        replaced(Tensor, "logsumexp", _log_sum_exp),
        replaced(eight_bit, "multiply", _multiply),
    ):
        yield


def _multiply(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """As on a GPU that multiplies 8-bit floats with such scales, if any does."""
    if dtype == torch.bfloat16 and has_some_kernel(a, b):
        return a.bits.new_empty(len(a.bits), len(b.bits), dtype=dtype)
    return multiply(a, b, dtype, fast=fast)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None, epsilon: float) -> Tensor:
    y: Tensor = _Norm.apply(x, weight)
    return y


def _log_sum_exp(x: Tensor, dim: int) -> Tensor:
    if not x.shape[dim]:  # a rank with padding of the vocabulary alone
        return x.sum(dim).log_()
    most = x.amax(dim, keepdim=True)
    return (x - most).exp_().sum(dim).log_().add_(most.squeeze(dim))


class _Norm(torch.autograd.Function):
    """Saves x, weight and one fp32 statistic for each row, as `torch._fused_rms_norm` does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=wide))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight)
