"""Reads from the arguments of a torch.distributed operation what it sends, and to whom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fivefold.audit.watch import tensors_in
from fivefold.counts.messages import wire_bytes
from fivefold.errors import FivefoldError
from fivefold.mesh.arguments import PLACES

_OPS: Mapping[str, str] = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::alltoall_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "c10d::barrier": "barrier",
    "c10d::monitored_barrier_": "barrier",
}
FUSED_GATHER = "symm_mem::fused_all_gather_matmul"
FUSED_SCATTER = "symm_mem::fused_matmul_reduce_scatter"
"""Products of matrices that gather rows before, or sum them over the ranks after."""


@dataclass(frozen=True)
class Call:
    """One operation of torch.distributed on this rank.

    Attributes:
        op: all_gather, reduce_scatter, all_reduce, all_to_all, send, receive or barrier.
        group: group of the ranks that take part.
        gives: tensors that are read, in order.
        gets: tensors that are written, in order.
        size: bytes of the whole buffer, as `counts.messages.wire_bytes` wants them.
        parts: bytes that an all-to-all sends to each rank, and receives; else empty.
        peer: rank in the group of a message; None for collectives.
        tag: number of a message.
    """

    op: str
    group: dist.ProcessGroup
    gives: tuple[Tensor, ...]
    gets: tuple[Tensor, ...]
    size: int
    parts: tuple[tuple[int, ...], ...]
    peer: int | None
    tag: int

    @property
    def sent(self) -> float:
        """Bytes that this rank sends; of an all-to-all all but what it keeps."""
        if self.parts:
            return sum(self.parts[0]) - self.parts[0][self.group.rank()]
        return wire_bytes(self.op, self.size, self.group.size())


def call_of(func: Any, args: tuple[Any, ...]) -> Call | None:
    """The call that an operation makes; None if it does not belong to torch.distributed.

    Raises:
        FivefoldError: an operation of torch.distributed that is not known.
    """
    if not is_call(func):
        return None
    name = func.name().partition(".")[0]
    if name in (FUSED_GATHER, FUSED_SCATTER):
        return _fused(name, args)
    if name not in _OPS:
        raise FivefoldError(f"no wire model is known for {name}")
    op, places = _OPS[name], PLACES[name]
    message = op in ("send", "receive")
    group = dist.ProcessGroup.unbox(args[places.group])
    gives, gets = (
        () if at is None else tuple(tensors_in(args[at])) for at in (places.gives, places.gets)
    )
    parts: tuple[tuple[int, ...], ...] = ()
    if op == "all_to_all":
        gets_rows, gives_rows = args[3:5] if name == "c10d::alltoall_base_" else ((), ())
        ranks = group.size()
        parts = _parts(gives, gives_rows, ranks), _parts(gets, gets_rows, ranks)
    return Call(
        op,
        group,
        gives,
        gets,
        sum(tensor.nbytes for tensor in (gets if op == "all_gather" else gives)),
        parts,
        args[2] if message else None,
        args[3] if message else 0,
    )


def _fused(name: str, args: tuple[Any, ...]) -> Call:
    """The collective in a product of rows [T, F], whose group is given by name."""
    rows, gathers = args[0], name == FUSED_GATHER
    group = dist.distributed_c10d._resolve_process_group(args[3 if gathers else 4])
    features = rows.shape[1] * group.size() if gathers else args[1].shape[1]
    size = len(rows) * features * rows.element_size()
    op = "all_gather" if gathers else "reduce_scatter"
    return Call(op, group, (rows,), (), size, (), None, 0)


def is_call(func: Any) -> bool:
    """Whether an operation belongs to torch.distributed."""
    return func.namespace in ("c10d", "_c10d_functional", "symm_mem")


def _parts(tensors: tuple[Tensor, ...], rows: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Bytes for, or from, each rank: one tensor per rank, or rows of one tensor; evenly if not
    given."""
    if len(tensors) == ranks > 1:
        return tuple(tensor.nbytes for tensor in tensors)
    (whole,) = tensors
    if not rows:
        return (whole.nbytes // ranks,) * ranks
    row = whole.nbytes // max(len(whole), 1)
    return tuple(row * count for count in rows)
