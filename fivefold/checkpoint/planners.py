"""What torch.distributed.checkpoint writes and reads for pieces of global tensors.

DCP's own planners know DTensors. Ours know `Piece`, so that a copy on the CPU, an optimizer's state
and a parameter are saved in the same way, and empty shards leave no trace in the file.
"""

from typing import cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    ChunkStorageMetadata,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    LoadPlan,
    Metadata,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fivefold.mesh.slices import Piece


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of `dict[str, Piece]`; what several ranks hold is written by one of them,
    and these writes are spread evenly over the ranks.
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


class PieceLoadPlanner(DefaultLoadPlanner):
    """Plans the reading into `dict[str, Piece]` of what any layout wrote."""

    def set_up_planner(
        self,
        state_dict: dict[str, Piece],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep what is to be filled and where the file's chunks lie."""
        self.state_dict = state_dict
        self._saved = metadata.state_dict_metadata if metadata else {}

    def create_local_plan(self) -> LoadPlan:
        """One read for each saved chunk that a piece overlaps."""
        items = []
        for name, piece in self.state_dict.items():
            if piece.local.numel():
                saved = cast(TensorStorageMetadata, self._saved[name])
                items += create_read_items_for_chunk_list(name, saved, [_chunk(piece)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The tensor to fill."""
        return self.state_dict[index.fqn].local


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(part.start for part in piece.slices), sizes=piece.local.shape
    )


def _write(name: str, piece: Piece) -> WriteItem:
    chunk = _chunk(piece)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=chunk,
            properties=TensorProperties.create_from_tensor(piece.local),
            size=piece.shape,
        ),
    )
