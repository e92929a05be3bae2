"""Data parallelism of a stage, as those see it who run the stage, update it and measure it."""

# ruff: noqa: B027 (an empty method is what a stage does that gathers nothing)
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fivefold.data_parallel.away import AwayShards
from fivefold.data_parallel.communication import HierarchicalReduceScatter, NodeGather
from fivefold.tensor.deferred_weight import Sum, Work


class StageGradients(ABC):
    """Sums the gradients of a stage over the ranks that see other tokens.

    Where parameters are never gathered, all that is about gathers does nothing.

    Attributes:
        exchanges: gathers and reductions of ZeRO++.
    """

    exchanges: Sequence[NodeGather | HierarchicalReduceScatter] = ()

    @abstractmethod
    def set_gradient_type(self) -> None:
        """Keep gradients in their type, where parameters have another one."""

    def before_run(self, *, trains: bool) -> None:
        """A program begins; `trains`: with backwards."""

    def before_forward(self, *, last: bool) -> None:
        """`last`: the next forward is that of the stage's last backward, which is whole."""

    @abstractmethod
    def before_backward(self, *, whole: bool, last: bool) -> None:
        """What the next backward computes.

        Args:
            whole: whether it computes all gradients; otherwise deferred weight gradients follow in
                `run_weights`, and nothing is reduced before.
            last: whether no later act of the step adds to this stage's gradients.
        """

    def after_backward(self, *, last: bool) -> None:
        """A backward with weight gradients has ended; `last` as above."""

    def put_aside(self) -> list[Work]:
        """A backward of dX alone has ended: what is to run before its weight gradients."""
        return []

    @abstractmethod
    def run_weights(self, works: list[Work], *, last: bool) -> None:
        """Compute weight gradients that a backward has put aside; `last` as above."""

    @abstractmethod
    def reduce(self) -> None:
        """All weight gradients of the step are there: start summing what is not yet."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for all sums; gradients are then those of the global batch."""

    @abstractmethod
    def waiting_gradients(self) -> Iterator[Tensor]:
        """Memory of gradients that wait for their sum at the end of the step."""

    @abstractmethod
    def sum_of(self, parameter: Tensor, whole: bool) -> Sum | None:
        """Where a parameter's next gradient belongs, as `deferred_weight.SumOf`."""

    def unshard(self) -> None:
        """Start gathering the stage's parameters, which stay until `reshard`."""

    def await_unshard(self) -> None:
        """Wait for the stage's parameters, which the next act reads."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def forget(self) -> None:
        """Keep nothing that was made of weights, as these may change."""

    def settle(self) -> list[Any]:
        """Forget all events of steps and evaluations before, which a capture must not wait for.

        Returns:
            The streams beside the one that computes.
        """
        return []

    def blocks(self) -> Iterator[tuple[list[nn.Parameter], Callable[[], None]]]:
        """Each block's own parameters, in the order of a forward, and what starts their gather."""
        return iter(())

    def away(self, *, backward: bool = False, further: bool = True) -> Iterator[AwayShards]:
        """Blocks whose shards lie elsewhere, as a forward or a `backward` gathers them; `further`:
        where further tokens are predicted."""
        return iter(())

    def second_copies(self) -> Iterator[Tensor]:
        """This rank's parts of what its node keeps of gathered weights, until they may change."""
        return iter(())
