"""The loss with moments of few bits: python -m benchmarks.optimizer_states [STEPS [SEEDS]]

Trains the debug model in bf16 from the same weights on the same data with moments in fp32 and in
bf16, rounded stochastically, on this machine's CPU. Each way is named by the bytes that one device
keeps for a parameter. The table is that of `benchmarks.fp8`; the difference of a run in fp32 is the
noise to compare with: it is rounding, too, and nothing else. Then the time of an update: the median
of each way's rounds, which alternate, as a multiple of torch's fused AdamW.
"""

import statistics
import sys
import time

import torch
from torch import nn

from benchmarks.fp8 import compare
from fivefold.config.training import MomentType, OptimizerConfig
from fivefold.optim.adamw import AdamW
from fivefold.optim.rounding import NamedElements

STEPS, SEEDS, ROUNDS, SIDE = 500, 2, 9, 2048
_AWARE = ("--bf16", "--use-precision-aware-optimizer")
_GRADIENTS = ("--main-grads-dtype", "bf16")
_BF16 = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
_FP8 = ("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8")
WAYS = {
    "18 bytes": ("--bf16",),
    "16, g in bf16": (*_AWARE, *_GRADIENTS),
    "16, v in bf16": (*_AWARE, "--exp-avg-sq-dtype", "bf16"),
    "14, m, v in bf16": (*_AWARE, *_BF16),
    "12, g, m, v in bf16": (*_AWARE, *_GRADIENTS, *_BF16),
    "12, m, v in fp8": (*_AWARE, *_FP8),
    "10, g bf16, m, v fp8": (*_AWARE, *_GRADIENTS, *_FP8),
    "noise: fp32": ("--precision", "fp32"),
}
MOMENTS: tuple[tuple[MomentType, MomentType], ...] = (("fp32", "fp32"), ("fp32", "bf16"))
MOMENTS = (*MOMENTS, ("bf16", "bf16"), ("fp8", "fp8"))


def update_times() -> None:
    """Print the time of an update of SIDE x SIDE parameters."""
    torch.set_num_threads(1)
    shape, whole = (SIDE, SIDE), (slice(0, SIDE), slice(0, SIDE))
    optimizers = []
    for first, second in MOMENTS:
        held = {"w.weight": nn.Parameter(torch.randn(shape))}
        config = OptimizerConfig(exp_avg_dtype=first, exp_avg_sq_dtype=second)
        places = {"w.weight": NamedElements(1, "w.weight", shape, whole)}
        optimizers.append((held["w.weight"], AdamW(held, config, places=places), list[float]()))
    for _ in range(ROUNDS):
        for parameter, optimizer, times in optimizers:
            parameter.grad = torch.randn(shape)
            begun = time.process_time()
            optimizer.step(1e-3)
            times.append(time.process_time() - begun)
    base = statistics.median(optimizers[0][2])
    for (first, second), (*_, times) in zip(MOMENTS, optimizers, strict=True):
        median = statistics.median(times)
        print(f"update, m {first}, v {second}: {1e3 * median:6.1f} ms, {median / base:.1f} times")


def main(steps: int = STEPS, seeds: int = SEEDS) -> None:
    """Time updates, then train each way with each seed."""
    update_times()
    compare(WAYS, steps, seeds)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
