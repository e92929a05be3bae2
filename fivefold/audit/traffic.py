"""Measures the bytes that this rank sends, by observing every collective."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fivefold.audit.watch import Watch
from fivefold.counts.messages import wire_bytes
from fivefold.errors import FivefoldError
from fivefold.mesh.groups import EXPERT_PARAMETER_AXES, PARAMETER_AXES, Groups

# Op -> name, and where in its arguments the whole buffer and the group stand.
_OPS: Mapping[str, tuple[str, int, int]] = {
    "c10d::_allgather_base_": ("all_gather", 0, 2),
    "c10d::allgather_": ("all_gather", 0, 2),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "c10d::reduce_scatter_": ("reduce_scatter", 1, 2),
    "c10d::allreduce_": ("all_reduce", 0, 1),
    "c10d::allreduce_coalesced_": ("all_reduce", 0, 1),
    "c10d::alltoall_base_": ("all_to_all", 1, 2),
    "c10d::alltoall_": ("all_to_all", 1, 2),
    "c10d::send": ("send", 0, 1),
}
_SILENT = ("c10d::recv_", "c10d::barrier", "c10d::monitored_barrier_")


class Traffic(Watch):
    """Sums the bytes sent while it is entered: `with Traffic(axes_of(groups)) as traffic: ...`.

    A dispatch mode sees every c10d operation, FSDP2's and a backward's too: autograd runs its
    threads with the modes of the thread that called it. A collective counts what an algorithm of
    optimal bandwidth sends (`counts.messages.wire_bytes`), whatever the back end does; a pairwise
    one is counted send by send, which comes to the same.

    Args:
        axes: name of the mesh axis for each group name.

    Attributes:
        sent: bytes by (axis, operation).

    Raises:
        FivefoldError: inside the block, at an operation for which there is no wire model.
    """

    def __init__(self, axes: Mapping[str, str]) -> None:
        super().__init__()
        self._axes = axes
        self.sent: defaultdict[tuple[str, str], float] = defaultdict(float)

    @property
    def by_axis(self) -> dict[str, float]:
        """Bytes sent by mesh axis; axes without traffic are left out."""
        total: defaultdict[str, float] = defaultdict(float)
        for (axis, _), size in self.sent.items():
            total[axis] += size
        return {axis: size for axis, size in total.items() if size}

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.name().partition(".")[0], args)
        return super()._run(func, args, kwargs)

    def _count(self, op: str, args: tuple[Any, ...]) -> None:
        if op in _SILENT:
            return
        if op not in _OPS:
            raise FivefoldError(f"no wire model is known for {op}")
        name, buffer, group = _OPS[op]
        ranks = dist.ProcessGroup.unbox(args[group])
        axis = self._axes.get(ranks.group_name, ranks.group_name)
        self.sent[axis, name] += wire_bytes(name, _bytes(args[buffer]), ranks.size())


def axes_of(groups: Groups) -> dict[str, str]:
    """The mesh axis of each group name; if two axes share a group, the first one listed."""
    named = [
        ("world", groups.world),
        ("pp", groups.pp),
        ("tp", groups.tp),
        ("data", groups.data),
        ("tied", groups.tied),
        ("mirror", groups.mirror),
        *((axis, groups.mesh.get_group(axis)) for axis in PARAMETER_AXES),
        ("cp", groups.cp),
        ("cp", groups.cp_inner),
        ("cp", groups.cp_outer),
    ]
    if groups.experts is not None:
        experts = groups.experts
        named += [
            ("ep", experts.ep),
            ("etp", experts.etp),
            ("ep x etp", experts.both),
            ("edp", experts.edp),
            ("router", experts.microbatch),
            ("router", experts.stage),
            *((axis, experts.mesh.get_group(axis)) for axis in EXPERT_PARAMETER_AXES),
        ]
    axes: dict[str, str] = {}
    for axis, group in named:
        if group is not None:
            axes.setdefault(group.group_name, axis)
    return axes


def _bytes(buffers: Any) -> int:
    """Bytes of a tensor, or of all tensors in a nested list."""
    if isinstance(buffers, Tensor):
        return buffers.numel() * buffers.element_size()
    return sum(map(_bytes, buffers))
