"""What a device can do at most, and what it has used."""

import resource
import sys

import torch

from fivefold.audit.holdings import DeviceLimit
from fivefold.hardware import peak_flops


def peak_memory(device: torch.device, account: object = None) -> int:
    """Peak memory in bytes: of the allocator on a GPU, on a CPU of the device's tensors by their
    `account` if there is one, else of the process."""
    if isinstance(account, DeviceLimit):
        return account.holdings.peak
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def device_peak(device: torch.device, precision: str) -> float | None:
    """Peak FLOP/s of a known GPU; None on a CPU and on an unknown GPU."""
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)
