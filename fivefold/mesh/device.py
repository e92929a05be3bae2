"""Chooses between the kernels and collectives of GPUs and of CPUs for a tensor."""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REHEARSED_GPUS = "rehearsed_gpus"
"""Name of the back end for rehearsals: its groups stand for those of GPUs, and move nothing."""

TRITON: Mapping[str, Any] = MappingProxyType({"enable_fp_fusion": True})
"""Options of kernels that do not say otherwise. Triton 3.10 fuses no products and sums unless it is
told to, and 3.9 warns of that."""


def uses_gpu_kernels(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or has a shape only and stands for a tensor on one."""
    return x.is_cuda or getattr(getattr(x, "fake_mode", None), "stands_for_gpu", False)


def runs_triton(x: Tensor) -> bool:
    """Whether our Triton kernels run for `x`, or would on the GPU that it stands for; code that
    torch.compile traces does not use them."""
    found = _has_triton() or not x.is_cuda
    return uses_gpu_kernels(x) and not torch.compiler.is_compiling() and found


def without_waiting(x: Tensor, device: torch.device) -> Tensor:
    """A copy of a host's tensor on a device; the host does not wait for a GPU."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply `x` in place by a scalar of a wider type, rounding only the product.

    A GPU first rounds a scalar without dims to the type of `x`, by up to 0.2 % to bf16. A CPU does
    not, and would widen `x` in memory for one with dims.
    """
    return x.mul_(factor.view(1) if uses_gpu_kernels(x) else factor)


def launch(
    kernel: Any, grid: tuple[int, ...], x: Tensor, /, *arguments: Any, **constants: Any
) -> None:
    """Run one of our Triton kernels, which writes into given tensors; without values, do nothing.

    Args:
        kernel: the kernel.
        grid: its programs along each axis.
        x: its first argument.
        arguments: the others.
        constants: arguments that it is compiled for, and options of Triton.
    """
    if x.is_cuda or not uses_gpu_kernels(x):  # Triton's interpreter takes tensors on a CPU
        kernel[grid](x, *arguments, **{**TRITON, **constants})
    else:
        _noted(x)


def _nothing(x: Tensor) -> None:
    pass


_noted = torch.library.custom_op(
    "fivefold::launch", _nothing, mutates_args=(), schema="(Tensor x) -> ()"
)
_noted.register_fake(_nothing)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def exchanges_in_pairs(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether ranks exchange messages in pairs, because the back end's own collectives are slow."""
    return not x.is_cuda and dist.get_backend(group) != REHEARSED_GPUS
