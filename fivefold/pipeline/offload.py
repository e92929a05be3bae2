"""Activations in host memory between a forward and its backward.

What autograd saves is found by hooks and moved storage by storage: the storage of a saved tensor is
emptied where it is and filled again later, so that whatever shares it needs to know nothing.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

from fivefold.memory.host import HostLink, Mark

Piece = tuple[int, int, int]
"""Stage, microbatch, slice."""


@dataclass
class _Saved:
    """What one forward saved: its storages by address, and their copies once they are moved."""

    storages: dict[int, UntypedStorage] = field(default_factory=dict)
    copies: list[tuple[UntypedStorage, Tensor]] = field(default_factory=list)
    mark: Mark = None  # of the last copy under way


class HostStore:
    """Moves what the forwards of some pieces saved.

    An OFFLOAD frees memory at the end of the compute act that follows it, a RELOAD takes it at
    once; both as the simulator has it.

    Args:
        pieces: pieces that will be offloaded.
        device: where activations live.
    """

    def __init__(self, pieces: Collection[Piece], device: torch.device) -> None:
        self._kept = {piece: _Saved() for piece in pieces}
        self._leaving: list[Piece] = []
        self._link = HostLink(device)

    @contextmanager
    def noting(self, piece: Piece) -> Iterator[None]:
        """Note what the forward in the block saves, if the piece is to be offloaded."""
        if piece not in self._kept:
            yield
            return
        storages = self._kept[piece].storages

        def note(tensor: Tensor) -> Tensor:
            if tensor.is_floating_point():
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor.detach()  # itself, it would hold the node that holds it

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def offload(self, piece: Piece, also: Tensor | None, stay: Iterable[Tensor]) -> None:
        """Start moving what the forward of a piece saved.

        Args:
            piece: the one.
            also: the input of the stage, which is kept, too.
            stay: tensors whose storages belong to others: parameters, the batch, messages.
        """
        kept = self._kept[piece]
        if also is not None:
            kept.storages[also.untyped_storage().data_ptr()] = also.untyped_storage()
        others = {tensor.untyped_storage().data_ptr() for tensor in stay}
        for storage in kept.storages.values():
            if storage.nbytes() and storage.data_ptr() not in others:
                host, kept.mark = self._link.out(_bytes_of(storage))
                kept.copies.append((storage, host))
        kept.storages = {}
        self._leaving.append(piece)

    def settle(self) -> None:
        """A compute act has ended: free what was leaving beside it."""
        for piece in self._leaving:
            self.wait(piece)
            for storage, _ in self._kept[piece].copies:
                storage.resize_(0)
        self._leaving = []

    def reload(self, piece: Piece) -> None:
        """Start moving a piece back."""
        if piece in self._leaving:
            self.settle()
        kept = self._kept[piece]
        for storage, host in kept.copies:
            storage.resize_(host.numel())
            kept.mark = self._link.back(host, _bytes_of(storage))
        kept.copies = []

    def wait(self, piece: Piece) -> None:
        """Let what follows see a piece whole."""
        if piece in self._kept:
            self._link.wait(self._kept[piece].mark)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
