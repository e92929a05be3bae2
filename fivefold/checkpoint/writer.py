"""Writes pieces of global tensors with torch.distributed.checkpoint (DCP).

DCP's own planner supports DTensors. Ours supports `Piece`, so that CPU copies, optimizer state and
parameters are all saved in the same way, and empty shards are not written.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultSavePlanner,
    FileSystemWriter,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from fivefold.files import caused_by_full_disk
from fivefold.mesh.slices import Piece


class PieceWriter(FileSystemWriter):
    """Writes and flushes files; reports a full disk as such.

    torch.save reports a full disk as "unexpected pos 704 vs 598" with the true cause chained, but
    other ranks receive only the first.
    """

    def write_data(self, *arguments: Any, **settings: Any) -> Any:
        """Write this rank's part of the plan.

        Raises:
            OSError: the disk is full.
        """
        try:
            return super().write_data(*arguments, **settings)
        except Exception as error:
            if (cause := caused_by_full_disk(error)) is not None:
                raise cause from None
            raise


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of `dict[str, Piece]`.

    A piece that several ranks hold is written by one of them; such writes are spread evenly.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """One write for each piece that is not empty."""
        self.plan = SavePlan(
            [_write(name, piece) for name, piece in self.state_dict.items() if piece.local.numel()]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor to write."""
        return self.state_dict[index.fqn].local


def _write(name: str, piece: Piece) -> WriteItem:
    offsets = torch.Size(part.start for part in piece.slices)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets, piece.local.shape),
            properties=TensorProperties.create_from_tensor(piece.local),
            size=piece.shape,
        ),
    )
