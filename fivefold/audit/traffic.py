"""Measures the bytes that this rank sends, by observing every collective."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from fivefold.audit.calls import call_of, is_call
from fivefold.audit.watch import Watch
from fivefold.mesh.groups import EXPERT_PARAMETER_AXES, PARAMETER_AXES, Groups


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

    def _observes(self, func: Any) -> bool:
        return is_call(func)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = call_of(func, args)
        if call is not None and call.size:
            ranks = call.group
            axis = self._axes.get(ranks.group_name, ranks.group_name)
            self.sent[axis, call.op] += call.sent
        return super()._run(func, args, kwargs)


def axes_of(groups: Groups) -> dict[str, str]:
    """The mesh axis of each group name; if two axes share a group, the first one listed."""
    axes: dict[str, str] = {}
    for axis, group in named_groups(groups):
        axes.setdefault(group.group_name, axis)
    return axes


def named_groups(groups: Groups) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Every group of a rank with its mesh axis; a group that axes share is named with each."""
    named = [
        ("world", groups.world),
        ("pp", groups.pp),
        *(("pp", line) for line in groups.pp_lines.values()),
        ("tp", groups.tp),
        ("data", groups.data),
        ("tied", groups.tied),
        ("mirror", groups.mirror),
        *((axis, groups.mesh.get_group(axis)) for axis in PARAMETER_AXES),
        ("cp", groups.cp),
        ("cp", groups.cp_inner),
        ("cp", groups.cp_outer),
        *vars(groups.nodes).items(),
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
            *((f"edp_{axis}", group) for axis, group in vars(experts.nodes).items()),
        ]
    named.append(("holders", groups.holders))
    if groups.experts is not None:
        named.append(("edp_holders", groups.experts.holders))
    yield from ((axis, group) for axis, group in named if group is not None)
