"""What an update takes on one device: AdamW's by the type of its state, and Muon's.

    python -m benchmarks.gpu_updates [--dry]

A matrix of as many weights as a layer of Llama-3 8B has: seconds of an update with masters and
moments in fp32 (torch's fused AdamW), and with states of few bits, which are rounded
stochastically: by the kernel of a GPU, and by PyTorch's operations, which CPUs take. And Muon's of
the largest matrix of such a layer, orthogonalised in bf16. Prints a line of JSON for each. `--dry`
is small, on a CPU, where PyTorch's operations do it all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.gpu_eight_bit import usual
from benchmarks.gpu_layers import tell
from fivefold.config.training import OptimizerConfig
from fivefold.counts.matrices import Matrix
from fivefold.optim.adamw import AdamW
from fivefold.optim.muon import MuonAdamW
from fivefold.optim.rounding import NamedElements
from fivefold.optim.schedule import StepRates

SHAPES = {False: (53_248, 4096), True: (64, 64)}
MATRICES = {False: (14_336, 4096), True: (64, 32)}
PLAIN = OptimizerConfig()
FEW = replace(PLAIN, use_precision_aware_optimizer=True, exp_avg_dtype="bf16")
FEW = replace(FEW, exp_avg_sq_dtype="bf16")
EIGHT = replace(FEW, exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8")
KINDS = {
    "fp32": PLAIN,
    "moments in bf16": FEW,
    "moments in 8 bits": EIGHT,
    "moments in bf16, masters as weights and remainders": replace(FEW, store_param_remainders=True),
}


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for each type of state."""
    device, shape = torch.device("cpu" if dry else "cuda"), SHAPES[dry]
    for kind, config in KINDS.items():
        dtype = torch.bfloat16 if config.store_param_remainders else torch.float32
        held = {"w.weight": nn.Parameter(torch.randn(shape, device=device).to(dtype))}
        whole = tuple(slice(0, size) for size in shape)
        places = {name: NamedElements(1, name, shape, whole) for name in held}
        optimizer = AdamW(held, config, places=places)
        grad = torch.randn(shape, device=device)

        def step(held: Any = held, optimizer: AdamW = optimizer, grad: Any = grad) -> None:
            held["w.weight"].grad = grad
            optimizer.step(StepRates(1e-4, 1e-4, 0.1))

        found = {"what": kind, "seconds": usual(step, device)}
        if config.needs_rounding:
            with patch("fivefold.optim.rounding.runs_triton", lambda _: False):
                found["PyTorch"] = usual(step, device)
        yield found
    yield _muon(device, MATRICES[dry])


def _muon(device: torch.device, shape: tuple[int, int]) -> dict[str, Any]:
    """The row of Muon."""
    weight = nn.Parameter(torch.randn(shape, device=device))
    config = OptimizerConfig(optimizer="muon")
    whole = [Matrix("w.weight", shape)]
    optimizer = MuonAdamW({"w.weight": weight}, config, [(whole, 1, None)], torch.bfloat16)
    grad = torch.randn(shape, device=device)

    def step() -> None:
        weight.grad = grad
        optimizer.step(StepRates(1e-4, 1e-4, 0.1))

    what = f"Muon, a matrix of {shape[0]:,} x {shape[1]:,}"
    return {"what": what, "seconds": usual(step, device)}


if __name__ == "__main__":
    tell(rows, __doc__)
