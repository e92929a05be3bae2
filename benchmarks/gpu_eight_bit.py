"""What 8-bit operands and their products take on one device, by recipe, beside bf16.

    python -m benchmarks.gpu_eight_bit [--dry]

The linear layer of 8,192 tokens from 4,096 to 14,336 features: seconds to quantise the input, the
weight (and for dX, its transpose) and the gradient, for the products of output and dX and for that
of dW, and seconds of the three products. Prints a line of JSON for each recipe. `--dry` runs a
small one on a CPU.
"""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_layers import recipes, seconds, tell
from fivefold.model.eight_bit.fp8 import E4M3, RECIPES, Block, Scaled, multiply, quantise

REPEATS, WARMUP = 20, 3
SIZES = {False: (8192, 4096, 14_336), True: (256, 64, 128)}


def rows(dry: bool) -> Iterator[dict[str, Any]]:
    """A row for bf16, then for each recipe."""
    device, (tokens, inputs, outputs) = torch.device("cpu" if dry else "cuda"), SIZES[dry]
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x, grad = torch.randn(tokens, inputs, **kind), torch.randn(tokens, outputs, **kind)
    weight = torch.randn(outputs, inputs, **kind)
    timed = partial(usual, device=device)
    yield {
        "recipe": "bf16",
        "output": timed(lambda: x @ weight.t()),
        "dx": timed(lambda: grad @ weight),
        "dw": timed(lambda: grad.t() @ x),
    }
    for name in recipes(device):
        recipe = RECIPES[name]
        across: Block = recipe.across, recipe.along
        along: Block = recipe.along, recipe.across
        square: Block = recipe.weight_across, recipe.along
        how = {"powers_of_two": recipe.powers_of_two, "exponents": recipe.exponents}

        def made(matrix: Tensor, block: Block, how: Any = how) -> Scaled:
            return quantise(matrix, block, E4M3, **how)

        each = {
            "x": (x, across),
            "weight": (weight, square),
            "weight_t": (weight.t(), square),
            "grad": (grad, across),
            "x_along": (x, along),
            "grad_along": (grad, along),
        }
        found = {f"quantise {which}": timed(partial(made, *given)) for which, given in each.items()}
        held = {which: made(*given) for which, given in each.items()}
        product = partial(multiply, dtype=torch.bfloat16)
        left, right = held["grad_along"].t(), held["x_along"].t()
        yield found | {
            "recipe": name,
            "output": timed(partial(product, held["x"], held["weight"], fast=True)),
            "dx": timed(partial(product, held["grad"], held["weight_t"])),
            "dw": timed(partial(product, left, right)),
        }


def usual(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call among many that follow each other."""
    repeats, warmup = (REPEATS, WARMUP) if device.type == "cuda" else (1, 1)  # a dry run

    def several() -> None:
        for _ in range(repeats):
            work()

    times = [seconds(several, device) for _ in range(warmup + 3)]
    return statistics.median(times[warmup:]) / repeats


if __name__ == "__main__":
    tell(rows, __doc__)
