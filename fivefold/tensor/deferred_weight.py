"""The weight gradients that a backward leaves for later, so that dX can leave at once.

Splitting a backward into B (dX) and W (dW) at the autograd graph costs a second walk of it and
fails under recomputation. Here our own linears, and only they, put the computation of dW aside
while `deferring` is set; W runs what was put aside, in the order of the microbatches, so that
every schedule sums the same terms in the same order.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Work:
    """A dW computation that waits.

    Attributes:
        parameters: parameters to whose `grad` it adds. The objects that the forward used: FSDP2
            puts others in their place between forward and W.
        add: does it.
    """

    parameters: tuple[Tensor, ...]
    add: Callable[[], None]


def run_works(works: Sequence[Work]) -> Iterator[Tensor]:
    """Run what was put aside, in order; yields each parameter that has received its part.

    Hooks of autograd do not see these gradients: whoever waits for one listens here.
    """
    for work in works:
        with torch.no_grad():
            work.add()
        yield from work.parameters


class DeferredWeights:
    """Collects the dW computations of one rank.

    Attributes:
        deferring: whether a backward now under way is to leave dW for later.
    """

    def __init__(self) -> None:
        self.deferring = False
        self._works: list[Work] = []

    def put(self, parameters: Sequence[Tensor], add: Callable[[], None]) -> None:
        """Keep a computation that adds to the `grad` of these parameters."""
        self._works.append(Work(tuple(parameters), add))

    @contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """Defer in the block; the list yielded holds what was put aside at its end."""
        works: list[Work] = []
        self.deferring = True
        try:
            yield works
        finally:
            self.deferring = False
            works.extend(self._works)
            self._works = []


def add_to_grad(parameter: Tensor, grad: Tensor, rows: slice | None = None) -> None:
    """Add a local gradient to `parameter.grad` as autograd would.

    Args:
        parameter: plain tensor or DTensor.
        grad: gradient in the shape of the parameter's local part, or of its `rows`.
        rows: rows of the local part to which the gradient belongs; None: all.
    """
    held = parameter.grad
    if held is not None:
        target = held.to_local() if isinstance(held, DTensor) else held
        (target if rows is None else target[rows]).add_(grad)
        return
    if rows is not None:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        whole = grad.new_zeros(local.shape)
        whole[rows] = grad
        grad = whole
    if isinstance(parameter, DTensor):
        grad = DTensor.from_local(
            grad,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    parameter.grad = grad
