"""Which kernels and collectives are taken for a tensor: those of GPUs, or those of CPUs."""

import torch.distributed as dist
from torch import Tensor

REHEARSED_GPUS = "rehearsed_gpus"
"""Name of the back end whose groups stand for those of GPUs in a rehearsal, and move nothing."""


def uses_gpu_kernels(x: Tensor) -> bool:
    """Whether `x` is on a GPU, or has a shape only and stands for a tensor on one."""
    return x.is_cuda or getattr(getattr(x, "fake_mode", None), "stands_for_gpu", False)


def exchanges_in_pairs(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether pairs of ranks exchange messages where the back end's own collectives are slow."""
    return not x.is_cuda and dist.get_backend(group) != REHEARSED_GPUS
