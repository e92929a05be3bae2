"""Counts the operations that this process launches: in total, and in each layer."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.audit.watch import Watch

_WITHOUT_WORK = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unsafe_view",
        "aten::empty",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::lift_fresh",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::promote_types",
        "aten::record_stream",
        "aten::resize_",
        "aten::set_",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
    }
)
"""Operations that are no views, but give the device nothing to compute."""


@cache
def launches(func: Any) -> bool:
    """Whether an operation launches work on the device: not if it only makes a view or allocates
    memory."""
    return not func.is_view and func.name().partition(".")[0] not in _WITHOUT_WORK


class Launches(Watch):
    """Counts operations inside its block that launch work on the device, collectives included.

    On a GPU an operation is one kernel, with few exceptions: attention's backward is three, sums
    of many rows two.

    Attributes:
        count: operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def _observes(self, func: Any) -> bool:
        return launches(func)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.count += 1
        return super()._run(func, args, kwargs)


class LayerLaunches(Launches):
    """Counts the operations of each layer's forwards and backwards as well.

    A backward lasts from the gradient of a layer's output to that of its input. What it recomputes
    is part of it; weight gradients that a schedule puts off are not.

    Args:
        layers: the layers to watch.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self._layers = layers
        self._forwards: list[int] = []
        self._backwards: list[int] = []
        self._began = 0
        self._open: dict[nn.Module, int] = {}  # layers in their backward -> the count at its start

    @property
    def of_a_layer(self) -> tuple[float, float] | None:
        """Median number of operations of a layer's forward and of its backward for one microbatch;
        None: no layer ran both."""
        if not self._forwards or not self._backwards:
            return None
        return median(self._forwards), median(self._backwards)

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        for layer in self._layers:
            block.callback(layer.register_forward_pre_hook(self._before_forward).remove)
            block.callback(layer.register_forward_hook(self._after_forward).remove)

    def _before_forward(self, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not self._open:  # a forward within a backward is a recomputation
            self._began = self.count
            if arguments[0].requires_grad and torch.is_grad_enabled():
                arguments[0].register_hook(lambda _: self._after_backward(layer))

    def _after_forward(self, layer: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
        if not self._open:
            self._forwards.append(self.count - self._began)
            if out.requires_grad:
                out.register_hook(lambda _: self._before_backward(layer))

    def _before_backward(self, layer: nn.Module) -> None:
        self._open[layer] = self.count

    def _after_backward(self, layer: nn.Module) -> None:
        if layer in self._open:
            self._backwards.append(self.count - self._open.pop(layer))
