"""Deferred weight gradients: dW is computed after dX, so that dX can be sent on at once.

Splitting a backward into B (dX) and W (dW) at the autograd graph costs a second graph traversal and
fails under recomputation. Instead, only our own linears postpone dW while `deferring` is set. W
runs the postponed computations in microbatch order, so that every schedule sums the same terms in
the same order.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd import Variable

from fivefold.model.leaves import add_to_grad
from fivefold.model.products import Kept, Products


@dataclass(frozen=True)
class Work:
    """One postponed dW computation.

    Attributes:
        parameters: parameters to whose `grad` it adds; the objects that the forward used, which
            FSDP2 replaces between forward and W.
        add: runs the computation.
        start: starts messages that `add` waits for; None: there are none.
    """

    parameters: tuple[Tensor, ...]
    add: Callable[[], None]
    start: Callable[[], None] | None


def run_works(works: list[Work]) -> Iterator[Tensor]:
    """Run postponed computations in order; yields each parameter after its `grad` was updated.

    The list is emptied on the way, so that memory of those that have run is free. Autograd hooks do
    not see these gradients, so callers that wait for one use the yields. The messages of a
    computation travel while those since the last one with messages run, itself included: at most
    two have started and not ended.
    """
    starts = deque(work.start for work in works if work.start is not None)
    works.reverse()

    def start_next() -> None:
        if starts:
            with torch.no_grad():
                starts.popleft()()

    start_next()
    while works:
        parameters = works[-1].parameters
        if works[-1].start is not None:
            start_next()
        with torch.no_grad():
            works.pop().add()
        yield from parameters


class Sum(NamedTuple):
    """Where the gradients of a weight are accumulated.

    Attributes:
        local: this rank's part of the sum.
        empty: whether what is there does not count.
        returned: whether autograd is to be given it, as the gradient that hooks wait for.
    """

    local: Tensor
    empty: bool = False
    returned: bool = False


SumOf = Callable[[Tensor, bool], Sum | None]
"""Returns where the next gradient of a parameter belongs; None: it belongs elsewhere, or autograd
adds it. The second argument: whether the gradient covers all rows."""


class DeferredWeights:
    """Collects the postponed dW computations of one rank, and knows where gradients are summed.

    Attributes:
        deferring: whether the running backward postpones dW.
        sums: where products add weight gradients up (Megatron-LM's gradient accumulation fusion),
            or make the first ones.
    """

    def __init__(self) -> None:
        self.deferring = False
        self.sums: Sequence[SumOf] = ()
        self._works: list[Work] = []
        self._arriving: dict[Tensor, ref[Tensor]] = {}  # given to autograd

    def put(
        self,
        parameters: Sequence[Tensor],
        add: Callable[[], None],
        start: Callable[[], None] | None = None,
    ) -> None:
        """Postpone a computation that adds to the `grad` of these parameters; see `Work`."""
        self._works.append(Work(tuple(parameters), add, start))

    def run_early(self) -> None:
        """Run the computations postponed so far, during the backward that postpones them."""
        works, self._works = self._works, []
        for _ in run_works(works):
            pass

    @contextmanager
    def collect(self) -> Iterator[list[Work]]:
        """Postpone dW within the block.

        The yielded list is filled when the block ends, with what `run_early` has not run.
        """
        works: list[Work] = []
        self.deferring = True
        try:
            yield works
        finally:
            self.deferring = False
            works.extend(self._works)
            self._works = []

    def made_or_put(
        self, parameter: Tensor, products: Products, grad: Kept, kept: Kept
    ) -> Tensor | None:
        """A weight's gradient as from `made`; None while a backward defers it."""
        if not self.deferring:
            return self.made(parameter, products, grad, kept)
        self.put([parameter], lambda: self.add(parameter, products, grad, kept))
        return None

    def made(
        self,
        parameter: Tensor,
        products: Products,
        grad: Kept,
        kept: Kept,
        rows: slice | None = None,
    ) -> Tensor | None:
        """A weight's gradient for autograd to add; None if it was accumulated elsewhere.

        That is the parameter's sum, or the gradient of another use in the same backward, for which
        autograd waits: where anybody else refers to its memory, it would add both into a third.

        Args:
            parameter: the object that the forward used.
            products: products of the linear layer.
            grad: what they take of the gradient of its result.
            kept: what they take of its input.
            rows: rows of the local part that the gradient covers; None: all.
        """
        other = self._of_other_use(parameter) if rows is None else None
        found = self._sum_of(parameter, rows is None) if other is None else Sum(other)
        if found is not None:
            _add(found, products, grad, kept, rows)
            return found.local.detach() if found.returned else None  # for autograd alone
        made = products.weight_gradient(grad, kept)
        return self._begun(parameter, made) if rows is None and parameter.is_leaf else made

    def taken(self, parameter: Tensor, made: Tensor) -> Tensor | None:
        """The same for a gradient that is not computed by a linear layer's product."""
        if (other := self._of_other_use(parameter)) is None:
            return self._begun(parameter, made)
        other.add_(made)
        return None

    def add(
        self,
        parameter: Tensor,
        products: Products,
        grad: Kept,
        kept: Kept,
        rows: slice | None = None,
    ) -> None:
        """Add a weight's gradient to the parameter's sum; arguments as for `made`."""
        found = self._sum_of(parameter, rows is None)
        if found is None:
            add_to_grad(parameter, products.weight_gradient(grad, kept), rows)
            return
        _add(found, products, grad, kept, rows)
        if found.returned:
            add_to_grad(parameter, found.local.detach(), rows)

    def _of_other_use(self, parameter: Tensor) -> Tensor | None:
        """The gradient that autograd has from another use of the parameter in the same backward."""
        arriving = self._arriving.get(parameter) if self._arriving else None
        return None if arriving is None else arriving()

    def _begun(self, parameter: Tensor, made: Tensor) -> Tensor:
        """The first gradient of a parameter in this backward, to which other uses add."""
        made = made.to(parameter.grad_dtype or parameter.dtype)  # as autograd would convert it
        if not self._arriving:
            Variable._execution_engine.queue_callback(self._arriving.clear)  # at its end
        self._arriving[parameter] = ref(made)
        return made

    def _sum_of(self, parameter: Tensor, whole: bool) -> Sum | None:
        for sum_of in self.sums:
            found = sum_of(parameter, whole)
            if found is not None:
                return found
        return None


def _add(found: Sum, products: Products, grad: Kept, kept: Kept, rows: slice | None) -> None:
    if found.empty:
        products.write_weight_gradient(grad, kept, found.local)
    else:
        products.weight_gradient(grad, kept, found.local if rows is None else found.local[rows])
