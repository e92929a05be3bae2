"""Counts where the host waits for the device, by line of the project."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from fivefold.audit.watch import Watch, after, project_line, tensors_in
from fivefold.memory.host import HostLink

READS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::equal",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
    }
)
"""Operations whose result, or its shape, the host needs before it goes on."""
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_OF_BOTH = _COPIES | {"aten::index", "aten::index_put_"}
"""Operations that accept a host tensor beside a device tensor; others accept only scalars."""
_ACCESSORS = ("tolist", "cpu", "numpy", "__array__")
"""Methods that copy a tensor to the host; on a CPU none of them passes the dispatcher."""


def awaited(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> bool:
    """Whether the host has waited for the end of an operation when it continues."""
    name = func.name().partition(".")[0]
    if name in READS:
        return True
    if name == "aten::index":  # the host needs the number of elements that a mask selects
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if name not in _COPIES:
        return False
    every = [*tensors_in(args), *tensors_in(result)]
    if all(x.is_cuda or not x.nbytes for x in every):
        return False
    later = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    return not later and any(x.is_cuda for x in every)


class HostWaits(Watch):
    """Counts waits of the host for the device inside its block.

    On a CPU, on which everything is at hand, it counts those that there would be on a GPU. There,
    the given tensors would be on the device, what is copied from the host, and with them all that
    is computed from them, what operations read beside them, and what is sent or received. Copies
    to the host are not told from others there, so of these only methods count that are called for
    nothing else.

    Args:
        device: the device of the computation.
        tensors: on a CPU, tensors that would be on the device.

    Attributes:
        places: number of waits, by the line that waits.
    """

    def __init__(self, device: torch.device, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._on_gpu = device.type == "cuda"
        self.places: Counter[str] = Counter()
        self._there: set[int] = set()
        for tensor in tensors:
            self._put_there(tensor)

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        hooks: list[tuple[type, str, Callable[..., None]]] = [
            (
                HostLink,
                "to_device",
                lambda link, event, host, onto, *_, **__: self._put_there(onto),
            ),
            (torch.cuda.Event, "synchronize", self._has_waited),
            (torch.cuda.Stream, "synchronize", self._has_waited),
            *((Tensor, name, self._has_read) for name in _ACCESSORS),
        ]
        for owner, name, hook in hooks:
            block.enter_context(after(owner, name, hook))

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = super()._run(func, args, kwargs)
        read = [*tensors_in(args), *tensors_in([*kwargs.values()])]
        if func.namespace == "c10d" or any(map(self._is_there, read)):
            beside = () if func.name().partition(".")[0] in _OF_BOTH else read
            for tensor in (*beside, *tensors_in(result)):
                self._put_there(tensor)
            if awaited(func, args, kwargs, result):
                self.places[project_line()] += 1
        return result

    def _is_there(self, tensor: Tensor) -> bool:
        if self._on_gpu:
            return tensor.is_cuda
        return tensor.untyped_storage()._cdata in self._there

    def _put_there(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if not self._on_gpu and key not in self._there:
            self._there.add(key)
            weakref.finalize(storage, self._there.discard, key)

    def _has_read(self, tensor: Tensor, result: Any, *_: Any, **__: Any) -> None:
        if not self._on_gpu and self._is_there(tensor):
            self.places[project_line()] += 1

    def _has_waited(self, *_: Any) -> None:
        self.places[project_line()] += 1
