"""The loss with states of few bits: python -m benchmarks.optimizer_states [STEPS [SEEDS [WAY ...]]]

Trains the debug model in bf16 from the same weights on the same data with weights, gradients and
moments in fewer bits, those of weights and moments rounded stochastically, on this machine's CPU.
Each way is named by the bytes that one device keeps for a parameter: g gradients, m and v moments,
w weights without masters. The table is that of `benchmarks.fp8`; the difference of a run in fp32 is
the noise to compare with: it is rounding, too, and nothing else. Then the time of an update: the
median of each way's rounds, which alternate, as a multiple of torch's fused AdamW. With names of
ways, only the first and these are trained, and no update is timed.
"""

import statistics
import time

import torch
from torch import nn

from benchmarks.fp8 import compare, parser
from fivefold.config.training import MomentType, OptimizerConfig
from fivefold.optim.adamw import AdamW
from fivefold.optim.rounding import NamedElements
from fivefold.optim.schedule import StepRates

STEPS, SEEDS, ROUNDS, SIDE = 500, 2, 9, 2048
_AWARE = ("--bf16", "--use-precision-aware-optimizer")
_G = ("--main-grads-dtype", "bf16")
_BF16 = ("--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
_FP8 = ("--exp-avg-dtype", "fp8", "--exp-avg-sq-dtype", "fp8")
_W, _REMAINDERS = ("--main-params-dtype", "bf16"), ("--store-param-remainders",)
WAYS = {
    "18": ("--bf16",),
    "16 g bf16": (*_AWARE, *_G),
    "16 v bf16": (*_AWARE, "--exp-avg-sq-dtype", "bf16"),
    "16 remainders": (*_AWARE, *_REMAINDERS),
    "14 m v bf16": (*_AWARE, *_BF16),
    "12 g m v bf16": (*_AWARE, *_G, *_BF16),
    "12 m v fp8": (*_AWARE, *_FP8),
    "10 g bf16, m v fp8": (*_AWARE, *_G, *_FP8),
    "8 w g m v bf16": (*_AWARE, *_W, *_G, *_BF16),
    "6 w g bf16, m v fp8": (*_AWARE, *_W, *_G, *_FP8),
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
            optimizer.step(StepRates(1e-3, 1e-3, config.weight_decay))
            times.append(time.process_time() - begun)
    base = statistics.median(optimizers[0][2])
    for (first, second), (*_, times) in zip(MOMENTS, optimizers, strict=True):
        median = statistics.median(times)
        print(f"update, m {first}, v {second}: {1e3 * median:6.1f} ms, {median / base:.1f} times")


def main() -> None:
    """Time updates, then train each way with each seed."""
    words = parser(__doc__ or "", STEPS, SEEDS)
    words.add_argument("ways", nargs="*", help="these alone, and no times of updates")
    asked, first = words.parse_args(), next(iter(WAYS))
    if unknown := set(asked.ways) - set(WAYS):
        words.error(f"no way {', '.join(unknown)}; there are: {' | '.join(WAYS)}")
    if not asked.ways:
        update_times()
    ways = {name: WAYS[name] for name in asked.ways or WAYS}
    compare({first: WAYS[first], **ways}, asked.steps, asked.seeds)


if __name__ == "__main__":
    main()
