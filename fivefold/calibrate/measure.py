"""Measures kernels, copies and collectives on one rank, with all ranks working at once."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.counts.messages import wire_bytes
from fivefold.mesh.collectives import all_gather, all_reduce, reduce_scatter

SECONDS = 0.25  # time spent on each figure, with at least three calls
SUSTAINED_SECONDS = 3.0  # time of multiplying after which clocks have settled

# Rows, columns and depth of the products that transformer layers are made of, small to large.
SHAPES: Mapping[str, tuple[tuple[int, int, int], ...]] = {
    "cpu": ((256, 256, 256), (512, 512, 512), (512, 2048, 512), (1024, 1024, 1024)),
    "cuda": (
        (2048, 2048, 2048),
        (4096, 4096, 1024),
        (4096, 4096, 4096),
        (8192, 4096, 8192),
        (8192, 14336, 4096),
        (16384, 8192, 8192),
    ),
}
SEQUENCE: Mapping[str, int] = {"cpu": 1024, "cuda": 8192}
HEADS, HEAD_DIM = 8, 128
BUFFER: Mapping[str, int] = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes that no cache holds
MESSAGES = tuple(4096 << shift for shift in (0, 4, 8, 12))  # 4 KB to 16 MB


@dataclass(frozen=True)
class Sample:
    """One measurement.

    Attributes:
        note: description of the operation.
        amount: its FLOPs or bytes, or the number of its kernels.
        seconds: seconds that it took.
        hops: messages that it sends one after the other, if it is a collective.
    """

    note: str
    amount: float
    seconds: float
    hops: float = 1.0

    @property
    def rate(self) -> float:
        """FLOPs, bytes or kernels per second."""
        return self.amount / self.seconds

    @property
    def each(self) -> float:
        """Seconds of one kernel."""
        return self.seconds / self.amount


def clock(call: Callable[[], object], device: torch.device, group: dist.ProcessGroup) -> float:
    """Typical seconds of a call that all ranks of `group` make at the same time.

    The median, or on CPUs the mean: ranks that share a core run in turns, and most calls of a small
    operation end within a turn, as if no other rank were there.
    """
    call()
    once = _timed(call, device)
    slowest = torch.tensor(once, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    times = max(3, min(200, int(SECONDS / slowest.item())))
    dist.barrier(group)
    found = [_timed(call, device) for _ in range(times)]
    return statistics.mean(found) if device.type == "cpu" else statistics.median(found)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    start = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - start


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmuls(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[Sample, ...]:
    """Measure products [m, k] x [k, n] with all ranks working."""
    samples = []
    for m, n, k in SHAPES[device.type]:
        a = torch.randn(m, k, device=device).to(dtype)
        b = torch.randn(n, k, device=device).to(dtype)
        seconds = clock(partial(F.linear, a, b), device, group)
        samples.append(Sample(f"{m} x {n} x {k}", 2.0 * m * n * k, seconds))
    return tuple(samples)


def sustained(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[float, float]:
    """The share of the best product's rate that is sustained, and the relative spread of its time.

    The operands change from call to call, as in training, so that they are not cached, and clocks
    have time to slow down with power and heat. The spread is the standard deviation of blocks of
    calls divided by their mean, the largest of all ranks.
    """
    m, n, k = SHAPES[device.type][-1]
    inputs = [torch.randn(m, k, device=device).to(dtype) for _ in range(8)]
    weights = [torch.randn(n, k, device=device).to(dtype) for _ in range(8)]

    def block() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            F.linear(x, weight)

    burst = clock(lambda: F.linear(inputs[0], weights[0]), device, group)
    blocks = torch.tensor(
        [max(4, int(SUSTAINED_SECONDS / (8 * burst)))], dtype=torch.int64, device=device
    )
    dist.all_reduce(blocks, op=dist.ReduceOp.MIN, group=group)
    times = [_timed(block, device) for _ in range(int(blocks.item()))]
    mean = statistics.mean(times)
    spread = torch.tensor(statistics.stdev(times) / mean, dtype=torch.float64, device=device)
    dist.all_reduce(spread, op=dist.ReduceOp.MAX, group=group)
    return min(1.0, 8 * burst / mean), spread.item()


def attention(
    device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[Sample, ...]:
    """Measure causal attention on the longest sequence: its forward, and its backward.

    A fused backward computes 2.5 times the products of its forward.
    """
    length = SEQUENCE[device.type]
    shape = (1, HEADS, length, HEAD_DIM)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    grad = torch.ones_like(out)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    flops = 4.0 * length * length * HEADS * HEAD_DIM / 2
    note = f"{length} tokens"
    return (
        Sample(f"{note}, forward", flops, clock(forward, device, group)),
        Sample(f"{note}, backward", 2.5 * flops, clock(backward, device, group)),
    )


def memory_traffic(device: torch.device, group: dist.ProcessGroup) -> Sample:
    """Measure an elementwise operation, one read and one write, on more bytes than a cache has."""
    x = torch.zeros(BUFFER[device.type] // 4, device=device)
    y = torch.empty_like(x)
    return Sample(
        "read and write",
        2.0 * BUFFER[device.type],
        clock(lambda: torch.neg(x, out=y), device, group),
    )


def launch(device: torch.device, group: dist.ProcessGroup) -> Sample:
    """Measure an operation on almost no data, which shows the cost of a launch."""
    x = torch.zeros(8, device=device)
    calls = 100

    def many() -> None:
        for _ in range(calls):
            x.add_(1.0)

    return Sample("operations", calls, clock(many, device, group))


def host_copy(device: torch.device, group: dist.ProcessGroup) -> Sample:
    """Measure a copy from the device to host memory, pinned if the device is a GPU."""
    size = BUFFER[device.type] // 4
    x = torch.zeros(size // 4, device=device)
    host = torch.empty_like(x, device="cpu", pin_memory=device.type == "cuda")
    return Sample("to the host", size, clock(lambda: host.copy_(x), device, group))


def collectives(device: torch.device, group: dist.ProcessGroup) -> tuple[Sample, ...]:
    """Measure gathers, scatters and all-reduces of several sizes, in bytes sent by a rank."""
    ranks = group.size()
    ring, tree = ranks - 1, 2 * log2(ranks)  # hops, as `predict.times.communication` has them
    ways: Mapping[str, Callable[[Tensor], object]] = {
        "all_gather": lambda x: all_gather(x[: x.numel() // ranks], group),
        "reduce_scatter": lambda x: reduce_scatter(x, group),
        "all_reduce": lambda x: all_reduce(x, group),
    }
    samples = []
    for name, call in ways.items():
        for size in MESSAGES:
            x = torch.zeros(size // 4 // ranks * ranks, device=device)
            seconds = clock(partial(call, x), device, group)
            sent = wire_bytes(name, x.numel() * x.element_size(), ranks)
            hops = min(2 * ring, tree) if name == "all_reduce" else ring
            samples.append(Sample(f"{name} over {ranks}", sent, seconds, hops))
    return tuple(samples)


def line(samples: Sequence[Sample]) -> tuple[float, float]:
    """Fit `seconds = latency x hops + amount / rate`; return the latency of a hop and the rate.

    Least squares of the relative error, so that small and large calls count equally; neither result
    is negative.
    """
    weights = [1 / s.seconds for s in samples]
    hops = [v * s.hops for v, s in zip(weights, samples, strict=True)]
    sizes = [v * s.amount for v, s in zip(weights, samples, strict=True)]
    w, wx, wxx = _dot(hops, hops), _dot(hops, sizes), _dot(sizes, sizes)
    wy, wxy = sum(hops), sum(sizes)
    slope = (w * wxy - wx * wy) / (w * wxx - wx * wx)
    latency = (wy - slope * wx) / w
    largest = max(samples, key=lambda s: s.amount)
    if slope <= 0:
        return 0.0, largest.rate
    return (latency, 1 / slope) if latency >= 0 else (0.0, wxx / wxy)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
