"""What joined products, and products that add to a sum, save: CPU time beside separate ones.

    python -m benchmarks.products [--rounds 7]

fp32, one thread; each pair in turn, so that a busy machine disturbs both alike. `one`: queries,
keys and values (or gate and up) by one product, forward, dX and dW, over three (two);
`copied`: the same, with the weights copied next to each other first. `onto`: a weight gradient that
is added to a sum by its product, over a product and a sum. Prints medians of the ratios.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.turns import cpu_ratio, in_turns

JOINED = {"qkv": (512, (512, 128, 128)), "gate, up": (512, (1536, 1536))}
SUMS = ((512, 512, 1536), (512, 1024, 4096), (128, 1024, 4096))


def apart(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> object:
    """A product for each weight."""
    outputs = [F.linear(x, weight) for weight in weights]
    grad_x = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        grad_x.addmm_(grad, weight)
    return outputs, grad_x, [grad.t() @ x for grad in grads]


def together(x: Tensor, weight: Tensor, grad: Tensor) -> object:
    """One product for all."""
    return F.linear(x, weight), grad @ weight, grad.t() @ x


def copied(x: Tensor, weights: Sequence[Tensor], grads: Sequence[Tensor]) -> object:
    """One product for all, of weights that lie apart, in the forward and in the backward."""
    output, grad = F.linear(x, torch.cat([*weights])), torch.cat([*grads], dim=1)
    return output, grad @ torch.cat([*weights]), grad.t() @ x


def added_by_it(total: Tensor, grad: Tensor, x: Tensor) -> object:
    """A product that adds to its sum."""
    return total.addmm_(grad.t(), x)


def added(total: Tensor, grad: Tensor, x: Tensor) -> object:
    """A product, and a sum."""
    return total.add_(grad.t() @ x)


def ratio(rounds: int, first: Callable[[], object], second: Callable[[], object]) -> float:
    """Median of the time of the first over that of the second."""
    found = in_turns({"first": first, "second": second}, rounds)
    return cpu_ratio(found["first"], found["second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for name, (size, outputs) in JOINED.items():
        x, weights = torch.randn(512, size), [torch.randn(each, size) for each in outputs]
        grads = [torch.randn(512, each) for each in outputs]
        weight, grad = torch.cat(weights), torch.cat(grads, dim=1)
        three = partial(apart, x, weights, grads)
        one = ratio(rounds, partial(together, x, weight, grad), three)
        moved = ratio(rounds, partial(copied, x, weights, grads), three)
        print(f"{name}: one {one:.3f}, copied {moved:.3f}")
    for tokens, inputs, features in SUMS:
        grad, x = torch.randn(tokens, features), torch.randn(tokens, inputs)
        total = torch.zeros(features, inputs)
        onto = ratio(rounds, partial(added_by_it, total, grad, x), partial(added, total, grad, x))
        print(f"{tokens} x {inputs} -> {features}: onto {onto:.3f}")


if __name__ == "__main__":
    main()
