"""Calls FSDP2's hooks around the forwards of its units only when needed, and frees the message
of the last gather before the loss, and of each gather of what a backward runs again.

In each forward FSDP2 looks whether weights are gathered, searches all that a unit is given for
tensors, and ties what a backward calls to them and to its output: a third of the host's time of a
layer. Where a step gathers weights once and reduces gradients once, most microbatches need none of
it.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fivefold.data_parallel import fsdp_internals as internals
from fivefold.data_parallel.prefetch import last_layer_first
from fivefold.model.leaves import when_accumulated


class UnitHooks:
    """The hooks of a stage's units.

    Args:
        units: FSDP2's: the stage, then its layers in order, each before its experts.
        groups: their parameter groups.
        once: whether a step gathers its weights once, and reduces gradients in its last backward
            at most; otherwise no hook is passed by.
    """

    def __init__(self, units: Sequence[FSDPModule], groups: Iterable[Any], *, once: bool) -> None:
        self._groups, self._once = list(groups), once
        self._root, *layers = units
        self._last = next(last_layer_first(layers), None)
        self._rest, self._reduces, self._again = False, True, False
        self._adding: set[Any] = set()
        for unit in units:
            state = internals.state_of(unit)
            internals.without_hooks(unit)
            before, after = partial(self._before, state), partial(self._after, state)
            module: Any = unit
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            module.register_forward_hook(after)

    def before_forward(self, *, reduces: bool) -> None:
        """`reduces`: whether hooks reduce gradients in the backward of the coming forward."""
        self._again = False
        if self._once:
            self._rest = not reduces and all(group.is_unsharded for group in self._groups)
            self._reduces = reduces

    def before_backward(self, *, reduces: bool) -> None:
        """`reduces`: as for the forward; otherwise gradients are added up as they arrive, in their
        own type if it is another than that of weights."""
        self._again = True
        if not self._once:
            return
        self._rest = not reduces
        each = (held for group in self._groups for held in group.fsdp_params)
        for held in each if self._rest else ():
            widens = held.reduce_dtype is not None and held.sharded_param.requires_grad
            if widens and held not in self._adding and internals.was_gathered(held):
                self._adding.add(held)
                when_accumulated(held.unsharded_param, partial(self._arrived, held))

    def _before(self, state: Any, module: Any, given: tuple[Any, ...], named: dict) -> Any:
        if self._rest:
            return None
        tensors = tuple(each for each in given if isinstance(each, Tensor))
        others = {name: each for name, each in named.items() if isinstance(each, Tensor)}
        # FSDP2 ties nothing to a forward without gradients: it only gathers.
        with torch.set_grad_enabled(self._reduces and torch.is_grad_enabled()):
            if not tensors:  # torch 2.11 fails where nothing is given at all
                return internals.before_forward(state, module, given, named)
            tied, others = internals.before_forward(state, module, tensors, others)
        if self._again:  # the next gather may be a whole backward away
            internals.free_gathered(self._root)
        each_tied = iter(tied)
        both = (next(each_tied) if isinstance(each, Tensor) else each for each in given)
        return tuple(both), named | others

    def _after(self, state: Any, module: Any, given: tuple[Any, ...], out: Any) -> Any:
        if self._rest:
            return None
        if module is self._last:  # nothing is gathered before the loss, which needs most
            internals.free_gathered(self._root)
        with torch.set_grad_enabled(self._reduces and torch.is_grad_enabled()):
            return internals.after_forward(state, module, given, out)

    def _arrived(self, held: Any) -> None:
        if self._rest:
            held.accumulate_unsharded_grad_if_needed()
            held.to_accumulated_grad_if_needed()
