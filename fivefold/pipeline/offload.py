"""Activations in host memory between a forward and its backward.

What autograd saves is found by hooks and moved storage by storage: the storage of a saved tensor is
emptied where it is and filled again later, so that whatever shares it needs to know nothing.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks

Piece = tuple[int, int, int]
"""Stage, microbatch, slice."""


@dataclass
class _Kept:
    """What one forward saved: its storages by address, and their copies once they are moved."""

    storages: dict[int, UntypedStorage] = field(default_factory=dict)
    copies: list[tuple[UntypedStorage, Tensor]] = field(default_factory=list)
    event: torch.cuda.Event | None = None  # the end of the copy under way


class HostStore:
    """Moves what the forwards of some pieces saved, beside compute on CUDA.

    An OFFLOAD frees memory at the end of the compute act that follows it, a RELOAD takes it at
    once; both as the simulator has it. Each direction has a stream of its own.

    Args:
        pieces: that will be offloaded.
        device: where activations live.
    """

    def __init__(self, pieces: Collection[Piece], device: torch.device) -> None:
        self._kept = {piece: _Kept() for piece in pieces}
        self._leaving: list[Piece] = []
        self._device = device
        on_cuda = device.type == "cuda" and bool(pieces)
        self._out = torch.cuda.Stream(device) if on_cuda else None
        self._back = torch.cuda.Stream(device) if on_cuda else None

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
            stay: whose storages belong to others: parameters, the batch, messages.
        """
        kept = self._kept[piece]
        if also is not None:
            kept.storages[also.untyped_storage().data_ptr()] = also.untyped_storage()
        others = {tensor.untyped_storage().data_ptr() for tensor in stay}
        with self._beside(self._out):
            for storage in kept.storages.values():
                if storage.nbytes() and storage.data_ptr() not in others:
                    pinned = self._out is not None
                    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                    host.copy_(_bytes_of(storage), non_blocking=True)
                    kept.copies.append((storage, host))
            kept.event = self._mark()
        kept.storages = {}
        self._leaving.append(piece)

    def settle(self) -> None:
        """A compute act has ended: free what was leaving beside it."""
        for piece in self._leaving:
            self._await(self._kept[piece])
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
        with self._beside(self._back):
            for storage, host in kept.copies:
                _bytes_of(storage).copy_(host, non_blocking=True)
            kept.event = self._mark()
        kept.copies = []

    def wait(self, piece: Piece) -> None:
        """Let what follows see a piece whole."""
        if piece in self._kept:
            self._await(self._kept[piece])

    def _await(self, kept: _Kept) -> None:
        if kept.event is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.event)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """On a stream that has waited for what is issued already; on a CPU in place."""
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            yield

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._out is None else torch.cuda.current_stream().record_event()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A storage as a flat tensor of bytes."""
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))
