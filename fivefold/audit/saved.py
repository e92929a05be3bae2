"""What autograd keeps of a forward, counted where it is kept."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class SavedActivations:
    """Counts, in the first forward of each stage, the bytes that it saves for its backward.

    Storages count once, whole, however many tensors of them are saved; parameters and what is
    gathered of them do not count. Use as a context manager.

    Args:
        stages: the modules by index.

    Attributes:
        sizes: bytes by stage.
        packed: whether any of these forwards had rows of several documents.
    """

    def __init__(self, stages: dict[int, nn.Module]) -> None:
        self._stages = stages
        self._exit = ExitStack()
        self.sizes: dict[int, float] = {}
        self.packed = False

    def __enter__(self) -> "SavedActivations":
        for index, stage in self._stages.items():
            counter = _StageCounter(stage, partial(self._counted, index))
            self._exit.callback(stage.register_forward_pre_hook(counter.begin).remove)
            self._exit.callback(stage.register_forward_hook(counter.end, always_call=True).remove)
        return self

    def __exit__(self, *exception: object) -> None:
        self._exit.close()

    def _counted(self, index: int, size: float, packed: bool) -> None:
        if index not in self.sizes:
            self.sizes[index] = size
            self.packed |= packed


class _StageCounter:
    """The hooks of one stage."""

    def __init__(self, stage: nn.Module, report: Callable[[float, bool], None]) -> None:
        self._stage, self._report = stage, report
        self._hooks: saved_tensors_hooks | None = None
        self._found: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def begin(self, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            self._found, self._kept = {}, []
            self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
            self._hooks.__enter__()

    def end(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            packed = arguments[1].packing is not None
            self._report(float(sum(self._found.values())), packed)
            self._hooks, self._kept = None, []

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._found and not self._is_parameter(storage.data_ptr()):
            self._found[storage.data_ptr()] = storage.nbytes()
            self._kept.append(tensor.detach())  # so that no other tensor gets the same address
        return tensor

    def _is_parameter(self, address: int) -> bool:
        """Whether it is a parameter's memory, as FSDP2 may have gathered it just now."""
        for parameter in self._stage.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.untyped_storage().data_ptr() == address:
                return True
        return False
