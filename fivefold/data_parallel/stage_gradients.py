"""The interface of a stage's data parallelism, for code that runs, updates or measures it."""

# ruff: noqa: B027 (an empty method is what a stage does that gathers nothing)
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from fivefold.data_parallel.communication import HierarchicalReduceScatter, NodeGather
from fivefold.data_parallel.offloaded_shards import OffloadedShards
from fivefold.tensor.deferred_weight import Sum, Work


class StageGradients(ABC):
    """Sums the gradients of a stage over the ranks that see other tokens.

    If parameters are never gathered, all methods about gathers do nothing.

    Attributes:
        exchanges: gathers and reductions of ZeRO++.
    """

    exchanges: Sequence[NodeGather | HierarchicalReduceScatter] = ()

    @abstractmethod
    def set_gradient_type(self) -> None:
        """Keep gradients in their type, where parameters have another one."""

    def before_run(self, *, trains: bool) -> None:
        """Called when a program begins; `trains`: with backwards."""

    def before_forward(self, *, last: bool) -> None:
        """`last`: the stage's last backward, which computes all gradients, follows the next
        forward."""

    @abstractmethod
    def before_backward(self, *, whole: bool, last: bool) -> None:
        """Announces what the next backward computes.

        Args:
            whole: whether it computes all gradients; otherwise deferred weight gradients follow in
                `run_weights`, and nothing is reduced before.
            last: whether no later act of the step adds to this stage's gradients.
        """

    def after_backward(self, *, last: bool) -> None:
        """Called after a backward with weight gradients; `last` as above."""

    def put_aside(self) -> list[Work]:
        """Called after a backward of dX alone; returns what to run before its weight gradients."""
        return []

    @abstractmethod
    def run_weights(self, works: list[Work], *, last: bool) -> None:
        """Run weight gradients that a backward has deferred; `last` as above."""

    @abstractmethod
    def reduce(self) -> None:
        """Called when all weight gradients of the step exist: start the remaining reductions."""

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
        """Wait for the stage's parameters, which the next action reads."""

    def reshard(self) -> None:
        """Free the gathered parameters."""

    def forget(self) -> None:
        """Drop everything derived from weights, since they may change."""

    def settle(self) -> list[Any]:
        """Drop all events of earlier steps and evaluations, for which a capture must not wait.

        Returns:
            The streams beside the one that computes.
        """
        return []

    def blocks(self) -> Iterator[tuple[list[nn.Parameter], Callable[[], None]]]:
        """Each block's own parameters in the order of a forward, and what starts their gather."""
        return iter(())

    def offloaded(self, *, backward: bool = False, mtp: bool = True) -> Iterator[OffloadedShards]:
        """Blocks whose shards are elsewhere, in the order in which a forward or a `backward`
        gathers them; `mtp`: with multi-token prediction."""
        return iter(())

    def second_copies(self) -> Iterator[Tensor]:
        """This rank's parts of its node's copies of gathered weights, until weights may change."""
        return iter(())
