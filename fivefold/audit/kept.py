"""Measures the activations that a forward keeps for its backward."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from fivefold.audit.watch import Watch


class KeptActivations(Watch):
    """Counts, in the first forward of each stage, the bytes that outlive it.

    A dispatch mode sees every storage that is allocated in the forward. Those that are still alive
    at its end are kept for the backward, whether autograd, a checkpoint or a pool of offloaded
    tensors holds them; on a GPU this pool is in host memory, which is not counted. The stage's
    input is counted, too; its outputs, gathered parameters, the batch and what is kept for later
    forwards are not.

    Args:
        stages: the modules by index.
        seq_length: tokens of a row.
        shared: tells what has been made of weights for later forwards, too.

    Attributes:
        sizes: bytes by stage.
        packed: whether any of these forwards had rows with several documents.
        any_packed: whether any forward, including later ones, had such rows.
    """

    def __init__(
        self, stages: dict[int, nn.Module], seq_length: int, shared: Callable[[], Iterable[Tensor]]
    ) -> None:
        super().__init__()
        self._stages, self._shared = stages, shared
        self._born: dict[int, StorageWeakRef] | None = None
        self._foreign: dict[int, StorageWeakRef] = {}
        self.sizes: dict[int, float] = {}
        self.packed = False
        self.any_packed = False
        self._seq_length = seq_length
        self._tokens = self._squares = 0

    @property
    def document_length(self) -> float:
        """Mean length of a token's document over all forwards, in tokens."""
        return self._squares / self._tokens if self._tokens else float(self._seq_length)

    def begin(self, block: ExitStack) -> None:
        """See `Watch`."""
        for index, stage in self._stages.items():
            begin, end = partial(self._begin, index), partial(self._end, index)
            block.callback(stage.register_forward_pre_hook(begin).remove)
            block.callback(stage.register_forward_hook(end).remove)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._born is None:
            return super()._run(func, args, kwargs)
        for tensor in _tensors((args, kwargs)):
            self._know(tensor, self._foreign)
        result = super()._run(func, args, kwargs)
        for tensor in _tensors(result):
            self._know(tensor, self._born)
        return result

    def _know(self, tensor: Tensor, place: dict[int, StorageWeakRef]) -> None:
        """Add a storage to `place`, unless a live one with that address is already counted."""
        storage = tensor.untyped_storage()
        assert self._born is not None
        for known in (self._born, self._foreign):
            if storage._cdata in known and not known[storage._cdata].expired():
                return
        place[storage._cdata] = StorageWeakRef(storage)

    def _begin(self, index: int, stage: nn.Module, arguments: Any) -> None:
        batch = arguments[1]
        self.any_packed |= batch.packing is not None
        rows = [self._seq_length] * len(batch.tokens)
        lengths = rows if batch.packing is None else batch.packing.lengths
        self._tokens += sum(lengths)
        self._squares += sum(length**2 for length in lengths)
        if torch.is_grad_enabled() and index not in self.sizes:
            self._born, self._foreign = {}, {}

    def _end(self, index: int, stage: nn.Module, arguments: Any, output: Tensor) -> None:
        if self._born is None:
            return
        born, self._born = self._born, None
        x_TH, batch = arguments[:2]
        results = _tensors((output, stage.z_sums))
        others = {
            *map(_address, stage.parameters()),
            *(x.untyped_storage()._cdata for x in (*results, *self._shared(), *batch.order)),
        }
        size = 0 if x_TH is None else x_TH.untyped_storage().nbytes()
        for address, reference in born.items():
            if address in others or reference.expired():
                continue
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage.device == output.device:
                size += storage.nbytes()
        self.sizes[index] = float(size)
        self.packed |= batch.packing is not None


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _address(parameter: nn.Parameter) -> int:
    """The address of the memory with which a stage computes, which FSDP2 may have gathered."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.untyped_storage()._cdata
