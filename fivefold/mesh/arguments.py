"""Which arguments of torch.distributed's operations are read and written. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """Positions of the arguments of an operation.

    Attributes:
        gives: place of the tensors that are read; None: none are.
        gets: place of the tensors that are written; None: none are.
        group: place of the group.
    """

    gives: int | None
    gets: int | None
    group: int


_IN_PLACE = Places(0, 0, 1)
_APART = Places(1, 0, 2)
_NOTHING = Places(None, None, 1)
_RECEIVES = Places(None, 0, 1)

PLACES: Mapping[str, Places] = {
    "c10d::_allgather_base_": _APART,
    "c10d::allgather_": _APART,
    "c10d::allgather_coalesced_": _APART,
    "c10d::allgather_into_tensor_coalesced_": _APART,
    "c10d::_reduce_scatter_base_": _APART,
    "c10d::reduce_scatter_": _APART,
    "c10d::reduce_scatter_tensor_coalesced_": _APART,
    "c10d::allreduce_": _IN_PLACE,
    "c10d::allreduce_coalesced_": _IN_PLACE,
    "c10d::alltoall_base_": _APART,
    "c10d::alltoall_": _APART,
    "c10d::broadcast_": _IN_PLACE,
    "c10d::reduce_": _IN_PLACE,
    "c10d::gather_": _APART,
    "c10d::scatter_": _APART,
    "c10d::send": Places(0, None, 1),
    "c10d::recv_": _RECEIVES,
    "c10d::recv_any_source_": _RECEIVES,
    "c10d::barrier": _NOTHING,
    "c10d::monitored_barrier_": _NOTHING,
}
"""By the name of the operation, `Tensor`, `Tensor[]` and `Tensor[][]` alike."""
