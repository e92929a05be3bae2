"""Limits how much of its device's memory a run may use."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from fivefold.audit.holdings import DeviceLimit
from fivefold.config.memory import MemoryConfig
from fivefold.optim.optimizer import Optimizer
from fivefold.units import read_bytes


def device_limit(
    memory: MemoryConfig, device: torch.device, weights: Iterable[Tensor], optimizer: Optimizer
) -> AbstractContextManager[object]:
    """The context to enter for each program; empty on a GPU, whose allocator keeps the limit.

    Args:
        memory: settings, with the limit if there is one.
        device: device of the run.
        weights: what lies on it of the weights between steps.
        optimizer: the optimizer, of which a part may lie there.

    Raises:
        TrainingError: on a CPU, weights and optimizer alone take more.
    """
    limit = read_bytes(memory.device_memory_limit or "")
    if limit is None:
        return nullcontext()
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / whole), device)
        return nullcontext()
    there = {
        "weights": weights,
        "optimizer": [*optimizer.device.held(), *optimizer.host.update_buffers()],
    }
    return DeviceLimit(limit, there, optimizer.host.tensors())
