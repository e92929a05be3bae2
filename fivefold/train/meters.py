"""What a step costs: the peak of the device, and the memory and time used."""

import resource
import sys

import torch

from fivefold.audit.holdings import DeviceLimit
from fivefold.data.loader import Loader
from fivefold.description.shape import training_flops
from fivefold.hardware import peak_flops
from fivefold.train.engine import Engine
from fivefold.train.metrics import StepMetrics
from fivefold.train.step_result import StepResult


def peak_memory(device: torch.device, account: object = None) -> int:
    """Peak memory in bytes: on a GPU from the allocator, on a CPU from the `account` of its tensors
    if there is one, else of the process."""
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


def step_metrics(
    engine: Engine, loader: Loader, step: int, result: StepResult, seconds: float
) -> StepMetrics:
    """The metrics of a step that has just been taken, with the loader's latest batch."""
    config = engine.layout.config
    tokens = loader.batch_samples * config.training.seq_length
    per_token = training_flops(config.model, config.attended_length).total
    return StepMetrics(
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        lr=result.lr,
        tokens=tokens,
        tokens_total=loader.consumed_samples * config.training.seq_length,
        seconds=seconds,
        world_size=engine.layout.grid.world_size,
        flops=float(per_token) * tokens,
        peak_flops=device_peak(engine.device, config.training.precision),
        memory_bytes=peak_memory(engine.device, engine.model.limited),
        data_wait_seconds=loader.data_wait_s,
        extra=result.extra,
        routing=result.routing,
    )
