"""Copies tensors to the host, so that they can be written while training changes them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fivefold.mesh.slices import Piece


class Staging:
    """Host memory for copies, which later copies reuse."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def copy(self, pieces: Mapping[str, Piece]) -> dict[str, Piece]:
        """Copy this rank's parts; the copies are complete when this returns."""
        staged = {}
        for name, piece in pieces.items():
            local, copy = piece.local, self._kept.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
                self._kept[name] = copy
            staged[name] = piece.like(copy.copy_(local, non_blocking=local.is_cuda))
        if any(piece.local.is_cuda for piece in pieces.values()):
            torch.cuda.current_stream().synchronize()
        return staged
